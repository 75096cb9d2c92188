// linear in float32: out [M, N] = x [M, K] times weight [N, K] transposed, plus bias [N].
//
// Up to kDotRows rows of x: dot products of some rows of each, so that the weights are read once and as they lie. Some more,
// with AVX-512: x is packed, and the weights are read once as they lie. Many: panels of two registers of weight rows, packed
// on the way as [k][2 registers], times tiles of rows of x; sums of further parts of k are kept in `out`. What is needed next
// is asked for: weights of a model come from memory.
#include <array>
#include <utility>

#include "cpu/calls.h"
#include "cpu/threads.h"
#include "cpu/vectors.h"

namespace graphllm {
namespace {

constexpr i64 kPanel = 2 * kRegLanes;
#ifdef GRAPHLLM_AVX512
constexpr int kTileRows = 14, kDotX = 4, kDotW = 4;  // of 32 registers
#else
constexpr int kTileRows = 6, kDotX = 2, kDotW = 4;  // of 16
#endif
constexpr i64 kDotRows = 6;
constexpr i64 kDepth = 512;               // values of k of a panel: a tile's rows of x stay in the first-level cache
constexpr i64 kGroupBytes = 384 << 10;    // of panels, which stay in the second-level cache
constexpr i64 kFewRows = 64;              // with as many rows of x a panel at a time is packed
constexpr i64 kAskers = 4;                // tiles at the end that ask for the weights that are packed next
constexpr i64 kMinBytes = 128 << 10;      // less weight than this is not worth waking another thread

struct FloatProduct {
  const float *x, *weight, *bias;
  float* out;
  i64 M, N, K, x_stride, weight_stride;
};

inline Reg load(const float* from) {
  Reg out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
inline Reg load_first(const float* from, i64 count) {
  if (count >= kRegLanes) return load(from);
  Reg out{};
  std::memcpy(&out, from, std::max<i64>(0, count) * 4);
  return out;
}
inline void store_first(float* to, Reg x, i64 count) {
  std::memcpy(to, &x, std::clamp<i64>(count, 0, kRegLanes) * 4);
}
// x * y + z, rounded once. Written as two operations it may be rounded twice: for some processors gcc keeps them apart where sums
// are few.
inline Reg times_plus(Reg x, Reg y, Reg z) {
#ifdef GRAPHLLM_AVX512
  return (Reg)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__)
  return (Reg)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#else
  return x * y + z;
#endif
}
inline float sum(Reg x) {
  float out = 0;
  for (i64 i = 0; i < kRegLanes; i++) out += x[i];
  return out;
}

// Outputs of kRowsX rows of x from m on and kRowsW weight rows from n on. ask: for the weight rows after these.
// kInvariant: each is summed in the same order, whatever kRowsX and kRowsW.
template <int kRowsX, int kRowsW, bool kInvariant>
void dots(const FloatProduct& a, i64 m, i64 n, bool ask) {
  const float *x = a.x + m * a.x_stride, *w = a.weight + n * a.weight_stride;
  Reg acc[kRowsX][kRowsW] = {};
  auto add = [&](auto read, i64 k) __attribute__((always_inline)) {
    Reg left[kRowsX];
#pragma GCC unroll 8
    for (int i = 0; i < kRowsX; i++) left[i] = read(x + i * a.x_stride + k);
#pragma GCC unroll 8
    for (int j = 0; j < kRowsW; j++) {
      const Reg right = read(w + j * a.weight_stride + k);
#pragma GCC unroll 8
      for (int i = 0; i < kRowsX; i++) acc[i][j] = kInvariant ? times_plus(left[i], right, acc[i][j]) : acc[i][j] + left[i] * right;
    }
  };
  i64 k = 0;
  for (; k + kRegLanes <= a.K; k += kRegLanes) {
    if (ask)
#pragma GCC unroll 8
      for (int j = 0; j < kRowsW; j++) __builtin_prefetch(w + (kRowsW + j) * a.weight_stride + k, 0, 3);
    add([](const float* from) { return load(from); }, k);
  }
  if (k < a.K) add([&](const float* from) { return load_first(from, a.K - k); }, k);
  // `sum` is added up as the compiler likes, in another order for other kRowsX and kRowsW.
  if constexpr (kInvariant || kRowsX * kRowsW == 16) {
    alignas(64) float sums[kRegLanes];
#ifdef GRAPHLLM_AVX512
    __m512 all[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      all[i] = i < kRowsX * kRowsW ? (__m512)acc[i / kRowsW % kRowsX][i % kRowsW] : _mm512_setzero_ps();
    _mm512_store_ps(sums, add_lanes(all));
#else
    Eight all[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) all[i] = i < kRowsX * kRowsW ? acc[i / kRowsW % kRowsX][i % kRowsW] : Eight{};
    store8(sums, add_lanes(all));
#endif
    for (int i = 0; i < kRowsX; i++)
      for (int j = 0; j < kRowsW; j++)
        a.out[(m + i) * a.N + n + j] = sums[i * kRowsW + j] + (a.bias ? a.bias[n + j] : 0.0f);
    return;
  }
  for (int i = 0; i < kRowsX; i++)
    for (int j = 0; j < kRowsW; j++)
      a.out[(m + i) * a.N + n + j] = sum(acc[i][j]) + (a.bias ? a.bias[n + j] : 0.0f);
}

// Rows of x from m on, before `end`, times kRowsW weight rows.
template <int kRowsW, bool kInvariant = false>
void rows_of(const FloatProduct& a, i64 m, i64 end, i64 n) {
  bool ask = m == 0;
  for (; m + kDotX <= end; m += kDotX, ask = false) dots<kDotX, kRowsW, kInvariant>(a, m, n, ask);
  for (; m + 2 <= end; m += 2, ask = false) dots<2, kRowsW, kInvariant>(a, m, n, ask);
  for (; m < end; m++, ask = false) dots<1, kRowsW, kInvariant>(a, m, n, ask);
}

// By dot products. kInvariant: also many rows of x, as many at a time as stay in the second-level cache.
template <bool kInvariant>
void few(const FloatProduct& a, Range mine) {
  const i64 some = kInvariant ? std::max<i64>(kDotX, kGroupBytes / (8 * a.K) / kDotX * kDotX) : a.M;
  for (i64 m = 0; m < a.M; m += some) {
    const i64 end = std::min(a.M, m + some);
    i64 n = mine.from;
    for (; n + kDotW <= mine.to; n += kDotW) rows_of<kDotW, kInvariant>(a, m, end, n);
    for (; n < mine.to; n++) rows_of<1, kInvariant>(a, m, end, n);
  }
}

#ifdef GRAPHLLM_AVX512
// Four columns of 16 rows as four rows. Pieces of rows are put side by side as they are loaded, so that half of a
// transposition's shuffles are not needed.
inline void transpose4(const float* from, i64 stride, float* to) {
  __m512 r[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_castps128_ps512(_mm_loadu_ps(from + i * stride));
    r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps(from + (i + 4) * stride), 1);
    r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps(from + (i + 8) * stride), 2);
    r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps(from + (i + 12) * stride), 3);
  }
  const __m512d low01 = (__m512d)_mm512_unpacklo_ps(r[0], r[1]), high01 = (__m512d)_mm512_unpackhi_ps(r[0], r[1]);
  const __m512d low23 = (__m512d)_mm512_unpacklo_ps(r[2], r[3]), high23 = (__m512d)_mm512_unpackhi_ps(r[2], r[3]);
  _mm512_store_ps(to, (__m512)_mm512_unpacklo_pd(low01, low23));
  _mm512_store_ps(to + kPanel, (__m512)_mm512_unpackhi_pd(low01, low23));
  _mm512_store_ps(to + 2 * kPanel, (__m512)_mm512_unpacklo_pd(high01, high23));
  _mm512_store_ps(to + 3 * kPanel, (__m512)_mm512_unpackhi_pd(high01, high23));
}
#endif

