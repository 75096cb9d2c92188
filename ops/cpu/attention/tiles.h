// Attention's arguments, and the arithmetic of tiles: 16 query rows side by side as the lanes of a vector, against a chunk of
// tokens.
//
// Two kinds of it: Floats (float32, and bfloat16 without AVX-512) and Pairs (bfloat16 dot products, AMX or AVX-512). Left
// operands are row-major; right operands have 16 columns, pairs of consecutive rows interleaved for Pairs.
#pragma once

#include <algorithm>
#include <optional>
#include <type_traits>

#include "cpu/amx.h"
#include "cpu/attention/entries.h"

namespace graphllm {
namespace {

constexpr i64 kChunk = 64;     // tokens of context a step of the online softmax; a multiple of 32

// C: entries of the cache. Without one, table is null, cache and what follows it are the step's keys, values lie cache_kind
// further, and lengths are the sequences' own. ahead: tokens after itself that a row sees. invariant: each row is
// computed independently of how many there are.
template <typename T, typename C>
struct Args : Layout {
  const T *q, *k, *v;
  C* cache;
  const std::int32_t *table, *starts, *lengths;
  T* out;
  i64 T_, S, H, K;
  i64 q_token, q_head, k_token, k_head, v_token, v_head, table_stride;
  float scale;
  i64 window;
  float softcap;
  const T* sinks;
  float key_scale, value_scale;  // of the entries
  const i64* ancestors = nullptr;  // of each row, null where none is a node of a tree
  i64 ahead = 0;
  bool invariant = false;

  // How many positions after the first row of its sequence a row stands.
  i64 depth(i64 row, i64 first) const {
    return ancestors && ancestors[row] >= 0 ? __builtin_popcountll(std::uint64_t(ancestors[row])) - 1 : row - first;
  }
  // Whether a node sees a row of its own step.
  bool sees(i64 row, i64 other, i64 first) const {
    if (!(ancestors[row] >> (other - first) & 1)) return false;
    return window <= 0 || depth(other, first) > depth(row, first) - window;
  }

  // Where the keys of `count` tokens from position `from` lie; values are cache_kind elements further.
  void locate(i64 s, i64 head, i64 from, i64 count, C** rows) const {
    if (!table) {
      for (i64 j = 0; j < count; j++) rows[j] = cache + (starts[s] + from + j) * cache_slot + head * cache_head;
      return;
    }
    const std::int32_t* block = table + s * table_stride + from / P;
    i64 slot = from % P;
    for (i64 j = 0; j < count; j++) {
      rows[j] = cache + *block * cache_block + head * cache_head + slot * cache_slot;
      if (++slot == P) slot = 0, block++;
    }
  }
  // Put row t, at `position` of sequence s, into the cache for one head.
  void write(i64 s, i64 t, i64 position, i64 head) const {
    C* to = cache + table[s * table_stride + position / P] * cache_block + head * cache_head;
    write_row(k + t * k_token + head * k_head, *this, position % P, key_scale, to);
    write_row(v + t * v_token + head * v_head, *this, position % P, value_scale, to + cache_kind);
  }
};

// AMX's tiles, as long as it lives, where products of this type take them.
template <typename T>
class TilesOf {
 public:
  TilesOf() {
#ifdef GRAPHLLM_AMX
    if (std::is_same_v<T, bf16> && amx_granted()) configured_.emplace();
  }

