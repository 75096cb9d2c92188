// fused_moe: rows of x by expert, then two products for each expert that was chosen, and the weighted sum of what they give.
//
// Experts and blocks of their weight rows are one list that threads share, so that every chosen expert is read once, as a
// stream, however many rows it has. bfloat16 products are as in linear: dot products or AMX for few rows, panels for
// many. float32 is for tests and small models: plain loops.
#include "cpu/calls.h"
#include "cpu/experts.h"
#include "cpu/experts_lora.h"
#include "cpu/few_rows.h"
#include "cpu/many_rows.h"
#include "cpu/tiles.h"

namespace graphllm {
namespace {

constexpr i64 kTileRows = 128;         // rows of x that AMX multiplies without packing weights
constexpr i64 kPartBytes = 256 << 10;  // of weights that a thread takes at least at a time
constexpr i64 kMinBytes = 128 << 10;   // less weight than this is not worth waking another thread

// One product of every expert: out rows [.., stride] = x rows [.., K] times weight [N, K] of the expert, plus its bias.
template <typename T>
struct Layer {
  const T *x, *weight, *bias;
  T* out;
  i64 N, K, x_stride, out_stride, weight_stride, expert_stride, bias_stride;
  bool invariant;  // each row is computed independently
};

// Rows [from, to) of the weight of one expert; from is a multiple of kBlock.
void multiply(const Layer<bf16>& l, const Group& g, Range rows) {
  const Product a{l.x + g.from * l.x_stride,
                  l.weight + g.expert * l.expert_stride,
                  l.bias ? l.bias + g.expert * l.bias_stride : nullptr,
                  l.out + g.from * l.out_stride,
                  g.count, l.N, l.K, l.x_stride, l.weight_stride, l.out_stride, false};
#ifdef GRAPHLLM_AMX
  if (a.M <= kTileRows && (a.M > 1 || l.invariant) && amx_granted()) {
    const Range blocks{rows.from / kRows, ceil_div(rows.to, kRows)};
    return l.invariant ? amx<1>(a, blocks) : amx(a, blocks);
  }
  const bool dots = l.invariant && !amx_granted();
#else
  const bool dots = l.invariant;
#endif
  if (a.M <= kDotRows || dots) return FewRows(a, dots)(rows);
  const Range of_panels{rows.from / kPanel, ceil_div(rows.to, kPanel)};
  with_tile(a, [&](auto tile, const auto& pack) { panels<typename decltype(tile)::Kind>(a, {0, a.M}, of_panels, pack); });
}

void multiply(const Layer<float>& l, const Group& g, Range rows) {
  for (i64 n = rows.from; n < rows.to; n++) {
    const float* w = l.weight + g.expert * l.expert_stride + n * l.weight_stride;
    const float bias = l.bias ? l.bias[g.expert * l.bias_stride + n] : 0.0f;
    for (i64 m = g.from; m < g.from + g.count; m++) {
      const float* x = l.x + m * l.x_stride;
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (i64 k = 0; k < l.K; k++) sum += x[k] * w[k];
      l.out[m * l.out_stride + n] = sum + bias;
    }
  }
}

i64 least(i64 row_bytes) { return std::max<i64>(1, kPartBytes / (kBlock * row_bytes)); }

template <typename T>
void moe(const T* x, const T* gate_up, const T* down, const float* weights, const std::int32_t* experts, const T* gate_up_bias,
         const T* down_bias, T* out, i64 tokens, i64 A, i64 N, i64 D, i64 F, i64 x_stride, Activation kind, float limit,
         const LoraTables& lora, bool invariant) {
  static thread_local Scratch rows_scratch, halves_scratch, h_scratch, y_scratch, first_low, second_low;
  const Sorted sorted(experts, tokens, A, N);
  const i64 pairs = i64(sorted.token.size()), count = i64(sorted.groups.size()), parts = parts_of(kind);
  T* rows = rows_scratch.get<T>(pairs * D);
  T* halves = halves_scratch.get<T>(pairs * parts * F);
  T* h = h_scratch.get<T>(pairs * F);
  T* y = y_scratch.get<T>(pairs * D);
  const i64 size = sizeof(T);
  const Layer<T> gates{rows, gate_up, gate_up_bias, halves, F, D, D, parts * F, D, parts * F * D, parts * F, invariant};
  Layer<T> ups = gates;
  ups.weight += F * D, ups.out += F;
  if (ups.bias) ups.bias += F;
  const Layer<T> downs{h, down, down_bias, y, D, F, F, D, F, D * F, D, invariant};
  const ExpertsLora<T> of_halves = lora.first<T>(sorted, first_low, N, D, F, parts);
  const ExpertsLora<T> of_downs = lora.second<T>(sorted, second_low, N, D, F);
  const int threads = int(std::min<i64>(omp_get_max_threads(), std::max<i64>(1, count * (parts + 1) * F * D * size / kMinBytes)));
  Shares first(count * ceil_div(F, kBlock), least(parts * D * size), threads);
  Shares second(count * ceil_div(D, kBlock), least(F * size), threads);
#pragma omp parallel num_threads(threads)
  {
    const Range mine = share(pairs);
    for (i64 p = mine.from; p < mine.to; p++) std::memcpy(rows + p * D, x + sorted.token[p] * x_stride, D * size);
    of_halves.shrink(rows, mine);
#pragma omp barrier
    each_block(first, sorted.groups, F, [&](const Group& g, Range part) {
      for (i64 half = 0; half < parts; half++) {
        multiply(half ? ups : gates, g, part);
        of_halves.add(halves + half * F, parts * F, g, half, part);
      }
      activate(halves, h, g, F, part, kind, limit);
    });
#pragma omp barrier
    if (lora.ids) {
      of_downs.shrink(h, mine);
#pragma omp barrier
    }
    each_block(second, sorted.groups, D, [&](const Group& g, Range part) {
      multiply(downs, g, part);
      of_downs.add(y, D, g, 0, part);
    });
#pragma omp barrier
    combine(sorted, y, weights, out, tokens, A, D);
  }
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_FUSED_MOE(kind, T)                                                                                       \
  extern "C" void graphllm_fused_moe_##kind(                                                                              \
      const void* x, const void* gate_up, const void* down, const void* weights, const void* experts,                     \
      const void* gate_up_bias, const void* down_bias, const void* gate_up_a, const void* gate_up_b, const void* down_a,  \
      const void* down_b, const void* ids, void* out, std::int64_t tokens, std::int64_t A, std::int64_t N,                \
      std::int64_t D, std::int64_t F, std::int64_t x_stride, std::int64_t activation, double limit, std::int64_t rank,    \
      std::int64_t invariant) {                                                                                           \
    using namespace graphllm;                                                                                             \
    if (tokens <= 0) return;                                                                                              \
    moe(static_cast<const T*>(x), static_cast<const T*>(gate_up), static_cast<const T*>(down),                            \
        static_cast<const float*>(weights), static_cast<const std::int32_t*>(experts),                                    \
        static_cast<const T*>(gate_up_bias), static_cast<const T*>(down_bias), static_cast<T*>(out), tokens, A, N, D, F,  \
        x_stride, Activation(activation), float(limit),                                                                   \
        {gate_up_a, gate_up_b, down_a, down_b, static_cast<const std::int32_t*>(ids), rank}, invariant != 0);                           \
  }                                                                                                                                     \
  GRAPHLLM_KERNEL(graphllm_fused_moe_##kind)
GRAPHLLM_FUSED_MOE(bf16, bf16)
GRAPHLLM_FUSED_MOE(f32, float)
