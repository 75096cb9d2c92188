// Products of many rows of x, for linear and quant_linear: weights become panels on the way, 32 of their rows at a time as
// [k / 2][32] pairs of bfloat16, and these are multiplied by tiles of rows of x. Packing bfloat16 costs 40 cycles a kilobyte, a
// row of x eight, of AMX two. Without bfloat16 instructions a panel is 16 rows as [k][16] floats.
#pragma once

#include <array>
#include <optional>
#include <utility>

#include "cpu/amx.h"
#include "cpu/threads.h"
#include "cpu/vectors.h"

namespace graphllm {
namespace {

// out = x times weight transposed, plus bias. weight: null where only its packing knows it.
struct Product {
  const bf16 *x, *weight, *bias;
  bf16* out;
  i64 M, N, K, x_stride, weight_stride, out_stride;
  bool gated;  // the weight's halves are a gate and a value, and out has N / 2 columns
};

#ifdef GRAPHLLM_AVX512
constexpr i64 kRun = 16;
#else
constexpr i64 kRun = 8;
#endif
constexpr i64 kPanel = 2 * kRun;
constexpr i64 kUnit = 64;  // parts of k are multiples of it, as groups of quantized weights are its divisors

// The weight rows of a panel: two runs; `valid` rows of each exist. With a gate, one run is of each half of the weight.
struct Panel {
  i64 row[2], valid[2];
};
inline Panel panel_at(const Product& a, i64 index) {
  const i64 first = index * (a.gated ? kRun : kPanel), half = a.gated ? a.N / 2 : a.N;
  const i64 second = a.gated ? half + first : first + kRun;
  return {{first, second}, {std::min<i64>(kRun, half - first), std::clamp<i64>(a.N - second, 0, kRun)}};
}

// What a tile is given: `depth` values of k of some rows of x, and of a panel. sums [rows][kPanel] begin where `begin` is, else
// from zero. weights, next_x: rows that a later tile needs, which may be asked for; null for none.
template <typename Packed>
struct TileWork {
  const bf16* x;
  i64 stride, rows, depth;
  const Packed* panel;
  bool begin;
  float* sums;
  const bf16* weights;
  i64 weight_stride;
  const bf16* next_x;
};

#ifdef GRAPHLLM_AVX512

// Dot products of pairs: 14 rows of x take 28 accumulators, two weight vectors and one pair of x at a time. What a tile
// reads next is asked for while the one before it is computed, 16 rows of each.
template <int kRowsOfX>
void dot_tile(const TileWork<bf16>& t) {
  __m512 acc[kRowsOfX][2];
#pragma GCC unroll 16
  for (int i = 0; i < kRowsOfX; i++)
#pragma GCC unroll 16
    for (int h = 0; h < 2; h++) acc[i][h] = t.begin ? _mm512_setzero_ps() : _mm512_loadu_ps(t.sums + i * kPanel + h * 16);
  auto add = [&](i64 k, auto pair_at) __attribute__((always_inline)) {
    const __m512bh w0 = load_pairs(t.panel + k * kPanel), w1 = load_pairs(t.panel + k * kPanel + 32);
#pragma GCC unroll 16
    for (int i = 0; i < kRowsOfX; i++) {
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair_at(t.x + i * t.stride + k));
      acc[i][0] = _mm512_dpbf16_ps(acc[i][0], w0, both);
      acc[i][1] = _mm512_dpbf16_ps(acc[i][1], w1, both);
    }
  };
  auto pair = [](const bf16* at) __attribute__((always_inline)) {
    std::int32_t out;
    std::memcpy(&out, at, 4);
    return out;
  };
  i64 k = 0;
  if (t.weights || t.next_x)
    for (; k + 32 <= t.depth; k += 32)
      for (i64 p = 0; p < 16; p++) {
        if (t.weights) _mm_prefetch(t.weights + p * t.weight_stride + k, _MM_HINT_T1);
        if (t.next_x) _mm_prefetch(t.next_x + p * t.stride + k, _MM_HINT_T1);
        add(k + 2 * p, pair);
      }
  for (; k + 2 <= t.depth; k += 2) add(k, pair);
  // The last pair's second half lies after the row: nobody knows what it is.
  if (k < t.depth) add(k, [](const bf16* at) { return std::int32_t(at->bits); });
#pragma GCC unroll 16
  for (int i = 0; i < kRowsOfX; i++)
#pragma GCC unroll 16
    for (int h = 0; h < 2; h++) _mm512_storeu_ps(t.sums + i * kPanel + h * 16, acc[i][h]);
}

template <int... kCounts>
constexpr auto dot_tiles(std::integer_sequence<int, kCounts...>) {
  return std::array{&dot_tile<kCounts + 1>...};
}

struct DotTile {
  using Packed = bf16;
  static constexpr bool one_by_one = true;
  static constexpr i64 rows = 14;
  static constexpr i64 depth = 1280;             // k values of a panel: 14 rows of x stay near the first-level cache
  static constexpr i64 panel_bytes = 384 << 10;  // panels that stay in the second-level cache, with the rows of x