 private:
  std::optional<Tiles> configured_;
#else
  }
#endif
};

// Lane i of sums [E] times factors as the row to[i], of `count` rows.
template <typename T>
inline void store_lanes(const Vec* sums, Vec factor, i64 E, T* const* to, i64 count) {
#ifdef GRAPHLLM_AVX512
  for (i64 e = 0; e < E; e += 16) {
    __m512i r[16];
    for (i64 i = 0; i < 16; i++) r[i] = e + i < E ? (__m512i)(sums[e + i] * factor) : __m512i{};
    transpose16(r);
    for (i64 i = 0; i < count; i++) store16(to[i] + e, _mm512_castsi512_ps(r[i]), first16(E - e));
  }
#else
  for (i64 h = 0; 8 * h < count; h++) {
    const Eight by = reg_of<Eight>(factor, h);
    const i64 rows = std::min(i64(8), count - 8 * h);
    i64 e = 0;
    for (; e + 8 <= E; e += 8) {
      Eight r[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) r[i] = reg_of<Eight>(sums[e + i], h) * by;
      transpose8(r);
      for (i64 i = 0; i < rows; i++) store8(to[8 * h + i] + e, r[i]);
    }
    for (; e < E; e++)
      for (i64 i = 0; i < rows; i++) store(to[8 * h + i] + e, sums[e][8 * h + i] * by[i]);
  }
#endif
}

// float32 arithmetic; bfloat16 is widened when it is gathered.
template <typename T>
struct Floats {
  using Cell = float;
  struct Keys {
    const float* rows;
    i64 stride;
  };
  using Values = Keys;
  static constexpr float kSlack = 0;  // how far above `top` a score may be before `top` follows
  static constexpr i64 kRound = 8;  // of tokens and of numbers, whole multiples are computed
  static i64 query_depth(i64 E) { return E; }
  static i64 height(i64 E) { return ceil_div(E, kRound) * kRound; }

  template <typename Row>
  static void pack_query(const Row* const* rows, i64 count, i64 E, bool negate, float* to) {
    for (i64 i = 0; i < kLanes; i++)
      for (i64 e = 0; e < E; e++) {
        const float x = i < count ? to_float(rows[i][e]) : 0.0f;
        to[e * kLanes + i] = negate ? -x : x;
      }
  }

  static Keys keys(const Layout& a, T* const* rows, i64 count, float* to) {
    return gather(rows, 0, count, a.E, to);
  }
  static Values values(const Layout& a, T* const* rows, i64 count, const Keys& keys, float* to) {
    return a.cache_kind ? gather(rows, a.cache_kind, count, a.V, to) : keys;
  }

  // regs: how many registers of lanes hold rows, the first ones.
  static void scores(const Keys& keys, const float* query, i64 E, i64 count, Vec* to, i64 tiles, int regs) {
    for (i64 tile = 0; tile < tiles; tile++, query += kLanes * E, to += kChunk)
      for (i64 e = 0; e < E; e += kDepth)
        product<false>(keys.rows + e, keys.stride, query + e * kLanes, std::min(kDepth, E - e), to, count, e > 0, regs);
  }
  static void put_weights(float* weights, i64 j, int reg, Reg p0, Reg p1) {
    std::memcpy(weights + j * kLanes + reg * kRegLanes, &p0, sizeof p0);
    std::memcpy(weights + (j + 1) * kLanes + reg * kRegLanes, &p1, sizeof p1);
  }
  static void accumulate(const Values& values, const float* weights, i64 E, i64 count, Vec* sums, i64 tiles, int regs) {
    for (i64 tile = 0; tile < tiles; tile++, weights += kChunk * kLanes, sums += 2 + height(E))
      product<true>(values.rows, values.stride, weights, count, sums, height(E), true, regs);
  }

 private:
  static constexpr i64 kDepth = 256;  // numbers of a tile of queries that stay in the first-level cache

