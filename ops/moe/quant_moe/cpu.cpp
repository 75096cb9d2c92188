// quant_moe: fused_moe with packed integers and scales in the place of the experts' matrices.
//
// As in fused_moe, experts and blocks of their rows are one list that threads share, so that every chosen expert is read once.
// As in quant_linear, rows of x, and then the hidden rows, are rounded to int8 in the groups of the weights; with AMX,
// experts that many rows chose take them as they are. A gate's block and the one of its ups are read side by side, and are
// activated while they are in registers.
#include <type_traits>

#include "cpu/calls.h"
#include "cpu/experts.h"
#include "cpu/experts_lora.h"
#include "cpu/integers/blocks.h"
#include "cpu/integers/panels.h"
#include "cpu/integers/rows.h"

namespace graphllm {
namespace {

constexpr i64 kPartBytes = 256 << 10;  // of weights that a thread takes at least at a time
constexpr i64 kMinBytes = 64 << 10;    // less weight than this is not worth waking another thread

// The matrices [rows, inner] of all experts, and what is added to their products.
template <typename F, typename T>
struct Stack {
  const std::uint8_t* values;
  const bf16* scales;
  const T* bias;
  i64 rows, inner;
  i64 groups = ceil_div(inner, F::group), blocks = ceil_div(rows, kRows), block_bytes = groups * F::lines * kLine;

  // From that block of rows of an expert on.
  IntMatrix at(i64 expert, i64 block) const {
    const i64 number = expert * blocks + block;
    return {values + number * block_bytes, scales + number * groups * kRows, inner};
  }
  const T* bias_at(i64 expert, i64 row) const { return bias ? bias + expert * rows + row : nullptr; }
  i64 least() const { return std::max<i64>(1, kPartBytes / (kBlock / kRows * block_bytes)); }
};

// Whether an expert takes its rows as they are.
template <typename T>
bool keeps_x(const Group& g) {
#ifdef GRAPHLLM_AMX
  return std::is_same_v<T, bf16> && g.count >= kMany && amx_granted();
#else
  return false;
#endif
}

// Rows [pairs, K], sorted by expert, as int8; the rows of one expert lie side by side.
template <typename F, typename T>
struct Rounded {
  const T* rows;
  char* data;
  i64 K, groups = ceil_div(K, F::group);