#ifdef GRAPHLLM_AVX512
// Some rows of x: their transpose is packed in place of the weights, sixteen or 32 rows side by side, and weights are
// taken one number of each of kSomeW rows at a time, as they lie. The rows that are left over are dot products.
constexpr int kSomeW = 12;
constexpr i64 kSomeRows = 47, kLeft = 4;

// kVectors times 16 rows of x from m on, xt is [K][16 kVectors] of them, and kSomeW weight rows from n on.
template <int kVectors>
void some_tile(const FloatProduct& a, const float* xt, i64 m, i64 n, bool ask) {
  const float* w = a.weight + n * a.weight_stride;
  Reg acc[kSomeW][kVectors] = {};
  auto add = [&](i64 k) __attribute__((always_inline)) {
    Reg right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) right[v] = load(xt + (k * kVectors + v) * 16);
#pragma GCC unroll 16
    for (int j = 0; j < kSomeW; j++) {
      const Reg left = w[j * a.weight_stride + k] - Reg{};
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) acc[j][v] += left * right[v];
    }
  };
  i64 k = 0;
  for (; k + 16 <= a.K; k += 16) {
    if (ask)
      for (int j = 0; j < kSomeW; j++) __builtin_prefetch(w + (kSomeW + j) * a.weight_stride + k, 0, 3);
    for (i64 i = 0; i < 16; i++) add(k + i);
  }
  for (; k < a.K; k++) add(k);
  Reg bias{};
  if (a.bias) std::memcpy(&bias, a.bias + n, kSomeW * 4);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; v++) {
    __m512i r[16];
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) r[j] = j < kSomeW ? (__m512i)acc[j < kSomeW ? j : 0][v] : _mm512_setzero_si512();
    transpose16(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      _mm512_mask_storeu_ps(a.out + (m + v * 16 + i) * a.N + n, first16(kSomeW), (__m512)((Reg)r[i] + bias));
  }
}