  static Keys gather(T* const* rows, i64 offset, i64 count, i64 E, float* to) {
    const i64 width = height(E), padded = ceil_div(count, kRound) * kRound;
    const Keys made{to, width};
    for (i64 j = 0; j < count; j++, to += width) {
      widen_row(rows[j] + offset, E, to);
      std::fill(to + E, to + width, 0.0f);
    }
    std::fill(to, to + (padded - count) * width, 0.0f);
    return made;
  }
  // c[row] (+)= the sum over k of left's row and k times right[k], of an even count of rows. kDown: left lies [k][rows], else
  // [rows][k], with `stride` between.
  template <bool kDown>
  static void product(const float* left, i64 stride, const float* right, i64 depth, Vec* c, i64 count, bool add, int regs) {
    regs == 1 ? by_rows<kDown, 1>(left, stride, right, depth, c, count, add)
              : by_rows<kDown, kRegs>(left, stride, right, depth, c, count, add);
  }
  // The same with kUsed registers of lanes, of as many rows at a time as twelve sums serve.
  template <bool kDown, int kUsed>
  static void by_rows(const float* left, i64 stride, const float* right, i64 depth, Vec* c, i64 count, bool add) {
    i64 row = 0;
    const auto some = [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      for (; row + kRows <= count; row += kRows)
        sums<kDown, kRows, kUsed>(left + row * (kDown ? 1 : stride), stride, right, depth, c + row, add);
    };
    some(Index<12 / kUsed>()), some(Index<4>()), some(Index<2>());
  }
  template <bool kDown, int kRows, int kUsed>
  static void sums(const float* left, i64 stride, const float* right, i64 depth, Vec* c, bool add) {
    Reg sum[kRows][kUsed];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
      for (int p = 0; p < kUsed; p++) sum[r][p] = add ? reg_of<Reg>(c[r], p) : Reg{};
    for (i64 k = 0; k < depth; k++, left += kDown ? stride : 1, right += kLanes) {
      Reg column[kUsed];
#pragma GCC unroll 2
      for (int p = 0; p < kUsed; p++) std::memcpy(&column[p], right + p * kRegLanes, sizeof(Reg));
#pragma GCC unroll 12
      for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < kUsed; p++) sum[r][p] = multiply_add(Reg{} + left[kDown ? r : r * stride], column[p], sum[r][p]);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
      for (int p = 0; p < kUsed; p++) put_reg(c[r], p, sum[r][p]);
  }
};

#ifdef GRAPHLLM_AVX512

// bfloat16 products of pairs with float32 sums.
struct Pairs {
  using Cell = bf16;
  struct Keys {  // 16 tokens each
    const bf16* tile[kChunk / 16];
    i64 stride;
  };
  using Values = const bf16*;
  static constexpr float kSlack = 8;  // rarely fades the sums, and loses nothing: weights have 8 bits whatever their size
  static constexpr i64 kRound = 16;
  static i64 query_depth(i64 E) { return ceil_div(E, 32) * 32; }
  static i64 height(i64 E) { return ceil_div(E, 16) * 16; }

  static void pack_query(const bf16* const* rows, i64 count, i64 E, bool negate, bf16* to) {
    const __m512i sign = _mm512_set1_epi32(negate ? 0x80008000 : 0);
    for (i64 e = 0; e < E; e += 32, to += 32 * kLanes) {
      __m512i r[16];
      for (i64 i = 0; i < kLanes; i++)
        r[i] = i < count ? _mm512_xor_si512((__m512i)load_pairs(rows[i] + e, first32(E - e)), sign) : __m512i{};
      transpose16(r);
      for (i64 i = 0; i < 16; i++) _mm512_store_si512(to + i * 32, r[i]);
    }
  }

  // Keys are used in place where 16 tokens are a piece of a block and rows are whole; otherwise they are gathered. What a
  // block holds after the last token is masked later, whatever it is.
  static Keys keys(const Layout& a, bf16* const* rows, i64 count, bf16* to) {
    Keys out;
    const bool in_place = a.P % 16 == 0 && a.E % 32 == 0;
    const i64 depth = query_depth(a.E);
    out.stride = in_place ? a.cache_slot : depth;
    for (i64 j = 0; j < count; j += 16) {
      out.tile[j / 16] = in_place ? rows[j] : to + j * depth;
      if (in_place) continue;
      for (i64 i = j; i < j + 16; i++)
        for (i64 e = 0; e < depth; e += 32) {
          const __mmask32 inside = i < count ? first32(a.E - e) : 0;
          _mm512_store_si512(to + i * depth + e, (__m512i)load_pairs(rows[std::min(i, count - 1)] + e, inside));
        }
    }
    return out;
  }

