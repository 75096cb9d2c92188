// ngram_drafts: looks back from the newest token, nearest first.
#include <algorithm>
#include <cstdint>

#include "cpu/calls.h"

extern "C" void graphllm_ngram_drafts(const void* tokens, const void* positions, const void* slots, const void* newest,
                                      void* history, void* drafts, void* runs, std::int64_t R, std::int64_t N,
                                      std::int64_t L, std::int64_t K, std::int64_t smallest, std::int64_t largest,
                                      std::int64_t longest) {
  const auto* token = static_cast<const std::int32_t*>(tokens);
  const auto* position = static_cast<const std::int32_t*>(positions);
  const auto* slot = static_cast<const std::int32_t*>(slots);
  for (std::int64_t r = 0; r < R; r++) {
    const std::int32_t own = static_cast<const std::int32_t*>(newest)[r];
    std::int32_t& run = static_cast<std::int32_t*>(runs)[r];
    run = 0;
    if (own == N - 1) continue;
    std::int32_t* text = static_cast<std::int32_t*>(history) + own * L;
    const std::int64_t end = position[r];
    for (std::int64_t i = std::max<std::int64_t>(r - K, 0); i <= r; i++)
      if (slot[i] == own) text[position[i] % L] = std::max(token[i], 0);

    // Ages of tokens, the newest one's is 0. Those that may be compared are below `looked`.
    const std::int64_t looked = std::min(L - K, end + 1);
    const auto same = [&](std::int64_t age, std::int64_t most) {
      std::int64_t n = 0;
      while (n < most && age + n < looked && text[(end - age - n) % L] == text[(end - n) % L]) n++;
      return n;
    };
    std::int64_t best = 0, back = 0;
    for (std::int64_t age = 1; age < looked && best < largest; age++) {
      const std::int64_t n = same(age, largest);
      if (n >= smallest && n > best) best = n, back = age;
    }
    if (best) run = same(back, longest);
    std::int32_t* guess = static_cast<std::int32_t*>(drafts) + own * K;
    for (std::int64_t i = 0; i < K; i++) guess[i] = best ? text[(end - back + 1 + i % back) % L] : -1;
  }
}
GRAPHLLM_KERNEL(graphllm_ngram_drafts)
