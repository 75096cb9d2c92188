// Some rows of x with AMX, weights as they lie: 16 weight rows at a time are the left operand. Empty below that level.
#pragma once

#include "cpu/panels.h"

#ifdef GRAPHLLM_AMX

namespace graphllm {
namespace {

constexpr i64 kRows = 16;              // weight rows a block
constexpr i64 kGroup = 64;             // rows of x that one pass over a block serves: four tile accumulators
constexpr i64 kPassBytes = 512 << 10;  // weight blocks that stay in the second-level cache between passes

// Add the bias to 16 outputs of one row of x and store the valid ones.
inline void finish(const Product& a, i64 m, i64 n, __mmask16 valid, __m512 sum) {
  if (a.bias) sum = _mm512_add_ps(sum, load16(a.bias + n, valid));
  store16(a.out + m * a.out_stride + n, sum, valid);
}

// Rows of x as right operands of the tile product: for every 32 values of k, 16 rows of `columns` bf16 pairs.
void pack(const Product& a, i64 m0, i64 rows, i64 columns, bf16* to) {
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
// cycles for the last; kMost == 1: they do not, as with more of them. cold: the weights come from memory, so ask for them ahead.
template <int kTiles, int kMost>
void amx_block(const Product& a, const bf16* packed, i64 columns, i64 m0, i64 n0, bool cold) {
  constexpr int kPhases = kTiles <= 2 ? kMost : 1;
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

// kPhases == 1: every row is summed in the same order, whatever their number.
template <int kPhases = 2>
void amx(const Product& a, Range blocks) {
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
          case 1: amx_block<1, kPhases>(a, right, columns, m0, block * kRows, m0 == 0); break;
          case 2: amx_block<2, kPhases>(a, right, columns, m0, block * kRows, m0 == 0); break;
          case 3: amx_block<3, kPhases>(a, right, columns, m0, block * kRows, m0 == 0); break;
          default: amx_block<4, kPhases>(a, right, columns, m0, block * kRows, m0 == 0);
        }
      }
}

}  // namespace
}  // namespace graphllm

#endif  // GRAPHLLM_AMX
