// Attention of up to eight query rows over one key/value head, as in decode: the time is that of reading the cache.
//
// Keys and values are used as they lie, a piece of 16 tokens of a block at a time. Scores have tokens as lanes, so that the
// softmax of seven rows costs seven vectors for 16 tokens. With every step the next lines of the pieces that are wanted
// later are asked for, in the order of their addresses: without that half of the reading speed is lost, and what is asked
// for in the order of use, by columns, costs a tenth.
//
// Two kinds of it, as in tiles.h: FewFloats (float32, and bfloat16 without AVX-512) and FewPairs (bfloat16 dot products).
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/vectors.h"

namespace graphllm {
namespace {

constexpr i64 kFewGroup = 8;  // query rows a group
constexpr i64 kPiece = 16;    // tokens that lie in one block of the cache

// Which tokens a row sees: positions (oldest, newest], and of those from `begin` on, rows of its own step, number i where
// bit i is set.
struct Span {
  std::int32_t oldest, newest, begin;
  i64 bits;

  // One bit for each token of the piece at position `from`.
  std::int32_t open(i64 from) const {
    const i64 ahead = from - begin;
    if (ahead >= 0) return std::int32_t((ahead < 63 ? bits >> ahead : bits >> 63) & 0xFFFF);
    return ahead <= -kPiece ? 0xFFFF : std::int32_t((std::uint64_t(bits) << -ahead | ((1 << -ahead) - 1)) & 0xFFFF);
  }
};

// State of a row: largest score, broadcast; sums of weights by lane; then E weighted sums of values.
inline i64 few_state_size(i64 E) { return 2 + E / kLanes; }

// These rows as whole groups.
inline i64 few_padded(i64 rows) { return ceil_div(rows, kFewGroup) * kFewGroup; }

#ifdef GRAPHLLM_AVX512
inline Reg load_reg(const float* from) { return (Reg)load16(from); }
inline void put_weights(bf16* to, Reg p) { _mm256_store_si256(reinterpret_cast<__m256i*>(to), narrow((__m512)p)); }
inline float largest(Reg x) { return _mm512_reduce_max_ps((__m512)x); }
inline Reg add_regs(const Reg* v) { return (Reg)add_lanes(reinterpret_cast<const __m512*>(v)); }
#else
template <typename T>
inline Reg load_reg(const T* from) {
  return load8(from);
}
inline float largest(Reg x) {
  float most = x[0];
  for (i64 i = 1; i < kRegLanes; i++) most = std::max(most, x[i]);
  return most;
}
inline Reg add_regs(const Reg* v) { return add_lanes(v); }
#endif
inline void put_weights(float* to, Reg p) { std::memcpy(to, &p, sizeof p); }

// Turn R rows' scores of the piece at position `from` into weights [R][kPiece], and fade the states where a score is the
// largest so far. adjust(Vec) is applied to the scores, scale next. spans is null where every row sees every token.
template <int R, bool kPrecise, typename Cell, typename Adjust>
inline void soften_rows(i64 from, const Span* spans, float scale, const Adjust& adjust, const Vec* scores, Cell* weights,
                        i64 E, Vec* state) {
  const i64 size = few_state_size(E);
  for (int r = 0; r < R; r++, weights += kPiece, state += size) {
    const Vec scaled = adjust(scores[r]) * scale;
    Reg x[kRegs], top = reg_of<Reg>(state[0], 0), most;
#pragma GCC unroll 2
    for (int p = 0; p < kRegs; p++) {
      x[p] = reg_of<Reg>(scaled, p);
      if (spans) {
        const Ints numbers = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const RegInts number = reg_of<RegInts>(numbers, p), token = number + std::int32_t(from);
        const RegInts open = ((RegInts{} + spans[r].open(from)) >> number) & 1;
        const Reg hidden = Reg{} - std::numeric_limits<float>::infinity();
        x[p] = ((token <= spans[r].newest) & (token > spans[r].oldest) & (open > 0)) ? x[p] : hidden;
      }
      most = p == 0 ? x[p] : larger(most, x[p]);
    }
    if (bits(most > top)) {
      const Reg before = top;
      top = Reg{} + largest(most);
      const Reg fade = exp2_vec<kPrecise>(before - top);
      for (i64 i = 1; i < size; i++)
#pragma GCC unroll 2
        for (int p = 0; p < kRegs; p++) put_reg(state[i], p, reg_of<Reg>(state[i], p) * fade);
#pragma GCC unroll 2
      for (int p = 0; p < kRegs; p++) put_reg(state[0], p, top);
    }
#pragma GCC unroll 2
    for (int p = 0; p < kRegs; p++) {
      const Reg weight = exp2_vec<kPrecise>(x[p] - top);
      put_weights(weights + p * kRegLanes, weight);
      put_reg(state[1], p, reg_of<Reg>(state[1], p) + weight);
    }
  }
}

// float32 arithmetic, with bfloat16 widened as it is read.
template <typename T>
struct FewFloats {
  static constexpr i64 kColumns = 16;  // E is a multiple

  template <typename Row>
  static void put_query(const Row* from, i64 E, float* to) {
    widen_row(from, E, to);
  }

