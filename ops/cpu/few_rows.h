// Few rows of x by dot products: some weight rows at a time, each read from memory once. With AVX-512, and without.
#pragma once

#include <array>

#include "cpu/panels.h"

namespace graphllm {
namespace {

constexpr int kDotRows = 16;           // rows of x that dot products serve
constexpr int kPassRows = 8;           // of them at once: 16 sums with two weight rows
constexpr i64 kDotBlock = 16;          // weight rows that a thread's share is made of
constexpr i64 kNearBytes = 32 << 10;   // rows of x that stay in the first-level cache
constexpr i64 kHeldBytes = 256 << 10;  // weight rows that stay in the second-level cache

#ifdef GRAPHLLM_AVX512

#ifdef GRAPHLLM_AMX

// One row of x against weight rows two at a time, each line asked for some lines ahead, past the row's end in the next two
// rows; loads stand before prefetches in every step.
template <i64 kAhead, _mm_hint kHint>
void dot_pairs(const Product& a, Range rows) {
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
// fastest: rows that lie two to a page of 4 KB, and longer ones.
void dot_row(const Product& a, Range rows) {
  a.K <= 1024 ? dot_pairs<28, _MM_HINT_T1>(a, rows) : dot_pairs<40, _MM_HINT_T0>(a, rows);
}

#else

// One row of x: one weight row after the other, each line asked for 64 lines ahead, wherever that is. On an EPYC of the
// fifth generation this reads as fast as a plain read of memory; 28 lines ahead take 5 % more when other machines use that
// memory too, two rows side by side 20 %.
void dot_row(const Product& a, Range rows) {
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
inline __attribute__((always_inline)) void products(const Product& a, i64 m0, const bf16* w, i64 k0, i64 k1, Ahead ahead,
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
inline __attribute__((always_inline)) void finish_rows(const Product& a, i64 m0, i64 n, const __m512 (&sums)[16]) {
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
inline __attribute__((always_inline)) void dot_whole(const Product& a, i64 m0, i64 n, Ahead ahead) {
  __m512 sums[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_ps();
  products<kM, kR>(a, m0, a.weight + n * a.weight_stride, 0, a.K, ahead, sums);
  finish_rows<kM, kR>(a, m0, n, sums);
}

// The same for some weight rows, two side by side. Their lines are asked for in the order of addresses.
template <int kM, int kR = 2>
void dot_rows(const Product& a, Range rows) {
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
__attribute__((noinline)) void dot_part(const Product& a, i64 m0, i64 n, i64 k0, i64 k1, Ahead ahead, __m512* held) {
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
void dot_parts(const Product& a, Range rows) {
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
void dot(const Product& a, Range rows) {
  if constexpr (kM < kDotRows)
    if (a.M > kM) return dot<kM + 1>(a, rows);
  kM * a.K * 2 <= kNearBytes ? dot_rows<kM>(a, rows) : dot_parts<kM>(a, rows);
}

// One row of x, summed as several are: sixteen weight rows in turn, with lines asked for as `dot_row` does.
inline void dot_one(const Product& a, Range rows) {
  constexpr i64 ahead = 64 * 32;
  for (i64 n = rows.from; n < rows.to; n += 16) {
    const i64 count = std::min<i64>(16, rows.to - n);
    __m512 sums[16];
    for (i64 i = 0; i < 16; i++) {
      __m512 sum = _mm512_setzero_ps();
      const bf16* w = a.weight + (n + i) * a.weight_stride;
      i64 k = i < count ? 0 : a.K;
      for (; k + 64 <= a.K; k += 64) {
        _mm_prefetch(w + k + ahead, _MM_HINT_T0);
        _mm_prefetch(w + k + ahead + 32, _MM_HINT_T0);
        sum = _mm512_dpbf16_ps(sum, load_pairs(w + k), load_pairs(a.x + k));
        sum = _mm512_dpbf16_ps(sum, load_pairs(w + k + 32), load_pairs(a.x + k + 32));
      }
      for (; k < a.K; k += 32) sum = _mm512_dpbf16_ps(sum, load_pairs(w + k, first32(a.K - k)), load_pairs(a.x + k, first32(a.K - k)));
      sums[i] = sum;
    }
    if (count == 16) {
      finish_rows<1, 16>(a, 0, n, sums);
    } else {
      for (i64 i = 0; i < count; i++) {
        __m512 own[16] = {sums[i]};
        finish_rows<1, 1>(a, 0, n + i, own);
      }
    }
  }
}

// kM rows of x from m on, of many. Asked for during the product are the next rows of x, and weight rows from `next` on,
// one for every four; null for none.
template <int kM>
void dot_near(const Product& a, i64 m, Range rows, const bf16* next) {
  static thread_local Scratch scratch;
  const i64 parts = ceil_div(16 * a.K, kNearBytes), depth = ceil_div(ceil_div(a.K, parts), 32) * 32;
  __m512* const sums = scratch.get<__m512>((rows.to - rows.from) * 16);
  for (i64 k0 = 0; k0 < a.K; k0 += depth) {
    const i64 k1 = std::min(a.K, k0 + depth);
    __m512* held = sums;
    i64 n = rows.from;
    for (; n + 4 <= rows.to; n += 4, held += 16) {
      Ahead ahead{a.weight, 0, 0};
      if (n == rows.from && m + 8 <= a.M)
        ahead = {a.x + (m + 4) * a.x_stride + k0, a.x_stride, 32};
      else if (next)
        ahead = {next + (n - rows.from) * a.weight_stride + k0, 0, 32};
      dot_part<kM, 4>(a, m, n, k0, k1, ahead, held);
    }
    for (; n < rows.to; n++, held += 16) dot_part<kM, 1>(a, m, n, k0, k1, {a.weight, 0, 0}, held);
  }
}

// Many rows of x, summed as few are: some weight rows at a time, which stay in the second-level cache.
inline void dot_many(const Product& a, Range rows) {
  const i64 some = std::max<i64>(4, kHeldBytes / (8 * a.K) * 4);
  for (i64 from = rows.from; from < rows.to; from += some) {
    const Range held{from, std::min(rows.to, from + some)};
    i64 m = 0;
    for (; m + 4 <= a.M; m += 4) {
      const i64 asked = held.to + m / 4;  // the first four tiles ask for a quarter of the rows each
      dot_near<4>(a, m, held, m < 16 && held.to + some <= rows.to ? a.weight + asked * a.weight_stride : nullptr);
    }
    for (; m < a.M; m++) dot_near<1>(a, m, held, nullptr);
  }
}

// Few rows of x, by weight rows. invariant: or many, each computed independently.
class FewRows {
 public:
  explicit FewRows(const Product& a, bool invariant = false) : a_(a), invariant_(invariant) {}
  void operator()(Range rows) const {
    if (a_.M > kDotRows) return dot_many(a_, rows);
    if (a_.M > 1) return dot(a_, rows);
    invariant_ ? dot_one(a_, rows) : dot_row(a_, rows);
  }

 private:
  const Product& a_;
  const bool invariant_;
};

#else  // GRAPHLLM_AVX512

// Adds to sums [kM][kR], of eight, the products of kM rows of x, floats at multiples of `stride`, and kR weight rows. Lines of
// each are asked for ahead, past the end in what is read next, `next` elements from its start. kInvariant: each product is summed
// in the same order, whatever kM and kR.
template <int kM, int kR, bool kInvariant>
void plain_dots(const float* x, i64 stride, const bf16* const* w, i64 depth, i64 next, float* sums) {
  constexpr int kSums = kInvariant ? 1 : kM * kR <= 3 ? 4 : kM <= 6 / kR ? 2 : 1;  // of each product, as registers hold
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

// Few rows of x as floats, in parts of k, `depth` long, so that all rows of a part stay in the first-level cache:
// [part][M][stride].
struct Widened {
  float* x;
  i64 depth, stride;

  Widened(const Product& a, bool invariant) {
    static thread_local Scratch scratch;
    const i64 parts = ceil_div((invariant ? kDotRows : a.M) * a.K * 4, kNearBytes);
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
void plain_rows(const Product& a, const Widened& wide, Range rows,
                const std::array<decltype(&plain_dots<1, kR, false>), 8 / kR>& dots) {
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
        for (i64 m = 0; m < a.M; m++) store(a.out + m * a.out_stride + n, sums[i][m / pass][m % pass * kR + r] + bias);
      }
  }
}

// Few rows of x, by weight rows. One or two read memory fastest where a thread has four streams, far apart; more of them have
// nothing to wait for, and do best with one weight row after the other. invariant: or many, some at a time, each
// computed independently.
class FewRows {
 public:
  explicit FewRows(const Product& a, bool invariant = false) : a_(a), invariant_(invariant), wide_(some(0), invariant) {}
  void operator()(Range rows) const {
    if (a_.M <= kDotRows) return invariant_ ? dots<true>(a_, wide_, rows) : dots<false>(a_, wide_, rows);
    const i64 held = std::max<i64>(kDotBlock, kHeldBytes / (2 * a_.K));
    for (i64 from = rows.from; from < rows.to; from += held)
      for (i64 m = 0; m < a_.M; m += kDotRows) {
        const Product a = some(m);
        dots<true>(a, Widened(a, true), {from, std::min(rows.to, from + held)});
      }
  }

 private:
  Product some(i64 m) const {
    Product out = a_;
    out.x += m * a_.x_stride, out.out += m * a_.out_stride, out.M = std::min<i64>(kDotRows, a_.M - m);
    return out;
  }
  template <bool kInvariant>
  static void dots(const Product& a, const Widened& wide, Range rows) {
    if (a.M <= 2) return plain_rows<4>(a, wide, rows, {&plain_dots<1, 4, kInvariant>, &plain_dots<2, 4, kInvariant>});
    plain_rows<1>(a, wide, rows, {&plain_dots<1, 1, kInvariant>, &plain_dots<2, 1, kInvariant>, &plain_dots<3, 1, kInvariant>,
                                  &plain_dots<4, 1, kInvariant>, &plain_dots<5, 1, kInvariant>, &plain_dots<6, 1, kInvariant>,
                                  &plain_dots<7, 1, kInvariant>, &plain_dots<8, 1, kInvariant>});
  }

  const Product& a_;
  const bool invariant_;
  const Widened wide_;
};

#endif  // GRAPHLLM_AVX512

}  // namespace
}  // namespace graphllm
