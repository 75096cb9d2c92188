// linear: out [M, N] = x [M, K] times weight [N, K] transposed, plus bias [N]; all bfloat16, float32 inside.
//
// Weights stay in PyTorch's row-major layout, one copy for everything, and threads take contiguous ranges of weight
// rows. Few rows of x: the time is that of reading the weights once, so everything serves the memory stream: dot products,
// some weight rows at a time, or AMX with 16 weight rows as the left operand, loaded straight from memory, and x, which is
// small, packed once per thread as the right operand. Many rows: weights packed on the way, a panel at a time.
#include <array>

#include "cpu_panels.h"

namespace graphllm {
namespace {

constexpr i64 kRows = 16;              // weight rows a block
constexpr int kDotRows = 16;           // rows of x that dot products serve
constexpr int kPassRows = 8;           // of them at once: 16 sums with two weight rows
constexpr i64 kDotBlock = 16;          // weight rows that a thread's share is made of
constexpr i64 kNearBytes = 32 << 10;   // rows of x that stay in the first-level cache
constexpr i64 kBlockRows = 128;        // rows of x that AMX multiplies without packing weights
constexpr i64 kGroup = 64;             // rows of x that one pass over a block serves: four tile accumulators
constexpr i64 kPassBytes = 512 << 10;  // weight blocks that stay in the second-level cache between passes
constexpr i64 kPartBytes = 256 << 10;  // of weights that a thread takes at least at a time for few rows of x
constexpr i64 kMinBytes = 128 << 10;   // less weight than this is not worth waking another thread

using Args = Product;

template <int kIndex>
using Index = std::integral_constant<int, kIndex>;

#ifdef GRAPHLLM_AVX512

// Add the bias to 16 outputs of one row of x and store the valid ones.
inline void finish(const Args& a, i64 m, i64 n, __mmask16 valid, __m512 sum) {
  if (a.bias) sum = _mm512_add_ps(sum, load16(a.bias + n, valid));
  store16(a.out + m * a.out_stride + n, sum, valid);
}

#ifdef GRAPHLLM_AMX

// One row of x against weight rows two at a time, each line asked for some lines ahead, past the row's end in the next two
// rows; loads stand before prefetches in every step.
template <i64 kAhead, _mm_hint kHint>
void dot_pairs(const Args& a, Range rows) {
  constexpr i64 ahead = kAhead * 32;
  for (i64 n = rows.from; n < rows.to; n += 2) {
    const bf16* w = a.weight + n * a.weight_stride;
    const bool two = n + 1 < rows.to;
    const i64 second = two ? a.weight_stride : 0;
    const bf16* next = w + 2 * a.weight_stride;
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    i64 k = 0;
    for (; k + 32 <= a.K; k += 32) {
      const __m512bh w0 = load_pairs(w + k), w1 = load_pairs(w + second + k), x = load_pairs(a.x + k);
      asm volatile("" ::: "memory");
      const bf16* at = k + ahead < a.K ? w + (k + ahead) : next + (k + ahead - a.K);
      _mm_prefetch(at, kHint);
      _mm_prefetch(at + a.weight_stride, kHint);
      asm volatile("" ::: "memory");
      sums[0] = _mm512_dpbf16_ps(sums[0], w0, x);
      sums[1] = _mm512_dpbf16_ps(sums[1], w1, x);
    }
    if (k < a.K) {
      const __mmask32 inside = first32(a.K - k);
      const __m512bh x = load_pairs(a.x + k, inside);
      sums[0] = _mm512_dpbf16_ps(sums[0], load_pairs(w + k, inside), x);
      sums[1] = _mm512_dpbf16_ps(sums[1], load_pairs(w + second + k, inside), x);
    }
    for (i64 i = 0; i <= two; i++) {
      const float sum = _mm512_reduce_add_ps(sums[i]);
      store(a.out + n + i, a.bias ? sum + to_float(a.bias[n + i]) : sum);
    }
  }
}

// On Xeons with AMX, of one to eight weight rows side by side, either cache level, many distances and orders, these read
// fastest: rows of which two lie in a page of 4 KB, and longer ones.
void dot_row(const Args& a, Range rows) {
  a.K <= 1024 ? dot_pairs<28, _MM_HINT_T1>(a, rows) : dot_pairs<40, _MM_HINT_T0>(a, rows);
}

#else

// One row of x: one weight row after the other, each line asked for 64 lines ahead, wherever that is. On an EPYC of the
// fifth generation this reads as fast as a plain read of memory; 28 lines ahead take 5 % more when other machines use that
// memory too, two rows side by side 20 %.
void dot_row(const Args& a, Range rows) {
  constexpr i64 ahead = 64 * 32;
  for (i64 n = rows.from; n < rows.to; n++) {
    const bf16* w = a.weight + n * a.weight_stride;
    __m512 even = _mm512_setzero_ps(), odd = even;
    i64 k = 0;
    for (; k + 64 <= a.K; k += 64) {
      _mm_prefetch(w + k + ahead, _MM_HINT_T0);
      _mm_prefetch(w + k + ahead + 32, _MM_HINT_T0);
      even = _mm512_dpbf16_ps(even, load_pairs(w + k), load_pairs(a.x + k));
      odd = _mm512_dpbf16_ps(odd, load_pairs(w + k + 32), load_pairs(a.x + k + 32));
    }
    for (; k < a.K; k += 32) {
      const __mmask32 inside = first32(a.K - k);
      even = _mm512_dpbf16_ps(even, load_pairs(w + k, inside), load_pairs(a.x + k, inside));
    }
    const float sum = _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
    store(a.out + n, a.bias ? sum + to_float(a.bias[n]) : sum);
  }
}

#endif

// Lines that are asked for while products of some weight rows are computed: in every step one for each row, `by_row` and
// `by_step` elements apart.
struct Ahead {
  const bf16* at;
  i64 by_row, by_step;
};

// kM rows of x from m0 on times kR weight rows side by side, for k in [k0, k1): added to sums [kM][kR].
template <int kM, int kR>
inline __attribute__((always_inline)) void products(const Args& a, i64 m0, const bf16* w, i64 k0, i64 k1, Ahead ahead,
                                                    __m512 (&sums)[16]) {
  const bf16* x = a.x + m0 * a.x_stride;
  auto add = [&](i64 k, __mmask32 inside) __attribute__((always_inline)) {
    __m512bh weights[kR];
#pragma GCC unroll 4
    for (int r = 0; r < kR; r++) weights[r] = load_pairs(w + r * a.weight_stride + k, inside);
#pragma GCC unroll 16
    for (int m = 0; m < kM; m++) {
      const __m512bh row = load_pairs(x + m * a.x_stride + k, inside);
#pragma GCC unroll 4
      for (int r = 0; r < kR; r++) sums[m * kR + r] = _mm512_dpbf16_ps(sums[m * kR + r], weights[r], row);
    }
  };
  i64 k = k0;
  for (; k + 32 <= k1; k += 32, ahead.at += ahead.by_step) {
#pragma GCC unroll 4
    for (int r = 0; r < kR; r++) _mm_prefetch(ahead.at + r * ahead.by_row, _MM_HINT_T0);
    add(k, ~0u);
  }
  if (k < k1) add(k, first32(k1 - k));
}

// Lanes of the sums [kM][kR] added, with bias, as outputs of the rows of x from m0 and the weight rows from n on.
template <int kM, int kR>
inline __attribute__((always_inline)) void finish_rows(const Args& a, i64 m0, i64 n, const __m512 (&sums)[16]) {
  __m512 out = add_lanes(sums);
  if (a.bias) {
    alignas(64) float bias[16] = {};
    for (int i = 0; i < kM * kR; i++) bias[i] = to_float(a.bias[n + i % kR]);
    out = _mm512_add_ps(out, _mm512_load_ps(bias));
  }
  alignas(32) bf16 narrowed[16];
  _mm256_store_si256((__m256i*)narrowed, narrow(out));
#pragma GCC unroll 16
  for (int m = 0; m < kM; m++) std::memcpy(a.out + (m0 + m) * a.out_stride + n, narrowed + m * kR, 2 * kR);
}

// kM rows of x from m0 on, which the first-level cache holds, times kR weight rows from n on, whole.
template <int kM, int kR>
inline __attribute__((always_inline)) void dot_whole(const Args& a, i64 m0, i64 n, Ahead ahead) {
  __m512 sums[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_ps();
  products<kM, kR>(a, m0, a.weight + n * a.weight_stride, 0, a.K, ahead, sums);
  finish_rows<kM, kR>(a, m0, n, sums);
}

// The same for some weight rows, two side by side. Their lines are asked for in the order of addresses.
template <int kM, int kR = 2>
void dot_rows(const Args& a, Range rows) {
  constexpr int first = std::min(kM, kPassRows), rest = kM - first;
  constexpr i64 ahead = 64 * 32;
  i64 n = rows.from;
  for (; n + kR <= rows.to; n += kR) {
    const bf16* w = a.weight + n * a.weight_stride;
    dot_whole<first, kR>(a, 0, n, {w + (kR - 1) * a.weight_stride + ahead, 32, 32 * kR});
    if constexpr (rest > 0) dot_whole<rest, kR>(a, first, n, {w, 0, 0});
  }
  if constexpr (kR > 1)
    if (n < rows.to) dot_rows<kM, 1>(a, {n, rows.to});
}

// Two weight rows, or one, from n on times kM rows of x from m0 on, for k in [k0, k1): the sum of what came before is in
// `held`, and so is the new one until k ends, when it becomes outputs.
template <int kM, int kR>
__attribute__((noinline)) void dot_part(const Args& a, i64 m0, i64 n, i64 k0, i64 k1, Ahead ahead, __m512* held) {
  __m512 sums[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) sums[i] = k0 > 0 && i < kM * kR ? held[i] : _mm512_setzero_ps();
  products<kM, kR>(a, m0, a.weight + n * a.weight_stride, k0, k1, ahead, sums);
  if (k1 == a.K) return finish_rows<kM, kR>(a, m0, n, sums);
#pragma GCC unroll 16
  for (int i = 0; i < kM * kR; i++) held[i] = sums[i];
}

// More of x: parts of k that it holds, for a block of weight rows in turn, two side by side. Asked for are lines of the two
// after them.
template <int kM>
void dot_parts(const Args& a, Range rows) {
  constexpr int first = std::min(kM, kPassRows), rest = kM - first;
  static thread_local Scratch scratch;
  const i64 parts = ceil_div(kM * a.K * 2, kNearBytes / 4 * 3), depth = ceil_div(ceil_div(a.K, parts), 32) * 32;
  const i64 stride = a.weight_stride;
  for (i64 n = rows.from; n < rows.to; n += kDotBlock) {
    const i64 count = std::min(kDotBlock, rows.to - n);
    const bf16* block = a.weight + n * stride;
    for (i64 k0 = 0; k0 < a.K; k0 += depth) {
      const i64 k1 = std::min(a.K, k0 + depth);
      __m512* held = scratch.get<__m512>(kDotBlock * 16);
      auto some = [&](i64 i, auto side) {
        constexpr int kR = decltype(side)::value;
        const bf16* next = i + kR < count ? block + (i + kR) * stride + k0 : k1 < a.K ? block + k1 : block + count * stride;
        dot_part<first, kR>(a, 0, n + i, k0, k1, {next, stride, 32}, held);
        held += 16;
        if constexpr (rest > 0) {
          dot_part<rest, kR>(a, first, n + i, k0, k1, {block + i * stride, 0, 0}, held);
          held += 16;
        }
      };
      i64 i = 0;
      for (; i + 2 <= count; i += 2) some(i, Index<2>());
      if (i < count) some(i, Index<1>());
    }
  }
}

template <int kM = 2>
void dot(const Args& a, Range rows) {
  if constexpr (kM < kDotRows)
    if (a.M > kM) return dot<kM + 1>(a, rows);
  kM * a.K * 2 <= kNearBytes ? dot_rows<kM>(a, rows) : dot_parts<kM>(a, rows);
}

// Up to 16 rows of x.

#endif  // GRAPHLLM_AVX512

#ifdef GRAPHLLM_AMX

// Rows of x as right operands of the tile product: for every 32 values of k, 16 rows of `columns` bf16 pairs.
void pack(const Args& a, i64 m0, i64 rows, i64 columns, bf16* to) {
  __mmask16 stored = first16(columns);
  for (i64 k = 0; k < a.K; k += 32, to += 32 * columns) {
    __mmask32 inside = first32(a.K - k);
    __m512i r[16];
    for (i64 m = 0; m < 16; m++)
      r[m] = m < rows ? (__m512i)load_pairs(a.x + (m0 + m) * a.x_stride + k, inside) : _mm512_setzero_si512();
    transpose16(r);
    for (i64 p = 0; p < 16; p++) _mm512_mask_storeu_epi32(to + p * columns * 2, stored, r[p]);
  }
}

// One block of 16 weight rows times up to 16 * kTiles packed rows of x. Tiles 0-3 accumulate, 4 and 5 hold weights, 6 and
// 7 hold x. With one or two tiles of x, odd and even steps accumulate apart: a product on the same accumulator waits 52
// cycles for the last. cold: the weights come from memory, so ask for them ahead.
template <int kTiles>
void amx_block(const Args& a, const bf16* packed, i64 columns, i64 m0, i64 n0, bool cold) {
  constexpr int kPhases = kTiles <= 2 ? 2 : 1;
  constexpr i64 ahead = 256;
  const i64 rows = std::min(kRows, a.N - n0), tile_size = 32 * columns, tile_gap = ceil_div(a.K, 32) * tile_size;
  const bf16* w = a.weight + n0 * a.weight_stride;

  // Eight of the block's 16 lines for the step ``ahead``, in the block after this one where the rows end. Always inlined:
  // gcc takes a function that only prefetches for one without effect and drops the calls.
  auto fetch = [&](i64 k, i64 first) __attribute__((always_inline)) {
    const i64 next = k + ahead;
    const bf16* at = (next < a.K ? w + next : w + kRows * a.weight_stride + (next - a.K)) + first * a.weight_stride;
    for (int r = 0; r < 8; r++) _mm_prefetch(at + r * a.weight_stride, _MM_HINT_T0);
  };
  auto step = [&](i64 k, auto phase) __attribute__((always_inline)) {
    constexpr int p = decltype(phase)::value;
    const bf16* right = packed + k / 32 * tile_size;
    tile_load<6>(right, columns * 4);
    if (rows == kRows && k + 32 <= a.K) {
      tile_load<4 + p>(w + k, a.weight_stride * 2);
    } else {  // the block or its rows end inside the tile: pad with zeros
      alignas(64) bf16 padded[kRows * 32];
      for (i64 r = 0; r < kRows; r++) {
        const __mmask32 inside = r < rows ? first32(a.K - k) : 0;
        _mm512_store_si512(padded + r * 32, (__m512i)load_pairs(w + r * a.weight_stride + k, inside));
      }
      tile_load<4 + p>(padded, 64);
    }
    if (cold) fetch(k, 0);
    tile_product<p * kTiles, 4 + p, 6>();
    if (cold) fetch(k, 8);
    auto product = [&](auto tile) __attribute__((always_inline)) {
      constexpr int t = decltype(tile)::value;
      if constexpr (t < kTiles) {
        tile_load<6 + t % 2>(right + t * tile_gap, columns * 4);
        tile_product<t + p * kTiles, 4 + p, 6 + t % 2>();
      }
    };
    product(Index<1>()), product(Index<2>()), product(Index<3>());
  };

  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (i64 k = 0; k < a.K; k += 32 * kPhases) {
    step(k, Index<0>());
    if constexpr (kPhases == 2)
      if (k + 32 < a.K) step(k + 32, Index<1>());
  }

  alignas(64) float sums[4][kRows * 16 + 16];  // a row of fewer columns is read 16 wide, past the last row too
  tile_store<0>(sums[0], columns * 4), tile_store<1>(sums[1], columns * 4);
  if constexpr (kTiles > 1) tile_store<2>(sums[2], columns * 4), tile_store<3>(sums[3], columns * 4);
  for (int t = 0; t < kTiles; t++) {
    __m512i r[16];
    for (i64 n = 0; n < 16; n++) {
      __m512 sum = _mm512_loadu_ps(sums[t] + n * columns);
      if constexpr (kPhases == 2) sum = _mm512_add_ps(sum, _mm512_loadu_ps(sums[t + kTiles] + n * columns));
      r[n] = _mm512_castps_si512(sum);
    }
    transpose16(r);
    for (i64 m = 0; m < 16; m++)
      if (m0 + t * 16 + m < a.M) finish(a, m0 + t * 16 + m, n0, first16(rows), _mm512_castsi512_ps(r[m]));
  }
}

void amx(const Args& a, Range blocks) {
  static thread_local Scratch scratch;
  const i64 columns = std::min(a.M, i64(16)), tiles = ceil_div(a.M, 16), tile_gap = ceil_div(a.K, 32) * 32 * columns;
  bf16* packed = scratch.get<bf16>(tiles * tile_gap);
  for (i64 t = 0; t < tiles; t++) pack(a, t * 16, std::min(i64(16), a.M - t * 16), columns, packed + t * tile_gap);
  const int c = int(columns);
  Tiles configured({c, c, c, c, 16, 16, c, c});
  const i64 pass = a.M <= kGroup ? blocks.to - blocks.from : std::max(i64(1), kPassBytes / (kRows * a.K * 2));
  for (i64 first = blocks.from; first < blocks.to; first += pass)
    for (i64 m0 = 0; m0 < a.M; m0 += kGroup)
      for (i64 block = first; block < std::min(first + pass, blocks.to); block++) {
        const bf16* right = packed + m0 / 16 * tile_gap;
        switch (std::min(i64(4), tiles - m0 / 16)) {
          case 1: amx_block<1>(a, right, columns, m0, block * kRows, m0 == 0); break;
          case 2: amx_block<2>(a, right, columns, m0, block * kRows, m0 == 0); break;
          case 3: amx_block<3>(a, right, columns, m0, block * kRows, m0 == 0); break;
          default: amx_block<4>(a, right, columns, m0, block * kRows, m0 == 0);
        }
      }
}

#endif  // GRAPHLLM_AMX

#ifdef GRAPHLLM_AVX512

// A panel for k in [k0, k0 + depth), zero where its rows end.
void pack_panel(const Args& a, const Panel& panel, i64 k0, i64 depth, bf16* to) {
  for (i64 k = 0; k < depth; k += 32) {
    const __mmask32 inside = first32(std::max<i64>(0, a.K - k0 - k));
    for (i64 half = 0; half < 2; half++) {
      const bf16* from = a.weight + panel.row[half] * a.weight_stride + k0 + k;
      __m512i r[16];
      for (i64 i = 0; i < 16; i++)
        r[i] = i < panel.valid[half] ? (__m512i)load_pairs(from + i * a.weight_stride, inside) : _mm512_setzero_si512();
      transpose16(r);
      for (i64 p = 0; p < 16; p++) _mm512_store_si512(to + (k / 2 + p) * 2 * kPanel + half * 32, r[p]);
    }
  }
}

// Few rows of x, by weight rows.
class FewRows {
 public:
  explicit FewRows(const Args& a) : a_(a) {}
  void operator()(Range rows) const { a_.M == 1 ? dot_row(a_, rows) : dot(a_, rows); }

 private:
  const Args& a_;
};

#else  // GRAPHLLM_AVX512

// Weights for k in [k0, k0 + depth), eight rows of eight transposed at a time.
void pack_panel(const Args& a, const Panel& panel, i64 k0, i64 depth, float* to) {
  depth = std::min(depth, a.K - k0);
  for (i64 h = 0; h < 2; h++) {
    const bf16* from = a.weight + panel.row[h] * a.weight_stride + k0;
    i64 k = 0;
    if (panel.valid[h] == kRun)
      for (; k + 8 <= depth; k += 8) {
        Eight r[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) r[i] = load8(from + i * a.weight_stride + k);
        transpose8(r);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) store8(to + (k + i) * kPanel + h * kRun, r[i]);
      }
    for (; k < depth; k++)
      for (i64 i = 0; i < kRun; i++)
        to[k * kPanel + h * kRun + i] = i < panel.valid[h] ? to_float(from[i * a.weight_stride + k]) : 0.0f;
  }
}

// Adds to sums [kM][kR], of eight, the products of kM rows of x, floats at multiples of `stride`, and kR weight rows. Lines of
// each are asked for ahead, past the end in what is read next, `next` elements from its start.
template <int kM, int kR>
void plain_dots(const float* x, i64 stride, const bf16* const* w, i64 depth, i64 next, float* sums) {
  constexpr int kSums = kM * kR <= 3 ? 4 : kM <= 6 / kR ? 2 : 1;  // of each product, as registers hold
  const i64 ahead = std::min<i64>((kR == 1 ? 28 : 16) * 32, depth);
  Eight acc[kM][kR][kSums] = {};
  auto add = [&](i64 k, int which) __attribute__((always_inline)) {
    Eight weights[kR];
#pragma GCC unroll 4
    for (int r = 0; r < kR; r++) weights[r] = load8(w[r] + k);
#pragma GCC unroll 8
    for (int m = 0; m < kM; m++) {
      const Eight row = load8(x + m * stride + k);
#pragma GCC unroll 4
      for (int r = 0; r < kR; r++) acc[m][r][which % kSums] += row * weights[r];
    }
  };
  i64 k = 0;
  for (; k + 32 <= depth; k += 32) {
    const i64 at = k + ahead < depth ? k + ahead : next + (k + ahead - depth);
#pragma GCC unroll 4
    for (int r = 0; r < kR; r++) __builtin_prefetch(w[r] + at);
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++) add(k + 8 * s, s);
  }
  for (; k + 8 <= depth; k += 8) add(k, 0);
  Eight all[8] = {};
#pragma GCC unroll 8
  for (int m = 0; m < kM; m++)
#pragma GCC unroll 4
    for (int r = 0; r < kR; r++)
#pragma GCC unroll 2
      for (int s = 0; s < kSums; s++) all[m * kR + r] += acc[m][r][s];
  store8(sums, load8(sums) + add_lanes(all));
  for (; k < depth; k++)
    for (int m = 0; m < kM; m++)
      for (int r = 0; r < kR; r++) sums[m * kR + r] += x[m * stride + k] * to_float(w[r][k]);
}

// Few rows of x as floats, in parts of k, `depth` long, of which all rows stay in the first-level cache: [part][M][stride].
struct Widened {
  float* x;
  i64 depth, stride;

