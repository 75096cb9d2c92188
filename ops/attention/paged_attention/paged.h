// The kernels of paged_attention, one for each type of rows and of the cache.
#pragma once

#include "cpu/attention/batch.h"
#include "cpu/calls.h"

#define GRAPHLLM_PAGED_ATTENTION(name, T, C)                                                                          \
  extern "C" void name(const void* q, const void* k, const void* v, void* cache, const void* table,                   \
                       const void* starts, const void* lengths, void* out, std::int64_t tokens, std::int64_t S,       \
                       std::int64_t H, std::int64_t K, std::int64_t E, std::int64_t P, std::int64_t q_token,          \
                       std::int64_t q_head, std::int64_t k_token, std::int64_t k_head, std::int64_t v_token,          \
                       std::int64_t v_head, std::int64_t cache_block, std::int64_t cache_kind,                        \
                       std::int64_t cache_head, std::int64_t cache_slot, std::int64_t table_stride, double scale,     \
                       std::int64_t window, double softcap, const void* sinks, const void* kv_scales,                 \
                       const void* ancestors, std::int64_t invariant) {                                               \
    using Number = graphllm::T;                                                                                       \
    using Entry = graphllm::C;                                                                                        \
    const auto* scales = static_cast<const float*>(kv_scales);                                                        \
    const float key_scale = scales ? scales[0] : 1, value_scale = scales ? scales[1] : 1;                             \
    graphllm::attend<Number, Entry>({{E, E, P, cache_block, cache_kind, cache_head, cache_slot}, static_cast<const       \
        Number*>(q), static_cast<const Number*>(k), static_cast<const Number*>(v), static_cast<Entry*>(cache),        \
        static_cast<const std::int32_t*>(table), static_cast<const std::int32_t*>(starts), static_cast<const          \
        std::int32_t*>(lengths), static_cast<Number*>(out), tokens, S, H, K, q_token, q_head, k_token, k_head,        \
        v_token, v_head, table_stride, float(scale) * key_scale, window, float(softcap), static_cast<const            \
        Number*>(sinks), key_scale, value_scale, static_cast<const std::int64_t*>(ancestors), 0, invariant != 0});  \
  }                                                                                                                 \
  GRAPHLLM_KERNEL(name)