void some(const FloatProduct& a, Range mine) {
  static thread_local Scratch scratch;
  const i64 vectors = a.M / 16, lanes = vectors * 16;
  float* xt = scratch.get<float>(a.K * lanes);
  for (i64 v = 0; v < vectors; v++) {
    i64 k = 0;
    for (; k + 16 <= a.K; k += 16) {
      __m512i r[16];
      for (i64 i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(a.x + (v * 16 + i) * a.x_stride + k);
      transpose16(r);
      for (i64 i = 0; i < 16; i++) _mm512_store_si512(xt + (k + i) * lanes + v * 16, r[i]);
    }
    for (; k < a.K; k++)
      for (i64 i = 0; i < 16; i++) xt[k * lanes + v * 16 + i] = a.x[(v * 16 + i) * a.x_stride + k];
  }
  i64 n = mine.from;
  for (; n + kSomeW <= mine.to; n += kSomeW) {
    vectors == 2 ? some_tile<2>(a, xt, 0, n, true) : some_tile<1>(a, xt, 0, n, true);
    for (i64 j = 0; j < kSomeW; j += 4) rows_of<4>(a, lanes, a.M, n + j);
  }
  for (; n < mine.to; n++) rows_of<1>(a, 0, a.M, n);
}

// Whether that suits this number of rows.
bool some_rows(i64 M) { return M >= 16 && M <= kSomeRows && M % 16 <= kLeft; }
#endif

// Weight rows n .. n + kPanel for k in [k0, k0 + depth) as [depth][kPanel], zero after the last row.
void pack(const FloatProduct& a, i64 n, i64 k0, i64 depth, float* to) {
  for (i64 h = 0; h < kPanel; h += kRegLanes) {
    const i64 rows = std::clamp<i64>(a.N - n - h, 0, kRegLanes);
    const float* from = a.weight + (n + h) * a.weight_stride + k0;
    i64 k = 0;
    if (rows == kRegLanes)
      for (; k + kRegLanes <= depth; k += kRegLanes) {
#ifdef GRAPHLLM_AVX512
#pragma GCC unroll 4
        for (int c = 0; c < 16; c += 4) transpose4(from + k + c, a.weight_stride, to + (k + c) * kPanel + h);
#else
        Eight r[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) r[i] = load8(from + i * a.weight_stride + k);
        transpose8(r);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) store8(to + (k + i) * kPanel + h, r[i]);
#endif
      }
    for (; k < depth; k++)
      for (i64 i = 0; i < kRegLanes; i++) to[k * kPanel + h + i] = i < rows ? from[i * a.weight_stride + k] : 0.0f;
  }
}

// What a tile is given: rows of x and a panel for `depth` values of k. out: where the first sum goes; valid: columns of it.
// begin: of the first part of k; bias: null but for the last part. ahead: weight rows that are packed next and asked
// for during the product.
struct TileWork {
  const float* x;
  i64 stride, depth;
  const float* panel;
  float* out;
  i64 out_stride, valid;
  bool begin;
  const float *bias, *ahead;
  i64 ahead_stride, ahead_rows;
};

template <int kRows>
void tile(const TileWork& t) {
  Reg acc[kRows][2] = {};
  for (int i = 0; i < kRows; i++) {
    __builtin_prefetch(t.out + i * t.out_stride, 1);
    __builtin_prefetch(t.out + i * t.out_stride + kRegLanes, 1);
  }
  const float* panel = t.panel;
  auto add = [&](i64 k) __attribute__((always_inline)) {
    const Reg w0 = load(panel), w1 = load(panel + kRegLanes);
    panel += kPanel;
#pragma GCC unroll 16
    for (int i = 0; i < kRows; i++) {
      const Reg row = t.x[i * t.stride + k] - Reg{};
      acc[i][0] += row * w0;
      acc[i][1] += row * w1;
    }
  };
  i64 k = 0;
  for (; k + 16 <= t.depth; k += 16) {
    for (i64 r = 0; r < t.ahead_rows; r++) __builtin_prefetch(t.ahead + r * t.ahead_stride + k, 0, 3);
    for (i64 i = 0; i < 16; i++) add(k + i);
  }
  for (; k < t.depth; k++) add(k);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; i++)
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      const i64 count = t.valid - h * kRegLanes;
      float* to = t.out + i * t.out_stride + h * kRegLanes;
      Reg sums = acc[i][h];
      if (!t.begin) sums += load_first(to, count);
      if (t.bias) sums += load_first(t.bias + h * kRegLanes, count);
      store_first(to, sums, count);
    }
}