  Quantized<F> of(const Group& g) const { return {data + Quantized<F>::bytes(g.from, groups), g.count, groups}; }
  // Those in `mine` of the experts that want them so.
  void make(const std::vector<Group>& of_experts, Range mine) const {
    for (const Group& g : of_experts) {
      const Range part{std::max(mine.from, g.from) - g.from, std::min(mine.to, g.from + g.count) - g.from};
      if (part.from < part.to && !keeps_x<T>(g)) quantize_rows(rows + g.from * K, K, K, of(g), part);
    }
  }
};

// Products of a stack's rows, from block `first` of 16 on, as bfloat16 with float32 sums.
template <typename F>
void keep(const Stack<F, bf16>& w, const Group& g, i64 first, i64 rows, Range mine, const bf16* x, bf16* out, i64 stride) {
#ifdef GRAPHLLM_AMX
  const Product a{x + g.from * w.inner, nullptr, w.bias_at(g.expert, first * kRows), out + g.from * stride,
                  g.count, rows, w.inner, w.inner, 0, stride, false};
  const IntMatrix matrix = w.at(g.expert, first);
  const auto pack = [&](const Panel& panel, i64 k0, i64 depth, bf16* to) { unpack<F>(matrix, panel, k0, depth, to); };
  panels<AmxTile>(a, {0, g.count}, {mine.from / kPanel, ceil_div(mine.to, kPanel)}, pack);
#endif
}

// Hidden rows [pairs, size] of an expert, entries `mine`, from a multiple of kBlock on.
template <typename F, typename T>
void hide(const Stack<F, T>& w, const Group& g, i64 size, Range mine, const Quantized<F>& x, T* h, Activation kind,
          float limit, const ExpertsLora<T>& lora) {
  const bool gated = parts_of(kind) == 2;
  const i64 ups = gated ? size / kRows : 0;
  const auto finish = [&](i64 m, i64 block, Vec gate, Vec up) {
    const i64 n = block * kRows;
    if (w.bias) gate += load_vec(w.bias_at(g.expert, n));
    if (w.bias && gated) up += load_vec(w.bias_at(g.expert, size + n));
    if (lora.entry(g.from + m) > 0) {
      gate += lora.delta(g.from + m, g.expert, 0, n, kRows);
      if (gated) up += lora.delta(g.from + m, g.expert, 1, n, kRows);
    }
    const Vec made = activate(gate, up, kind, limit);
    for (i64 i = 0; i < kRows; i++) store(h + (g.from + m) * size + n + i, made[i]);
  };
  Vec gate[kTile], up[kTile] = {};
  for (i64 block = mine.from / kRows; block * kRows < mine.to; block++) {
    const IntMatrix a = w.at(g.expert, block), b = w.at(g.expert, ups + block);
    for (i64 m0 = 0; m0 < g.count; m0 += x.tile_rows) {
      const i64 width = x.width(m0);
      if constexpr (kStreams == 2)
        if (gated && width == 1) {
          Vec both[2];
          block_rows<F, 1, 2>(a.values, b.values - a.values, a.scales, b.scales - a.scales, x.tile(m0), w.groups, both);
          finish(m0, block, both[0], both[1]);
          continue;
        }
      some_rows<F, kTile>(a.values, a.scales, x.tile(m0), w.groups, gate, width);
      if (gated) some_rows<F, kTile>(b.values, b.scales, x.tile(m0), w.groups, up, width);
      for (i64 m = 0; m < width; m++) finish(m0 + m, block, gate[m], up[m]);
    }
  }
}

// What an expert gives, [pairs, w.rows], entries `mine`, from a multiple of kBlock on.
template <typename F, typename T>
void give(const Stack<F, T>& w, const Group& g, Range mine, const Quantized<F>& h, T* y, const ExpertsLora<T>& lora) {
  const auto finish = [&](i64 m, i64 block, Vec sum) {
    const i64 n = block * kRows, valid = std::min(kRows, w.rows - n);
    if (w.bias) sum += load_some(w.bias_at(g.expert, n), valid);
    if (lora.entry(g.from + m) > 0) sum += lora.delta(g.from + m, g.expert, 0, n, valid);
    for (i64 i = 0; i < valid; i++) store(y + (g.from + m) * w.rows + n + i, sum[i]);
  };
  const i64 end = ceil_div(mine.to, kRows);
  i64 block = mine.from / kRows;
  Vec totals[kTile];
  if (kStreams > 1 && g.count == 1) {
    const i64 apart = (end - block) / kStreams, middle = block + apart;
    for (; block < middle; block++) {
      const IntMatrix a = w.at(g.expert, block), b = w.at(g.expert, block + apart);
      block_rows<F, 1, kStreams>(a.values, b.values - a.values, a.scales, b.scales - a.scales, h.tile(0), w.groups, totals);
      for (int s = 0; s < kStreams; s++) finish(0, block + s * apart, totals[s]);
    }
    block += (kStreams - 1) * apart;
  }
  for (; block < end; block++) {
    const IntMatrix a = w.at(g.expert, block);
    for (i64 m0 = 0; m0 < g.count; m0 += h.tile_rows) {
      const i64 width = h.width(m0);
      some_rows<F, kTile>(a.values, a.scales, h.tile(m0), w.groups, totals, width);
      for (i64 m = 0; m < width; m++) finish(m0 + m, block, totals[m]);
    }
  }
}

template <typename F, typename T>
void moe(const T* x, const Stack<F, T>& in, const Stack<F, T>& down, const float* weights, const std::int32_t* experts,
         T* out, i64 tokens, i64 A, i64 N, i64 x_stride, Activation kind, float limit, const LoraTables& lora) {
  static thread_local Scratch rows_scratch, halves_scratch, h_scratch, y_scratch, x_ints, h_ints, first_low, second_low;
  const i64 D = in.inner, F_ = down.inner, parts = parts_of(kind);
  const Sorted sorted(experts, tokens, A, N);
  const i64 pairs = i64(sorted.token.size()), count = i64(sorted.groups.size());
  bool keeps = false;
  for (const Group& g : sorted.groups) keeps |= keeps_x<T>(g);
  T* rows = rows_scratch.get<T>(pairs * D);
  T* h = h_scratch.get<T>(pairs * F_);
  T* y = y_scratch.get<T>(pairs * D);
  T* halves = keeps ? halves_scratch.get<T>(pairs * parts * F_) : nullptr;
  const Rounded<F, T> x_rounded{rows, x_ints.get<char>(Quantized<F>::bytes(pairs, in.groups)), D};
  const Rounded<F, T> h_rounded{h, h_ints.get<char>(Quantized<F>::bytes(pairs, down.groups)), F_};
  const ExpertsLora<T> of_halves = lora.first<T>(sorted, first_low, N, D, F_, parts);
  const ExpertsLora<T> of_down = lora.second<T>(sorted, second_low, N, D, F_);
  const i64 bytes = count * (in.blocks * in.block_bytes + down.blocks * down.block_bytes);
  const int threads = int(std::min<i64>(omp_get_max_threads(), std::max<i64>(1, bytes / kMinBytes)));
  Shares first(count * ceil_div(F_, kBlock), std::max<i64>(1, in.least() / parts), threads);
  Shares second(count * ceil_div(D, kBlock), down.least(), threads);
#pragma omp parallel num_threads(threads)
  {
    const Range mine = share(pairs);
    for (i64 p = mine.from; p < mine.to; p++) std::memcpy(rows + p * D, x + sorted.token[p] * x_stride, D * sizeof(T));
    of_halves.shrink(rows, mine);
    x_rounded.make(sorted.groups, mine);
#pragma omp barrier
    each_block(first, sorted.groups, F_, [&](const Group& g, Range part) {
      if (!keeps_x<T>(g)) return hide(in, g, F_, part, x_rounded.of(g), h, kind, limit, of_halves);
      if constexpr (std::is_same_v<T, bf16>) {
        for (i64 half = 0; half < parts; half++) {
          keep(in, g, half * F_ / kRows, F_, part, rows, halves + half * F_, parts * F_);
          of_halves.add(halves + half * F_, parts * F_, g, half, part);
        }
        activate(halves, h, g, F_, part, kind, limit);
      }
    });
#pragma omp barrier
    of_down.shrink(h, mine);
    h_rounded.make(sorted.groups, mine);
#pragma omp barrier
    each_block(second, sorted.groups, D, [&](const Group& g, Range part) {
      if (!keeps_x<T>(g)) return give(down, g, part, h_rounded.of(g), y, of_down);
      if constexpr (std::is_same_v<T, bf16>) {
        keep(down, g, 0, D, part, h, y, D);
        of_down.add(y, D, g, 0, part);
      }
    });
#pragma omp barrier
    combine(sorted, y, weights, out, tokens, A, D);
  }
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_QUANT_MOE(name, format, T)                                                                              \
  extern "C" void graphllm_quant_moe_##name(                                                                             \
      const void* x, const void* gate_up, const void* gate_up_scales, const void* down, const void* down_scales,         \
      const void* weights, const void* experts, const void* gate_up_bias, const void* down_bias, const void* gate_up_a,  \
      const void* gate_up_b, const void* down_a, const void* down_b, const void* ids, void* out,                         \
      std::int64_t tokens, std::int64_t A, std::int64_t N, std::int64_t D, std::int64_t F, std::int64_t x_stride,        \
      std::int64_t activation, double limit, std::int64_t rank) {                                                        \
    using namespace graphllm;                                                                                            \
    if (tokens <= 0) return;                                                                                             \
    moe<format, T>(static_cast<const T*>(x),                                                                             \
                   {static_cast<const std::uint8_t*>(gate_up), static_cast<const bf16*>(gate_up_scales),                 \
                    static_cast<const T*>(gate_up_bias), parts_of(Activation(activation)) * F, D},                                                    \
                   {static_cast<const std::uint8_t*>(down), static_cast<const bf16*>(down_scales),                       \
                    static_cast<const T*>(down_bias), D, F},                                                             \
                   static_cast<const float*>(weights), static_cast<const std::int32_t*>(experts), static_cast<T*>(out),  \
                   tokens, A, N, x_stride, Activation(activation), float(limit),                                         \
                   {gate_up_a, gate_up_b, down_a, down_b, static_cast<const std::int32_t*>(ids), rank});                 \
  }                                                                                                                      \
  GRAPHLLM_KERNEL(graphllm_quant_moe_##name)
GRAPHLLM_QUANT_MOE(int8_bf16, Int8, bf16)
GRAPHLLM_QUANT_MOE(int8_f32, Int8, f32)
GRAPHLLM_QUANT_MOE(int4_bf16, Int4, bf16)
GRAPHLLM_QUANT_MOE(int4_f32, Int4, f32)