  // Equal tiles: 16 rows are two of eight, not 14 and two.
  static i64 begin(i64 tile, i64 tiles, i64 count) { return count * tile / tiles; }

  void operator()(const TileWork<bf16>& t) const {
    static constexpr auto functions = dot_tiles(std::make_integer_sequence<int, rows>());
    functions[t.rows - 1](t);
  }
};

#ifdef GRAPHLLM_AMX

// AMX: 32 rows of x times a panel are four tiles of sums, 0 to 3; 4 and 5 hold 16 rows of x each, 6 and 7 halves of the
// panel. Keeping sums in tiles over long parts of k gains more than parts that fit the first-level cache, and asking for
// what comes next costs more than it gains: loads of tiles wait less.
class AmxTile {
 public:
  using Packed = bf16;
  static constexpr bool one_by_one = true;
  static constexpr i64 rows = 32, depth = 2560, panel_bytes = 1 << 20;

  static i64 begin(i64 tile, i64, i64 count) { return std::min(count, tile * rows); }

  void operator()(const TileWork<bf16>& t) {
    if (t.rows != configured_) {
      const int first = int(std::min<i64>(16, t.rows)), second = std::max(1, int(t.rows) - 16);
      tiles_.emplace(Tiles::kWhole, Tiles::Sizes{first, first, second, second, first, second, 16, 16});
      configured_ = t.rows;
    }
    t.rows > 16 ? some<true>(t) : some<false>(t);
  }

 private:
  template <bool kTwo>
  static void some(const TileWork<bf16>& t) {
    constexpr i64 line = kPanel * 4;
    float* second = t.sums + 16 * kPanel;
    if (t.begin) {
      tile_zero<0>(), tile_zero<1>();
      if constexpr (kTwo) tile_zero<2>(), tile_zero<3>();
    } else {
      tile_load<0>(t.sums, line), tile_load<1>(t.sums + 16, line);
      if constexpr (kTwo) tile_load<2>(second, line), tile_load<3>(second + 16, line);
    }
    auto step = [&](const bf16* x, i64 stride, i64 k) __attribute__((always_inline)) {
      tile_load<6>(t.panel + k * kPanel, line);
      tile_load<4>(x, stride * 2);
      tile_product<0, 4, 6>();
      tile_load<7>(t.panel + k * kPanel + 32, line);
      tile_product<1, 4, 7>();
      if constexpr (kTwo) {
        tile_load<5>(x + 16 * stride, stride * 2);
        tile_product<2, 5, 6>();
        tile_product<3, 5, 7>();
      }
    };
    i64 k = 0;
    for (; k + 32 <= t.depth; k += 32) step(t.x + k, t.stride, k);
    if (k < t.depth) {
      alignas(64) bf16 padded[rows * 32];
      for (i64 i = 0; i < t.rows; i++)
        _mm512_store_si512(padded + i * 32, (__m512i)load_pairs(t.x + i * t.stride + k, first32(t.depth - k)));
      step(padded, 32, k);
    }
    tile_store<0>(t.sums, line), tile_store<1>(t.sums + 16, line);
    if constexpr (kTwo) tile_store<2>(second, line), tile_store<3>(second + 16, line);
  }