using TileFunction = void (*)(const TileWork&);
template <int... kCounts>
constexpr auto tile_functions(std::integer_sequence<int, kCounts...>) {
  return std::array<TileFunction, sizeof...(kCounts)>{&tile<kCounts + 1>...};
}

// Rows `mine` of x times the panels of that range.
void many(const FloatProduct& a, Range mine, Range range) {
  static constexpr auto functions = tile_functions(std::make_integer_sequence<int, kTileRows>());
  static thread_local Scratch scratch;
  const i64 M = mine.to - mine.from, tiles = ceil_div(M, kTileRows), all = range.to - range.from;
  if (M <= 0 || all <= 0) return;
  const i64 depth = ceil_div(a.K, ceil_div(a.K, kDepth));
  // Few rows of x stay in the cache, so that panels can come and go one by one.
  const i64 most = M <= kFewRows ? 1 : std::max<i64>(1, kGroupBytes / (depth * kPanel * 4));
  const i64 group = ceil_div(all, ceil_div(all, most)), askers = std::min(tiles, kAskers);
  float* packed = scratch.get<float>(group * depth * kPanel);
  for (i64 first = range.from; first < range.to; first += group)
    for (i64 k0 = 0; k0 < a.K; k0 += depth) {
      const i64 count = std::min(group, range.to - first), inside = std::min(depth, a.K - k0);
      for (i64 g = 0; g < count; g++) pack(a, (first + g) * kPanel, k0, inside, packed + g * depth * kPanel);
      const bool end = k0 + depth >= a.K;
      for (i64 t = 0; t < tiles; t++) {  // equal ones: 16 rows are two of eight, not 14 and two
        const i64 from = mine.from + M * t / tiles, rows = mine.from + M * (t + 1) / tiles - from;
        for (i64 g = 0; g < count; g++) {
          const i64 n = (first + g) * kPanel, next = end ? n + group * kPanel : n, k1 = end ? 0 : k0 + depth;
          const i64 turn = t - (tiles - askers), there = std::clamp<i64>(a.N - next, 0, kPanel);
          const i64 ask = turn < 0 || next >= range.to * kPanel ? 0 : there * turn / askers;
          const i64 asked = turn < 0 || next >= range.to * kPanel ? 0 : there * (turn + 1) / askers - ask;
          functions[rows - 1]({a.x + from * a.x_stride + k0, a.x_stride, inside, packed + g * depth * kPanel,
                               a.out + from * a.N + n, a.N, std::min(kPanel, a.N - n), k0 == 0,
                               end && a.bias ? a.bias + n : nullptr,
                               a.weight + (next + ask) * a.weight_stride + k1, a.weight_stride, asked});
        }
      }
    }
}

}  // namespace
}  // namespace graphllm

extern "C" void graphllm_linear_float(const void* x, const void* weight, const void* bias, void* out, std::int64_t M,
                                      std::int64_t N, std::int64_t K, std::int64_t x_stride,
                                      std::int64_t weight_stride, std::int64_t invariant) {
  using namespace graphllm;
  if (M <= 0 || N <= 0) return;
  const FloatProduct a{static_cast<const float*>(x), static_cast<const float*>(weight), static_cast<const float*>(bias),
                       static_cast<float*>(out), M, N, K, x_stride, weight_stride};
  const i64 most = std::max<i64>(1, N * K * 4 / kMinBytes);
  const int threads = int(std::min<i64>(omp_get_max_threads(), most));
#pragma omp parallel num_threads(threads)
  {
    const i64 team = omp_get_num_threads(), count = ceil_div(N, kPanel);
    if (invariant || M <= kDotRows) {
      const Range blocks = share(ceil_div(N, kDotW));
      const Range mine{blocks.from * kDotW, std::min(N, blocks.to * kDotW)};
      invariant ? few<true>(a, mine) : few<false>(a, mine);
#ifdef GRAPHLLM_AVX512
    } else if (some_rows(M)) {
      const Range blocks = share(ceil_div(N, kSomeW));
      some(a, {blocks.from * kSomeW, std::min(N, blocks.to * kSomeW)});
#endif
    } else if (count < 8 * team && M >= 4 * kTileRows * team) {  // few panels a thread: the rows are divided instead
      many(a, share(M), {0, count});
    } else {
      many(a, {0, M}, share(count));
    }
  }
}
GRAPHLLM_KERNEL(graphllm_linear_float)
