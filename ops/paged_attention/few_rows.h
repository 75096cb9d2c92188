// Attention of up to eight query rows over one key/value head, as in decode: the time is that of reading the cache.
//
// Keys and values are used as they lie, a piece of 16 tokens of a page at a time. Scores have tokens as lanes, so that the
// softmax of seven rows costs seven vectors for 16 tokens; what would be a transposition of the keys stays inside the four
// quarters of a register, and the quarters are added at the end. Values of two tokens are interleaved as pairs, which leaves
// every 32 columns in an order of their own until a row is stored. With every step the next lines of the pieces that are
// wanted later are asked for, in the order of their addresses: without that half of the reading speed is lost, and what is
// asked for in the order of use, by columns, costs a tenth.
#pragma once

#include "cpu_common.h"

#ifdef GRAPHLLM_AVX512

namespace graphllm {
namespace {

struct FewRows {
  static constexpr i64 kRows = 8;    // query rows a block
  static constexpr i64 kPiece = 16;  // tokens that lie in one page

  // Which tokens a row sees: positions (oldest, newest].
  struct Span {
    std::int32_t oldest, newest;
  };

  // State of a row: largest score, broadcast; sums of weights by lane; then E weighted sums of values.
  static i64 state_size(i64 E) { return 2 + E / kLanes; }