  // The scores of R rows [R][E] and a piece. ask: what to ask for, as long as a piece.
  template <int R>
  static void scores(const T* keys, const T* ask, i64 slot, const float* query, i64 E, Vec* to) {
    constexpr int kTokens = R == 1 ? 8 : R == 2 ? 4 : R < 8 ? 2 : 1;  // 8 to 14 sums hide the latency of a product
    Reg sums[R][kRegLanes];
    for (int half = 0; half < kRegs; half++) {
      for (i64 t = 0; t < kRegLanes; t += kTokens, keys += kTokens * slot, ask += kTokens * E) {
        Reg sum[kTokens][R];
#pragma GCC unroll 8
        for (int i = 0; i < kTokens; i++) {
          ask_for(ask + i * E, E);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) sum[i][r] = Reg{};
        }
        for (i64 e = 0; e < E; e += kRegLanes)
#pragma GCC unroll 8
          for (int i = 0; i < kTokens; i++) {
            const Reg key = load_reg(keys + i * slot + e);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sum[i][r] = multiply_add(key, load_reg(query + r * E + e), sum[i][r]);
          }
#pragma GCC unroll 8
        for (int i = 0; i < kTokens; i++)
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) sums[r][t + i] = sum[i][r];
      }
      for (int r = 0; r < R; r++) put_reg(to[r], half, add_regs(sums[r]));
    }
  }

  // Add to R states the values of the first `count` tokens of a piece times their weights [R][kPiece].
  template <int R>
  static void accumulate(const T* values, const T* ask, i64 slot, i64 count, const float* weights, i64 E, Vec* state) {
    constexpr int kTogether = R > 4 ? 4 : R, kWide = 8 / (kTogether == 3 ? 4 : kTogether);
    float* to = reinterpret_cast<float*>(state + 2);
    i64 e = 0;
    for (; e + kWide * kRegLanes <= E; e += kWide * kRegLanes)
      columns<kTogether, kWide>(values + e, e == 0 ? ask : nullptr, slot, count, weights, E, to + e);
    for (; e < E; e += kRegLanes) columns<kTogether, 1>(values + e, e == 0 ? ask : nullptr, slot, count, weights, E, to + e);
    if constexpr (R > kTogether)
      accumulate<R - kTogether>(values, nullptr, slot, count, weights + kTogether * kPiece, E,
                                state + kTogether * few_state_size(E));
  }

  // A row's result from its state.
  template <typename Row>
  static void store_row(const Vec* state, i64 E, float scale, Row* to) {
    float sum = 0;
    for (i64 i = 0; i < kLanes; i++) sum += state[1][i];
    const float* from = reinterpret_cast<const float*>(state + 2);
    for (i64 e = 0; e < E; e += 8) store8(to + e, load8(from + e) * (scale / sum));
  }

 private:
  __attribute__((always_inline)) static void ask_for(const T* row, i64 E) {
    for (i64 at = 0; at < E; at += 64 / i64(sizeof(T))) __builtin_prefetch(row + at);
  }

  template <int R, int C>
  static void columns(const T* row, const T* ask, i64 slot, i64 count, const float* weights, i64 E, float* to) {
    const i64 size = few_state_size(E) * kLanes;
    Reg sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sum[r][c] = load_reg(to + r * size + c * kRegLanes);
    for (i64 t = 0; t < count; t++, row += slot) {
      if (ask) ask_for(ask + t * E, E);
      Reg value[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) value[c] = load_reg(row + c * kRegLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sum[r][c] = multiply_add(value[c], Reg{} + weights[r * kPiece + t], sum[r][c]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) std::memcpy(to + r * size + c * kRegLanes, &sum[r][c], sizeof(Reg));
  }
};

#ifdef GRAPHLLM_AVX512

// Dot products of pairs of bfloat16. What would be a transposition of the keys stays inside the four quarters of a register,
// and the quarters are added at the end. Values of two tokens are interleaved as pairs, which leaves every 32 columns in an
// order of their own until a row is stored.
struct FewPairs {
  static constexpr i64 kColumns = 32;

  static void put_query(const bf16* from, i64 E, bf16* to) { std::copy(from, from + E, to); }

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
  static void store_row(const Vec* state, i64 E, float scale, bf16* to) {
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    const __m512 factor = _mm512_set1_ps(scale / _mm512_reduce_add_ps((__m512)state[1]));
    state += 2;
    for (i64 e = 0; e < E; e += 32, state += 2) {
      const __m512 low = _mm512_mul_ps((__m512)state[0], factor), high = _mm512_mul_ps((__m512)state[1], factor);
      _mm512_storeu_si512(to + e, _mm512_permutexvar_epi64(order, (__m512i)_mm512_cvtne2ps_pbh(high, low)));
    }
  }

 private:
  template <int R, int C>
  static void columns(const bf16* row, const bf16* ask, i64 slot, i64 count, const bf16* weights, i64 E, Vec* to) {
    const i64 size = few_state_size(E);
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

#endif  // GRAPHLLM_AVX512

}  // namespace
}  // namespace graphllm
