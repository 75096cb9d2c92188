// store_kv: keys and values go to the cache as paged_attention puts them there.
#include "cpu/attention/batch.h"
#include "cpu/calls.h"

namespace graphllm {
namespace {

template <typename T, typename C>
void store_all(const Args<T, C>& a) {
  for (i64 s = 0; s < a.S; s++) {
    const i64 from = a.starts[s], to = a.starts[s + 1], before = a.lengths[s] - to;
#pragma omp parallel for if ((to - from) * a.K * a.E > kMinWork)
    for (i64 t = from; t < to; t++)
      for (i64 head = 0; head < a.K; head++) a.write(s, t, before + t, head);
  }
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_STORE_KV(name, T, C)                                                                                  \
  extern "C" void name(const void* k, const void* v, void* cache, const void* table, const void* starts,              \
                       const void* lengths, std::int64_t S, std::int64_t K, std::int64_t E, std::int64_t P,            \
                       std::int64_t k_token, std::int64_t k_head, std::int64_t v_token, std::int64_t v_head,           \
                       std::int64_t cache_block, std::int64_t cache_kind, std::int64_t cache_head,                     \
                       std::int64_t cache_slot, std::int64_t table_stride, const void* kv_scales) {                    \
    using Number = graphllm::T;                                                                                        \
    using Entry = graphllm::C;                                                                                         \
    const auto* scales = static_cast<const float*>(kv_scales);                                                         \
    graphllm::store_all<Number, Entry>({{E, E, P, cache_block, cache_kind, cache_head, cache_slot}, nullptr,              \
        static_cast<const Number*>(k), static_cast<const Number*>(v), static_cast<Entry*>(cache), static_cast<const    \
        std::int32_t*>(table), static_cast<const std::int32_t*>(starts), static_cast<const std::int32_t*>(lengths),    \
        nullptr, 0, S, K, K, 0, 0, k_token, k_head, v_token, v_head, table_stride, 0, 0, 0, nullptr,                   \
        scales ? scales[0] : 1, scales ? scales[1] : 1});                                                              \
  }                                                                                                                    \
  GRAPHLLM_KERNEL(name)

GRAPHLLM_STORE_KV(graphllm_store_kv_f32_f32, f32, f32)
GRAPHLLM_STORE_KV(graphllm_store_kv_bf16_bf16, bf16, bf16)
GRAPHLLM_STORE_KV(graphllm_store_kv_f32_e4m3, f32, e4m3)
GRAPHLLM_STORE_KV(graphllm_store_kv_f32_int8, f32, int8)
GRAPHLLM_STORE_KV(graphllm_store_kv_bf16_e4m3, bf16, e4m3)
GRAPHLLM_STORE_KV(graphllm_store_kv_bf16_int8, bf16, int8)