  // The scores of R rows [R][E] and a piece. ask: what to ask for, as long as a piece.
  template <int R>
  static void scores(const bf16* keys, const bf16* ask, i64 slot, const bf16* query, i64 E, Vec* to) {
    __m512 halves[2][R];
    for (int half = 0; half < 2; half++, keys += 8 * slot) {
      __m512 sum[2][R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sum[0][r] = sum[1][r] = _mm512_setzero_ps();
      for (i64 e = 0; e < E; e += 32, ask += 8 * 32) {
        __m512i k[8];
#pragma GCC unroll 8
        for (int t = 0; t < 8; t++) {
          k[t] = _mm512_loadu_si512(keys + t * slot + e);
          _mm_prefetch(ask + 32 * t, _MM_HINT_T0);
        }
        transpose_quarters(k), transpose_quarters(k + 4);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          // Each pair of the row four times, side by side, here and not beforehand: the rows stay in the first-level cache.
          const __m512i q = _mm512_load_si512(query + r * E + e);
          const __m512bh spread[4] = {
              (__m512bh)_mm512_shuffle_epi32(q, _MM_PERM_AAAA), (__m512bh)_mm512_shuffle_epi32(q, _MM_PERM_BBBB),
              (__m512bh)_mm512_shuffle_epi32(q, _MM_PERM_CCCC), (__m512bh)_mm512_shuffle_epi32(q, _MM_PERM_DDDD)};
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) {
            sum[0][r] = _mm512_dpbf16_ps(sum[0][r], (__m512bh)k[i], spread[i]);
            sum[1][r] = _mm512_dpbf16_ps(sum[1][r], (__m512bh)k[4 + i], spread[i]);
          }
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) halves[half][r] = add_quarters(sum[0][r], sum[1][r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) to[r] = (Vec)add_quarters(halves[0][r], halves[1][r]);
  }

  // Turn R rows' scores of the piece at position `from` into weights [R][kPiece], and fade the states where a score is the
  // largest so far. adjust(Vec) is applied to the scores, scale next. spans is null where every row sees every token.
  template <int R, typename Adjust>
  static void soften(i64 from, const Span* spans, float scale, const Adjust& adjust, const Vec* scores, bf16* weights, i64 E,
                     Vec* state) {
    const i64 size = state_size(E);
    for (int r = 0; r < R; r++, weights += kPiece, state += size) {
      Vec x = adjust(scores[r]) * scale;
      if (spans) {
        const Ints token = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + std::int32_t(from);
        const Vec hidden = vec(-std::numeric_limits<float>::infinity());
        x = ((token <= spans[r].newest) & (token > spans[r].oldest)) ? x : hidden;
      }
      if (bits(x > state[0])) {
        const Vec top = vec(_mm512_reduce_max_ps((__m512)x)), fade = exp2_vec<false>(state[0] - top);
        for (i64 i = 1; i < size; i++) state[i] *= fade;
        state[0] = top;
      }
      const Vec p = exp2_vec<false>(x - state[0]);
      _mm256_store_si256(reinterpret_cast<__m256i*>(weights), narrow((__m512)p));
      state[1] += p;
    }
  }

  // Add to R states the values of the first `count` tokens of a piece times their weights [R][kPiece].
  template <int R>
  static void accumulate(const bf16* values, const bf16* ask, i64 slot, i64 count, const bf16* weights, i64 E, Vec* state) {
    constexpr int kWide = R > 4 ? 1 : R > 2 ? 2 : 4;  // times 32 columns: 14 or 16 sums hide the latency of a product
    i64 e = 0;
    for (; e + 32 * kWide <= E; e += 32 * kWide)
      columns<R, kWide>(values + e, ask + kPiece * e, slot, count, weights, E, state + 2 + e / kLanes);
    for (; e < E; e += 32) columns<R, 1>(values + e, ask + kPiece * e, slot, count, weights, E, state + 2 + e / kLanes);
  }

  // A row's result from its state.
  static void store_row(const Vec* state, i64 E, bf16* to) {
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    const __m512 factor = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps((__m512)state[1]));
    state += 2;
    for (i64 e = 0; e < E; e += 32, state += 2) {
      const __m512 low = _mm512_mul_ps((__m512)state[0], factor), high = _mm512_mul_ps((__m512)state[1], factor);
      _mm512_storeu_si512(to + e, _mm512_permutexvar_epi64(order, (__m512i)_mm512_cvtne2ps_pbh(high, low)));
    }
  }

 private:
  template <int R, int C>
  static void columns(const bf16* row, const bf16* ask, i64 slot, i64 count, const bf16* weights, i64 E, Vec* to) {
    const i64 size = state_size(E);
    __m512 sum[R][2 * C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < 2 * C; c++) sum[r][c] = (__m512)to[r * size + c];
    for (i64 t = 0; t < count; t += 2, row += 2 * slot, ask += 2 * C * 32) {
      const __mmask16 both = t + 1 < count ? 0xFFFF : 0;  // the cache after the last token may hold NaN
      __m512bh pairs[2 * C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const __m512i x = _mm512_loadu_si512(row + 32 * c);
        const __m512i y = _mm512_maskz_loadu_epi32(both, row + slot + 32 * c);
        _mm_prefetch(ask + 64 * c, _MM_HINT_T0);
        _mm_prefetch(ask + 64 * c + 32, _MM_HINT_T0);
        pairs[2 * c] = (__m512bh)_mm512_unpacklo_epi16(x, y);
        pairs[2 * c + 1] = (__m512bh)_mm512_unpackhi_epi16(x, y);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        std::int32_t pair;
        std::memcpy(&pair, weights + r * kPiece + t, 4);
        const __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
        for (int c = 0; c < 2 * C; c++) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], pairs[c], weight);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < 2 * C; c++) to[r * size + c] = (Vec)sum[r][c];
  }

  // Four rows of 32-bit values become, in each quarter of a register, its four columns.
  __attribute__((always_inline)) static void transpose_quarters(__m512i* r) {
    const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm512_unpacklo_epi64(a, c), r[1] = _mm512_unpackhi_epi64(a, c);
    r[2] = _mm512_unpacklo_epi64(b, d), r[3] = _mm512_unpackhi_epi64(b, d);
  }
  // Sums of the first and second, third and fourth quarters of x, then of y.
  __attribute__((always_inline)) static __m512 add_quarters(__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xDD));
  }
};

}  // namespace
}  // namespace graphllm

#endif  // GRAPHLLM_AVX512