  explicit Widened(const Args& a) {
    static thread_local Scratch scratch;
    const i64 parts = ceil_div(a.M * a.K * 4, kNearBytes);
    depth = ceil_div(ceil_div(a.K, parts), 32) * 32;
    stride = depth + 16;  // not a power of two, which would be lines of one set of the cache
    x = scratch.get<float>(parts * a.M * stride);
    for (i64 k0 = 0; k0 < a.K; k0 += depth)
      for (i64 m = 0; m < a.M; m++)
        widen_row(a.x + m * a.x_stride + k0, std::min(depth, a.K - k0), x + (k0 / depth * a.M + m) * stride);
  }
};

// Rows of x by dots[0] (one), dots[1] (two) and so on, weights as they come, kR weight rows side by side, each from its part
// of `rows`. Where those do not divide evenly, two parts have the same row. A block of weight rows goes through all parts of k.
template <int kR>
void plain_rows(const Args& a, const Widened& wide, Range rows,
                const std::array<decltype(&plain_dots<1, kR>), 8 / kR>& dots) {
  constexpr i64 pass = 8 / kR, block = kDotBlock / kR;
  const auto [x, depth, stride] = wide;
  const i64 count = rows.to - rows.from, length = ceil_div(count, kR);
  for (i64 first = 0; first < length; first += block) {
    const i64 together = std::min(block, length - first);
    float sums[block][kDotRows / pass][8] = {};
    const auto row = [&](i64 i, i64 r) { return rows.from + std::min(r * length, count - length) + first + i; };
    for (i64 k0 = 0; k0 < a.K; k0 += depth)
      for (i64 i = 0; i < together; i++) {
        const bf16* w[kR];
        for (i64 r = 0; r < kR; r++) w[r] = a.weight + row(i, r) * a.weight_stride + k0;
        const i64 next = i + 1 < together ? a.weight_stride
                         : k0 + depth < a.K ? depth - i * a.weight_stride
                                            : a.weight_stride - k0;
        for (i64 m = 0; m < a.M; m += pass)
          dots[std::min(pass, a.M - m) - 1](x + (k0 / depth * a.M + m) * stride, stride, w, std::min(depth, a.K - k0), next,
                                            sums[i][m / pass]);
      }
    for (i64 i = 0; i < together; i++)
      for (i64 r = 0; r < kR; r++) {
        const i64 n = row(i, r);
        const float bias = a.bias ? to_float(a.bias[n]) : 0.0f;
        for (i64 m = 0; m < a.M; m++) store(a.out + m * a.N + n, sums[i][m / pass][m % pass * kR + r] + bias);
      }
  }
}

// Few rows of x, by weight rows. One or two read memory fastest where a thread has four streams, far apart; more of them have
// nothing to wait for, and do best with one weight row after the other.
class FewRows {
 public:
  explicit FewRows(const Args& a) : a_(a), wide_(a) {}
  void operator()(Range rows) const {
    if (a_.M <= 2) return plain_rows<4>(a_, wide_, rows, {&plain_dots<1, 4>, &plain_dots<2, 4>});
    plain_rows<1>(a_, wide_, rows, {&plain_dots<1, 1>, &plain_dots<2, 1>, &plain_dots<3, 1>, &plain_dots<4, 1>,
                                    &plain_dots<5, 1>, &plain_dots<6, 1>, &plain_dots<7, 1>, &plain_dots<8, 1>});
  }

