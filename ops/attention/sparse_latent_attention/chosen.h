// sparse_latent_attention: each token of the step is a sequence of its own for the kernel of latent_attention, whose table has
// the chosen tokens as blocks of one token each.
#pragma once

#include <numeric>

#include "attention/latent_attention/latents.h"

namespace graphllm {
namespace {

constexpr i64 kMinChosen = 16 << 10;  // below which a second thread is not worth waking for tables

// chosen: positions of each token's own sequence, [tokens, topk], -1 after the last one; rows are chosen_row apart.
template <typename T, typename C>
void attend_chosen(const LatentArgs<T, C>& a, const std::int32_t* chosen, i64 topk, i64 chosen_row) {
  static thread_local Scratch numbers;
  const i64 used = a.starts[a.S], unit = std::gcd(a.cache_block, a.cache_slot);
  std::int32_t* starts = numbers.get<std::int32_t>(2 * used + 1 + used * topk);
  std::int32_t *lengths = starts + used + 1, *table = lengths + used;
  const auto place = [&](i64 s, i64 position) {
    return a.table[s * a.table_stride + position / a.P] * a.cache_block + position % a.P * a.cache_slot;
  };
  starts[0] = 0;
#pragma omp parallel for if (used * topk > kMinChosen)
  for (i64 t = 0; t < used; t++) {
    static thread_local Scratch scratch;
    const i64 s = std::upper_bound(a.starts, a.starts + a.S + 1, std::int32_t(t)) - a.starts - 1;
    T* row = scratch.get<T>(a.L + a.R);
    std::copy_n(a.latent + t * a.latent_token, a.L, row);
    std::copy_n(a.k_rope + t * a.k_rope_token, a.R, row + a.L);
    write_row(row, a.layout(), 0, 1, a.cache + place(s, a.lengths[s] - (a.starts[s + 1] - t)));
    i64 count = 0;
    for (const std::int32_t* at = chosen + t * chosen_row; count < topk && at[count] >= 0; count++)
      table[t * topk + count] = std::int32_t(place(s, at[count]) / unit);
    starts[t + 1] = std::int32_t(t + 1), lengths[t] = std::int32_t(count);
  }
  LatentArgs<T, C> each = a;
  each.latent = nullptr;
  each.table = table, each.starts = starts, each.lengths = lengths;
  each.S = used, each.P = 1, each.cache_block = unit, each.table_stride = topk;
  attend_latents(each);
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_SPARSE_LATENT_ATTENTION(name, T, C)                                                                   \
  extern "C" void name(const void* q_nope, const void* q_rope, const void* latent, const void* k_rope,                \
                       const void* k_up, const void* v_up, void* cache, const void* table, const void* starts,        \
                       const void* lengths, const void* chosen, void* out, std::int64_t tokens, std::int64_t S,        \
                       std::int64_t H, std::int64_t N, std::int64_t R, std::int64_t L, std::int64_t V, std::int64_t P, \
                       std::int64_t topk, std::int64_t nope_token, std::int64_t nope_head, std::int64_t rope_token,    \
                       std::int64_t rope_head, std::int64_t latent_token, std::int64_t k_rope_token,                   \
                       std::int64_t k_up_head, std::int64_t k_up_row, std::int64_t v_up_head, std::int64_t v_up_row,   \
                       std::int64_t cache_block, std::int64_t cache_slot, std::int64_t table_stride,                   \
                       std::int64_t chosen_row, double scale, std::int64_t invariant) {                                \
    using Number = graphllm::T;                                                                                        \
    using Entries = graphllm::C;                                                                                       \
    using Ids = const std::int32_t*;                                                                                   \
    const auto numbers = [](const void* of) { return static_cast<const Number*>(of); };                                \
    graphllm::attend_chosen<Number, Entries>(                                                                          \
        {numbers(q_nope), numbers(q_rope), numbers(latent), numbers(k_rope), {numbers(k_up), k_up_head, k_up_row},     \
         {numbers(v_up), v_up_head, v_up_row}, static_cast<Entries*>(cache), static_cast<Ids>(table),                  \
         static_cast<Ids>(starts), static_cast<Ids>(lengths), static_cast<Number*>(out), tokens, S, H, N, R, L, V, P,  \
         nope_token, nope_head, rope_token, rope_head, latent_token, k_rope_token, cache_block, cache_slot,            \
         table_stride, float(scale), nullptr, invariant != 0},                                                         \
        static_cast<Ids>(chosen), topk, chosen_row);                                                                   \
  }                                                                                                                    \
  GRAPHLLM_KERNEL(name)
