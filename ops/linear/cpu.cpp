// linear for few rows: out [M, N] = x [M, K] times weight [N, K] transposed, plus bias [N]; all bfloat16, float32 inside.
//
// At these row counts the time is that of reading the weights once, so everything here serves the memory stream: weights
// stay in PyTorch's row-major layout (the same copy serves prefill through oneDNN), and each thread owns a contiguous
// range of weight rows. One row of x: dot products, two weight rows at a time. More: AMX with 16 weight rows as the left
// operand, loaded straight from memory, and x, which is small, packed once per thread as the right operand.
#include "cpu_common.h"

namespace graphllm {
namespace {

constexpr i64 kRows = 16;              // weight rows a block
constexpr i64 kGroup = 64;             // rows of x that one pass over a block serves: four tile accumulators
constexpr i64 kPassBytes = 512 << 10;  // weight blocks that stay in the second-level cache between passes
constexpr i64 kMinBytes = 128 << 10;   // less weight than this is not worth waking another thread

struct Args {
  const bf16 *x, *weight, *bias;
  bf16* out;
  i64 M, N, K, x_stride, weight_stride;
};

#ifdef GRAPHLLM_AVX512

// Add the bias to 16 outputs of one row of x and store the valid ones.
inline void finish(const Args& a, i64 m, i64 n, __mmask16 valid, __m512 sum) {
  if (a.bias) sum = _mm512_add_ps(sum, load16(a.bias + n, valid));
  store16(a.out + m * a.N + n, sum, valid);
}

// Blocks of 16 weight rows times M rows of x by dot products. Two weight rows are read side by side, each line asked for
// 28 lines ahead, past the row's end in the next two rows; loads stand before prefetches in every step. Of one to eight
// rows, either cache level, many distances and orders, this read fastest: 95 % of what a plain read of memory reaches.
template <int M>
void dot_blocks(const Args& a, i64 m0, Range blocks) {
  constexpr i64 ahead = 28 * 32;
  const bf16* x = a.x + m0 * a.x_stride;
  for (i64 block = blocks.from; block < blocks.to; block++) {
    const i64 n0 = block * kRows, rows = std::min(kRows, a.N - n0);
    alignas(64) float sums[M][kRows] = {};
    for (i64 n = 0; n < rows; n += 2) {
      const bf16* w = a.weight + (n0 + n) * a.weight_stride;
      const i64 second = n + 1 < rows ? a.weight_stride : 0;
      const bf16* next = w + 2 * a.weight_stride;
      __m512 acc[2][M];
      for (int m = 0; m < M; m++) acc[0][m] = acc[1][m] = _mm512_setzero_ps();
      auto add = [&](i64 k, __m512bh w0, __m512bh w1, __mmask32 mask) __attribute__((always_inline)) {
        for (int m = 0; m < M; m++) {
          __m512bh v = load_pairs(x + m * a.x_stride + k, mask);
          acc[0][m] = _mm512_dpbf16_ps(acc[0][m], w0, v);
          acc[1][m] = _mm512_dpbf16_ps(acc[1][m], w1, v);
        }
      };
      i64 k = 0;
      for (; k + 32 <= a.K; k += 32) {
        __m512bh w0 = load_pairs(w + k), w1 = load_pairs(w + second + k);
        asm volatile("" ::: "memory");
        const bf16* at = k + ahead < a.K ? w + (k + ahead) : next + (k + ahead - a.K);
        _mm_prefetch(at, _MM_HINT_T0);
        _mm_prefetch(at + a.weight_stride, _MM_HINT_T0);
        asm volatile("" ::: "memory");
        add(k, w0, w1, ~0u);
      }
      if (k < a.K) {
        const __mmask32 inside = first32(a.K - k);
        add(k, load_pairs(w + k, inside), load_pairs(w + second + k, inside), inside);
      }
      for (int m = 0; m < M; m++) {
        sums[m][n] = _mm512_reduce_add_ps(acc[0][m]);
        sums[m][n + 1] = _mm512_reduce_add_ps(acc[1][m]);
      }
    }
    for (int m = 0; m < M; m++) finish(a, m0 + m, n0, first16(rows), _mm512_load_ps(sums[m]));
  }
}

void dot(const Args& a, Range blocks) {
  for (i64 block = blocks.from; block < blocks.to; block++) {
    for (i64 m = 0; m < a.M; m += 4) {  // beyond four rows of x the block comes again, from the second-level cache
      const Range one{block, block + 1}, all = a.M <= 4 ? blocks : one;
      switch (std::min(i64(4), a.M - m)) {
        case 1: dot_blocks<1>(a, m, all); break;
        case 2: dot_blocks<2>(a, m, all); break;
        case 3: dot_blocks<3>(a, m, all); break;
        default: dot_blocks<4>(a, m, all);
      }
    }
    if (a.M <= 4) return;
  }
}

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

template <int kIndex>
using Index = std::integral_constant<int, kIndex>;

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

#ifndef GRAPHLLM_AVX512

void plain(const Args& a, Range blocks) {
  for (i64 n = blocks.from * kRows; n < std::min(blocks.to * kRows, a.N); n++)
    for (i64 m = 0; m < a.M; m++) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (i64 k = 0; k < a.K; k++)
        sum += to_float(a.x[m * a.x_stride + k]) * to_float(a.weight[n * a.weight_stride + k]);
      store(a.out + m * a.N + n, a.bias ? sum + to_float(a.bias[n]) : sum);
    }
}

#endif

}  // namespace
}  // namespace graphllm

extern "C" void graphllm_linear(const void* x, const void* weight, const void* bias, void* out, std::int64_t M,
                                std::int64_t N, std::int64_t K, std::int64_t x_stride, std::int64_t weight_stride) {
  using namespace graphllm;
  if (M <= 0 || N <= 0) return;
  const Args a{static_cast<const bf16*>(x), static_cast<const bf16*>(weight), static_cast<const bf16*>(bias),
               static_cast<bf16*>(out), M, N, K, x_stride, weight_stride};
  const i64 blocks = ceil_div(N, kRows);
  const i64 threads = std::min<i64>(omp_get_max_threads(), std::max<i64>(1, N * K * 2 / kMinBytes));
#pragma omp parallel num_threads(int(threads))
  {
    const Range mine = share(blocks);
#if defined(GRAPHLLM_AMX)
    M > 1 && amx_granted() ? amx(a, mine) : dot(a, mine);
#elif defined(GRAPHLLM_AVX512)
    dot(a, mine);
#else
    plain(a, mine);
#endif
  }
}