 private:
  const Args& a_;
  const Widened wide_;
};

#endif

// The outputs `mine`, with a gate, from those of both halves of the weight, [M, N].
void gate(const Args& a, Range mine, const bf16* halves) {
  const i64 half = a.N / 2;
  for (i64 m = 0; m < a.M; m++)
    for (i64 n = mine.from; n < mine.to; n += kRun) {
      const bf16* from = halves + m * a.N + n;
      bf16* to = a.out + m * a.out_stride + n;
#ifdef GRAPHLLM_AVX512
      const __mmask16 valid = first16(mine.to - n);
      store16(to, _mm512_mul_ps(silu(load16(from, valid)), load16(from + half, valid)), valid);
#else
      store_first(to, silu(load8(from)) * load8(from + half), mine.to - n);
#endif
    }
}

// Few rows of x, with a gate, by all threads. blocks: of kDotBlock weight rows of a half.
void gated_few(const Args& a, Shares& blocks, bf16* halves) {
  Args both = a;
  both.out = halves, both.out_stride = a.N, both.gated = false;
  const i64 half = a.N / 2;
#ifdef GRAPHLLM_AMX
  if (a.M > 1 && amx_granted()) {
    amx(both, share(ceil_div(a.N, kRows)));
#pragma omp barrier
    return gate(a, share(half), halves);
  }
#endif
  const FewRows few(both);
  blocks.each([&](Range part) {
    const Range mine{part.from * kDotBlock, std::min(half, part.to * kDotBlock)};
    for (i64 start : {i64(0), half}) few({start + mine.from, start + mine.to});
    gate(a, mine, halves);
  });
}

// Threads that this much weight is worth waking.
int threads_for(const Args& a) {
  return int(std::min<i64>(omp_get_max_threads(), std::max<i64>(1, a.N * a.K * 2 / kMinBytes)));
}

// How many items of so many weight rows a thread takes at least at a time.
i64 part(const Args& a, i64 rows) { return std::max<i64>(1, kPartBytes / (rows * a.K * 2)); }

void many(const Args& a) {
  const auto pack = [&](const Panel& panel, i64 k0, i64 depth, auto* to) { pack_panel(a, panel, k0, depth, to); };
#ifdef GRAPHLLM_AMX
  if (amx_granted()) return panels_by_thread<AmxTile>(a, pack);
#endif
#ifdef GRAPHLLM_AVX512
  panels_by_thread<DotTile>(a, pack);
#else
  panels_by_thread<FloatTile>(a, pack);
#endif
}

}  // namespace
}  // namespace graphllm