  // Transposed: [height(E)][kChunk], zero after the last token because 0 * NaN is not 0.
  static Values values(const Layout& a, bf16* const* rows, i64 count, const Keys&, bf16* to) {
    alignas(64) static constexpr std::uint16_t kOrder[2][32] = {
        {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    const __m512i low = _mm512_load_si512(kOrder[0]), high = _mm512_load_si512(kOrder[1]);
    for (i64 j = 0; j < count; j += 32) {
      for (i64 e = 0; e < a.V; e += 32) {
        const __mmask32 inside = first32(a.V - e);
        __m512i first[16], second[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
          const i64 t = j + 2 * i;
          const __m512i even = load_value(rows, t, count, a.cache_kind + e, inside);
          const __m512i odd = load_value(rows, t + 1, count, a.cache_kind + e, inside);
          first[i] = _mm512_permutex2var_epi16(even, low, odd);
          second[i] = _mm512_permutex2var_epi16(even, high, odd);
        }
        transpose16(first);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) _mm512_store_si512(to + (e + i) * kChunk + j, first[i]);
        if (e + 16 >= a.V) break;
        transpose16(second);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) _mm512_store_si512(to + (e + 16 + i) * kChunk + j, second[i]);
      }
    }
    return to;
  }

  static void put_weights(bf16* weights, i64 j, int, Vec p0, Vec p1) {
    alignas(64) static constexpr std::uint16_t kOrder[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)p1, (__m512)p0);
    _mm512_store_si512(weights + j * kLanes, _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both));
  }

  static void scores(const Keys& keys, const bf16* query, i64 E, i64 count, Vec* to, i64 tiles, int) {
    const i64 depth = query_depth(E);
#ifdef GRAPHLLM_AMX
    if (amx_granted()) {
      for (i64 tile = 0; tile < tiles; tile++, query += kLanes * depth, to += kChunk)
        amx_scores(keys, query, depth, count, to);
      return;
    }
#endif
    if (tiles == 2) {
      for (i64 j = 0; j < count; j += 8)
        wide(keys.tile[j / 16] + j % 16 * keys.stride, keys.stride, query, kLanes * depth, depth, to + j, kChunk, false);
      return;
    }
    for (i64 j = 0; j < count; j += 16) block(keys.tile[j / 16], keys.stride, query, depth, to + j, false);
  }
  static void accumulate(Values values, bf16* weights, i64 E, i64 count, Vec* sums, i64 tiles, int) {
    const i64 depth = ceil_div(count, 32) * 32, state = 2 + height(E);
    for (i64 tile = 0; tile < tiles; tile++)
      for (i64 j = count; j < depth; j += 2) put_weights(weights + tile * kChunk * kLanes, j, 0, Vec{}, Vec{});
#ifdef GRAPHLLM_AMX
    if (amx_granted()) {
      for (i64 tile = 0; tile < tiles; tile++)
        amx_accumulate(values, weights + tile * kChunk * kLanes, height(E), depth, sums + tile * state);
      return;
    }
#endif
    if (tiles == 2) {
      for (i64 e = 0; e < height(E); e += 8)
        wide(values + e * kChunk, kChunk, weights, kChunk * kLanes, depth, sums + e, state, true);
      return;
    }
    for (i64 e = 0; e < height(E); e += 16) block(values + e * kChunk, kChunk, weights, depth, sums + e, true);
  }

 private:
  static __m512i load_value(bf16* const* rows, i64 t, i64 count, i64 offset, __mmask32 inside) {
    return t < count ? (__m512i)load_pairs(rows[t] + offset, inside) : _mm512_setzero_si512();
  }
  // c[row] (+)= sum over k of left[row][k] * right[k], for 16 rows: sums in flight enough to hide the latency of a
  // product. Unrolled by hand: gcc 12 keeps sums that it indexes in a loop in memory, and stores them after every
  // product. Four pointers to four rows each leave registers for everything.
  static void block(const bf16* left, i64 stride, const bf16* right, i64 depth, Vec* c, bool add) {
    __m512 sum[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) sum[r] = add ? (__m512)c[r] : _mm512_setzero_ps();
    const bf16* rows[4] = {left, left + 4 * stride, left + 8 * stride, left + 12 * stride};
    for (i64 k = 0; k < depth; k += 2) {
      const __m512bh column = load_pairs(right + k * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < 16; r++) {
        std::int32_t pair;
        std::memcpy(&pair, rows[r / 4] + r % 4 * stride + k, 4);
        sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)_mm512_set1_epi32(pair), column);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) c[r] = (Vec)sum[r];
  }

  // The same for 8 rows and two right operands, `apart` and c `apart_c` from each other: what is broadcast serves both.
  static void wide(const bf16* left, i64 stride, const bf16* right, i64 apart, i64 depth, Vec* c, i64 apart_c, bool add) {
    __m512 sum[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) sum[r] = add ? (__m512)c[r / 2 + r % 2 * apart_c] : _mm512_setzero_ps();
    const bf16* rows[2] = {left, left + 4 * stride};
    for (i64 k = 0; k < depth; k += 2) {
      const __m512bh x = load_pairs(right + k * kLanes), y = load_pairs(right + apart + k * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < 8; r++) {
        std::int32_t pair;
        std::memcpy(&pair, rows[r / 4] + r % 4 * stride + k, 4);
        const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
        sum[2 * r] = _mm512_dpbf16_ps(sum[2 * r], row, x);
        sum[2 * r + 1] = _mm512_dpbf16_ps(sum[2 * r + 1], row, y);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) c[r / 2 + r % 2 * apart_c] = (Vec)sum[r];
  }

#ifdef GRAPHLLM_AMX
  // Tiles 0-3 accumulate, 4 and 5 are left operands, 6 is the right one.
  static void amx_scores(const Keys& keys, const bf16* query, i64 depth, i64 count, Vec* to) {
    const i64 stride = keys.stride * 2;
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (i64 e = 0; e < depth; e += 32) {
      tile_load<6>(query + e * kLanes, 64);
      tile_load<4>(keys.tile[0] + e, stride), tile_product<0, 4, 6>();
      if (count > 16) tile_load<5>(keys.tile[1] + e, stride), tile_product<1, 5, 6>();
      if (count > 32) tile_load<4>(keys.tile[2] + e, stride), tile_product<2, 4, 6>();
      if (count > 48) tile_load<5>(keys.tile[3] + e, stride), tile_product<3, 5, 6>();
    }
    tile_store<0>(to, 64), tile_store<1>(to + 16, 64), tile_store<2>(to + 32, 64), tile_store<3>(to + 48, 64);
  }
  static void amx_accumulate(const bf16* values, const bf16* weights, i64 height, i64 depth, Vec* sums) {
    for (i64 e = 0; e < height; e += 64, sums += 64, values += 64 * kChunk) {
      const i64 rows = height - e;
      tile_load<0>(sums, 64);
      if (rows > 16) tile_load<1>(sums + 16, 64);
      if (rows > 32) tile_load<2>(sums + 32, 64);
      if (rows > 48) tile_load<3>(sums + 48, 64);
      for (i64 j = 0; j < depth; j += 32) {
        const bf16* left = values + j;
        tile_load<6>(weights + j * kLanes, 64);
        tile_load<4>(left, kChunk * 2), tile_product<0, 4, 6>();
        if (rows > 16) tile_load<5>(left + 16 * kChunk, kChunk * 2), tile_product<1, 5, 6>();
        if (rows > 32) tile_load<4>(left + 32 * kChunk, kChunk * 2), tile_product<2, 4, 6>();
        if (rows > 48) tile_load<5>(left + 48 * kChunk, kChunk * 2), tile_product<3, 5, 6>();
      }
      tile_store<0>(sums, 64);
      if (rows > 16) tile_store<1>(sums + 16, 64);
      if (rows > 32) tile_store<2>(sums + 32, 64);
      if (rows > 48) tile_store<3>(sums + 48, 64);
    }
  }
#endif
};

#endif  // GRAPHLLM_AVX512

}  // namespace
}  // namespace graphllm