  std::optional<Tiles> tiles_;
  i64 configured_ = 0;
};

#endif  // GRAPHLLM_AMX

// x / (1 + exp(-x)), to 2e-4.
inline __m512 silu(__m512 x) {
  const Vec e = exp2_vec<false>(-1.442695041f * (Vec)_mm512_abs_ps(x));
  const __m512 part = _mm512_rcp14_ps((__m512)(1.0f + e)), large = _mm512_mul_ps(x, part);
  return _mm512_mask_mul_ps(large, _mm512_movepi32_mask(_mm512_castps_si512(x)), large, (__m512)e);
}

// Sums [rows][32] of a panel as outputs of the rows of x from m on.
void finish_tile(const Product& a, i64 m, i64 rows, const Panel& panel, const float* sums) {
  const __mmask16 valid[2] = {first16(panel.valid[0]), first16(panel.valid[1])};
  __m512 bias[2];
  for (int h = 0; h < 2; h++)
    bias[h] = a.bias ? load16(a.bias + panel.row[h], valid[h]) : _mm512_setzero_ps();
  bf16* to = a.out + m * a.out_stride + panel.row[0];
  for (i64 i = 0; i < rows; i++, to += a.out_stride, sums += kPanel) {
    const __m512 first = _mm512_add_ps(_mm512_load_ps(sums), bias[0]);
    const __m512 second = _mm512_add_ps(_mm512_load_ps(sums + 16), bias[1]);
    if (a.gated) {
      store16(to, _mm512_mul_ps(silu(first), second), valid[0]);
    } else if (panel.valid[1] == 16) {
      _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    } else {
      store16(to, first, valid[0]);
      store16(to + 16, second, valid[1]);
    }
  }
}

#else  // GRAPHLLM_AVX512

// Rows of x, floats at multiples of kStride, times a panel.
template <int kRowsOfX, i64 kStride>
void float_tile(const TileWork<float>& t, const float* x) {
  Eight acc[kRowsOfX][2];
#pragma GCC unroll 8
  for (int i = 0; i < kRowsOfX; i++)
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) acc[i][h] = t.begin ? Eight{} : load8(t.sums + i * kPanel + h * kRun);
  const float* panel = t.panel;
  for (i64 k = 0; k < t.depth; k++, x++, panel += kPanel) {
    const Eight w0 = load8(panel), w1 = load8(panel + kRun);
#pragma GCC unroll 8
    for (int i = 0; i < kRowsOfX; i++) {
      const Eight row = x[i * kStride] - Eight{};
      acc[i][0] += row * w0;
      acc[i][1] += row * w1;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRowsOfX; i++)
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) store8(t.sums + i * kPanel + h * kRun, acc[i][h]);
}

// Six rows of x take twelve of AVX2's sixteen registers, two parts of a panel and a value of x the others. The rows are
// widened once for all panels of a group.
class FloatTile {
 public:
  using Packed = float;
  static constexpr bool one_by_one = false;
  static constexpr i64 rows = 6, depth = 512;
  static constexpr i64 panel_bytes = 256 << 10;  // of panels that stay in the second-level cache

  static i64 begin(i64 tile, i64 tiles, i64 count) { return count * tile / tiles; }

  void operator()(const TileWork<float>& t) {
    if (t.x != held_) hold(t);
    static constexpr std::array functions = {&float_tile<1, depth>, &float_tile<2, depth>, &float_tile<3, depth>,
                                             &float_tile<4, depth>, &float_tile<5, depth>, &float_tile<6, depth>};
    functions[t.rows - 1](t, x_);
  }

 private:
  void hold(const TileWork<float>& t) {
    for (i64 i = 0; i < t.rows; i++) widen_row(t.x + i * t.stride, t.depth, x_ + i * depth);
    held_ = t.x;
  }

  const bf16* held_ = nullptr;
  alignas(64) float x_[rows * depth];
};

// x / (1 + exp(-x)), to 2e-4.
inline Eight silu(Eight x) {
  const Eight e = exp2_vec<false>(-1.442695041f * larger(x, -x)), large = x / (1.0f + e);
  return x < 0.0f ? large * e : large;
}

inline void store_first(bf16* to, Eight x, i64 count) {
  if (count >= kRun) return store8(to, x);
  for (i64 n = 0; n < count; n++) store(to + n, x[n]);
}