extern "C" void graphllm_linear(const void* x, const void* weight, const void* bias, void* out, std::int64_t M,
                                std::int64_t N, std::int64_t K, std::int64_t x_stride, std::int64_t weight_stride) {
  using namespace graphllm;
  if (M <= 0 || N <= 0) return;
  const Args a{static_cast<const bf16*>(x), static_cast<const bf16*>(weight), static_cast<const bf16*>(bias),
               static_cast<bf16*>(out), M, N, K, x_stride, weight_stride, N, false};
  Shares blocks(ceil_div(N, kDotBlock), part(a, kDotBlock), threads_for(a));
#pragma omp parallel num_threads(threads_for(a))
  {
#if defined(GRAPHLLM_AMX)
    if (M > 1 && M <= kBlockRows && amx_granted())
      amx(a, share(ceil_div(N, kRows)));
    else
#endif
    if (M <= kDotRows) {
      const FewRows few(a);
      blocks.each([&](Range part) { few({part.from * kDotBlock, std::min(N, part.to * kDotBlock)}); });
    } else {
      many(a);
    }
  }
}

// The same with a weight [2 N, K] whose halves are a gate and a value: out [M, N] = silu(gate) * value.
extern "C" void graphllm_linear_gated(const void* x, const void* weight, const void* bias, void* out, std::int64_t M,
                                      std::int64_t N, std::int64_t K, std::int64_t x_stride,
                                      std::int64_t weight_stride) {
  using namespace graphllm;
  if (M <= 0 || N <= 0) return;
  static thread_local Scratch scratch;
  const Args a{static_cast<const bf16*>(x), static_cast<const bf16*>(weight), static_cast<const bf16*>(bias),
               static_cast<bf16*>(out), M, 2 * N, K, x_stride, weight_stride, N, true};
  const bool few = M <= kDotRows;
  bf16* halves = few ? scratch.get<bf16>(M * a.N) : nullptr;
  Shares blocks(ceil_div(N, kDotBlock), part(a, 2 * kDotBlock), threads_for(a));
#pragma omp parallel num_threads(threads_for(a))
  {
    few ? gated_few(a, blocks, halves) : many(a);
  }
}
