// record_tokens: each row's token into its slot's state.
#include <algorithm>
#include <cstdint>

#include "cpu/calls.h"

extern "C" void graphllm_record_tokens(const void* tokens, const void* slot, const void* kept_slot, const void* counted,
                                       void* last_token, void* counts, void* out, std::int64_t S, std::int64_t N,
                                       std::int64_t counts_stride) {
  const auto* token = static_cast<const std::int32_t*>(tokens);
  for (std::int64_t s = 0; s < S; s++) {
    const std::int64_t row = static_cast<const std::int32_t*>(slot)[s];
    static_cast<std::int32_t*>(out)[s] = token[s];
    static_cast<std::int32_t*>(last_token)[row] = std::max(token[s], 0);
    const std::int64_t kept = static_cast<const std::int32_t*>(kept_slot)[s];
    if (static_cast<const std::int32_t*>(counted)[s] > 0 && token[s] >= 0 && kept != N - 1)
      static_cast<std::int32_t*>(counts)[kept * counts_stride + token[s]]++;
  }
}
GRAPHLLM_KERNEL(graphllm_record_tokens)
