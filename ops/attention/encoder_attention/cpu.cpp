// encoder_attention: paged_attention's items without a cache, over keys and values as they lie in the step's rows.
#include "cpu/attention/batch.h"
#include "cpu/calls.h"

namespace graphllm {
namespace {

// Tokens that see all of their sequence, or `window` on each side. Values that do not lie in rows as keys do, which
// rotary embeddings make anew, are copied into such rows.
template <typename T>
void attend_all(const T* q, const T* k, const T* v, const std::int32_t* starts, T* out, i64 tokens, i64 S, i64 H, i64 K, i64 E,
                i64 q_token, i64 q_head, i64 k_token, i64 k_head, i64 v_token, i64 v_head, float scale, i64 window) {
  static thread_local Scratch scratch, copies;
  std::int32_t* lengths = scratch.get<std::int32_t>(S + 1);
  for (i64 s = 0; s < S; s++) lengths[s] = starts[s + 1] - starts[s];
  if (k_token != v_token || k_head != v_head) {
    T* to = copies.get<T>(tokens * k_token);
#pragma omp parallel for if (tokens * K * E > kMinWork)
    for (i64 t = 0; t < starts[S]; t++)
      for (i64 head = 0; head < K; head++)
        std::memcpy(to + t * k_token + head * k_head, v + t * v_token + head * v_head, E * sizeof(T));
    v = to;
  }
  const i64 apart = (reinterpret_cast<std::intptr_t>(v) - reinterpret_cast<std::intptr_t>(k)) / i64(sizeof(T));
  const Layout rows{E, E, 1, 0, apart, k_head, k_token};
  Args<T, T> a{rows, q, k, v, const_cast<T*>(k), nullptr, starts, lengths, out, tokens, S, H, K, q_token, q_head, k_token,
               k_head, v_token, v_head, 0, scale, window > 0 ? window + 1 : 0, 0, nullptr, 1, 1, nullptr};
  a.ahead = window > 0 ? window : i64(1) << 30;
  attend<T, T>(a);
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_ENCODER_ATTENTION(name, T)                                                                           \
  extern "C" void name(const void* q, const void* k, const void* v, const void* starts, void* out, std::int64_t tokens, \
                       std::int64_t S, std::int64_t H, std::int64_t K, std::int64_t E, std::int64_t q_token,          \
                       std::int64_t q_head, std::int64_t k_token, std::int64_t k_head, std::int64_t v_token,          \
                       std::int64_t v_head,                                                                           \
                       double scale, std::int64_t window) {                                                           \
    using Number = graphllm::T;                                                                                       \
    graphllm::attend_all(static_cast<const Number*>(q), static_cast<const Number*>(k), static_cast<const Number*>(v), \
                         static_cast<const std::int32_t*>(starts), static_cast<Number*>(out), tokens, S, H, K, E,     \
                         q_token, q_head, k_token, k_head, v_token, v_head, float(scale), window);                    \
  }                                                                                                                   \
  GRAPHLLM_KERNEL(name)

GRAPHLLM_ENCODER_ATTENTION(graphllm_encoder_attention_f32, f32)
GRAPHLLM_ENCODER_ATTENTION(graphllm_encoder_attention_bf16, bf16)