// Sums [rows][16] of a panel as outputs of the rows of x from m on.
inline void finish_tile(const Product& a, i64 m, i64 rows, const Panel& panel, const float* sums) {
  Eight bias[2] = {};
  for (int h = 0; h < 2; h++)
    for (i64 n = 0; a.bias && n < panel.valid[h]; n++) bias[h][n] = to_float(a.bias[panel.row[h] + n]);
  bf16* to = a.out + m * a.out_stride;
  for (i64 i = 0; i < rows; i++, to += a.out_stride, sums += kPanel) {
    const Eight first = load8(sums) + bias[0], second = load8(sums + kRun) + bias[1];
    store_first(to + panel.row[0], a.gated ? silu(first) * second : first, panel.valid[0]);
    if (!a.gated) store_first(to + panel.row[1], second, panel.valid[1]);
  }
}

#endif  // GRAPHLLM_AVX512

// Rows `mine` of x times the panels of that range. pack(panel, k0, depth, to): what makes a panel for k in [k0, k0 + depth).
template <typename Tile, typename Pack>
void panels(const Product& a, Range mine, Range range, const Pack& pack) {
  if (mine.from == mine.to || range.from == range.to) return;  // more threads than there is to share
  using Packed = typename Tile::Packed;
  static thread_local Scratch packed_scratch, sums_scratch;
  constexpr i64 sums_size = Tile::rows * kPanel;
  const i64 M = mine.to - mine.from, tiles = ceil_div(M, Tile::rows), all = range.to - range.from;
  const i64 parts = ceil_div(a.K, Tile::depth), depth = ceil_div(ceil_div(a.K, parts), kUnit) * kUnit;
  // Few rows of x stay in the second-level cache, so that panels can come and go one by one, where a tile takes them as
  // they are.
  const bool few = Tile::one_by_one && M * depth * 2 <= Tile::panel_bytes / 2;
  const i64 most = std::max<i64>(1, Tile::panel_bytes / (depth * kPanel * i64(sizeof(Packed))));
  const i64 group = few ? 1 : ceil_div(all, ceil_div(all, most));
  Packed* packed = packed_scratch.get<Packed>(group * depth * kPanel);
  float* sums = sums_scratch.get<float>((parts > 1 ? group * tiles : 1) * sums_size);
  Tile multiply;
  for (i64 first = range.from; first < range.to; first += group) {
    const i64 count = std::min(group, range.to - first);
    for (i64 k0 = 0; k0 < a.K; k0 += depth) {
      const i64 inside = std::min(depth, a.K - k0);
      for (i64 g = 0; g < count; g++)
        pack(panel_at(a, first + g), k0, ceil_div(inside, 32) * 32, packed + g * depth * kPanel);
      const bool more = k0 + depth < a.K;
      for (i64 t = 0; t < tiles; t++) {
        const i64 from = mine.from + Tile::begin(t, tiles, M), rows = mine.from + Tile::begin(t + 1, tiles, M) - from;
        const bf16* x = a.x + from * a.x_stride + k0;
        for (i64 g = 0; g < count; g++) {
          const Panel panel = panel_at(a, first + g);
          // The last two tiles ask for what is packed next: the next part of k, or the panels after these.
          const i64 follows = more ? first + g : first + g + group;
          const bf16* weights = nullptr;
          if (a.weight && t >= tiles - 2 && follows < range.to)
            weights = a.weight + panel_at(a, follows).row[t == tiles - 1] * a.weight_stride + (more ? k0 + depth : 0);
          const bf16* next_x = g == 0 && !few && t + 1 < tiles ? x + rows * a.x_stride : nullptr;
          float* held = sums + (parts > 1 ? (t * group + g) * sums_size : 0);
          if (!more)
            for (i64 i = 0; i < rows; i++) __builtin_prefetch(a.out + (from + i) * a.out_stride + panel.row[0], 1);
          multiply({x, a.x_stride, rows, inside, packed + g * depth * kPanel, k0 == 0, held, weights, a.weight_stride,
                    next_x});
          if (!more) finish_tile(a, from, rows, panel, held);
        }
      }
    }
  }
}

// By all threads.
template <typename Tile, typename Pack>
void panels_by_thread(const Product& a, const Pack& pack) {
  const i64 count = a.gated ? ceil_div(a.N / 2, kRun) : ceil_div(a.N, kPanel), threads = omp_get_num_threads();
  // With few panels a thread, the rows of x are divided instead.
  const bool by_rows = count < 8 * threads && a.M >= 4 * Tile::rows * threads;
  by_rows ? panels<Tile>(a, share(a.M), {0, count}, pack) : panels<Tile>(a, {0, a.M}, share(count), pack);
}

}  // namespace
}  // namespace graphllm
