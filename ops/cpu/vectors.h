// Several values side by side: loads and stores, transposition, sums over lanes, comparison and powers of two.
#pragma once

#include <algorithm>

#include "cpu/target.h"

namespace graphllm {
namespace {

#ifdef GRAPHLLM_AVX512

inline __mmask16 first16(i64 count) { return count >= 16 ? __mmask16(0xFFFF) : __mmask16((1u << count) - 1); }
inline __mmask32 first32(i64 count) { return count >= 32 ? __mmask32(~0u) : __mmask32((1u << count) - 1); }

inline __m512 widen(__m256i bf16s) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16s), 16));
}
inline __m256i narrow(__m512 floats) { return (__m256i)_mm512_cvtneps_pbh(floats); }

inline __m512 load16(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 load16(const bf16* from) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline __m512 load16(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }
inline __m512 load16(const bf16* from, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, from)); }
inline void store16(float* to, __m512 x, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, x); }
inline void store16(bf16* to, __m512 x, __mmask16 mask) { _mm256_mask_storeu_epi16(to, mask, narrow(x)); }

inline __m512bh load_pairs(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }
inline __m512bh load_pairs(const bf16* from, __mmask32 mask) { return (__m512bh)_mm512_maskz_loadu_epi16(mask, from); }

// Transpose a 16 x 16 block of 32-bit values held in 16 registers.
inline void transpose16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xDD);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xDD);
  }
}

// Lane i of the result is the sum of all lanes of v[i].
inline __m512 add_lanes(const __m512 v[16]) {
  __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 8
  for (int i = 0; i < 4; i++) {
    const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
#pragma GCC unroll 8
  for (int i = 0; i < 2; i++)
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xDD));
  return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xDD));
}

#endif  // GRAPHLLM_AVX512

// kCount values of each kind. The compiler splits them into what the machine has; where it has no good translation of
// what is meant, the instruction is named. Typedefs, because gcc drops a dependent size from an alias.
template <int kCount>
struct Wide {
  typedef float Floats __attribute__((vector_size(4 * kCount)));
  typedef std::int32_t Ints __attribute__((vector_size(4 * kCount)));  // a comparison gives -1 and 0
  typedef std::uint32_t Words __attribute__((vector_size(4 * kCount)));
  typedef std::uint16_t Halves __attribute__((vector_size(2 * kCount)));
  typedef std::int8_t Bytes __attribute__((vector_size(kCount)));
};

// Eight: what AVX2 has; gcc 12 keeps wider sums in memory there.
using Eight = Wide<8>::Floats;
using EightInts = Wide<8>::Ints;
using EightWords = Wide<8>::Words;
using EightHalves = Wide<8>::Halves;

inline Eight load8(const float* from) {
  Eight out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
inline Eight load8(const bf16* from) {
#ifdef __AVX2__  // for which gcc 12 has no good translation
  return (Eight)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16);
#else
  EightHalves halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Eight)(__builtin_convertvector(halves, EightWords) << 16);
#endif
}
inline void store8(float* to, Eight x) { std::memcpy(to, &x, sizeof x); }
inline void store8(bf16* to, Eight x) {  // as to_bf16
  const EightWords bits = (EightWords)x, rounded = bits + 0x7FFF + ((bits >> 16) & 1);
  const EightHalves halves =
      __builtin_convertvector(((bits & 0x7FFFFFFF) > 0x7F800000 ? bits | 0x400000 : rounded) >> 16, EightHalves);
  std::memcpy(to, &halves, sizeof halves);
}

template <typename T>
inline void widen_row(const T* from, i64 count, float* to) {
  i64 i = 0;
  for (; i + 8 <= count; i += 8) store8(to + i, load8(from + i));
  for (; i < count; i++) to[i] = to_float(from[i]);
}

template <int... kLanesOf>
inline Eight mix(Eight a, Eight b) {
  return __builtin_shuffle(a, b, EightWords{kLanesOf...});
}

// Transpose an 8 x 8 block.
inline void transpose8(Eight r[8]) {
  Eight t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = mix<0, 8, 1, 9, 4, 12, 5, 13>(r[i], r[i + 1]);
    t[i + 1] = mix<2, 10, 3, 11, 6, 14, 7, 15>(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const int j = i / 2 * 4 + i % 2;
    r[2 * i] = mix<0, 1, 8, 9, 4, 5, 12, 13>(t[j], t[j + 2]);
    r[2 * i + 1] = mix<2, 3, 10, 11, 6, 7, 14, 15>(t[j], t[j + 2]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = mix<0, 1, 2, 3, 8, 9, 10, 11>(r[i], r[i + 4]);
    t[i + 4] = mix<4, 5, 6, 7, 12, 13, 14, 15>(r[i], r[i + 4]);
  }
  std::copy(t, t + 8, r);
}

// Lane i of the result is the sum of all lanes of v[i].
inline Eight add_lanes(const Eight v[8]) {
  Eight a[4], b[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    a[i] = mix<0, 8, 1, 9, 4, 12, 5, 13>(v[2 * i], v[2 * i + 1]) + mix<2, 10, 3, 11, 6, 14, 7, 15>(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    b[i] = mix<0, 1, 8, 9, 4, 5, 12, 13>(a[2 * i], a[2 * i + 1]) + mix<2, 3, 10, 11, 6, 7, 14, 15>(a[2 * i], a[2 * i + 1]);
  return mix<0, 1, 2, 3, 8, 9, 10, 11>(b[0], b[1]) + mix<4, 5, 6, 7, 12, 13, 14, 15>(b[0], b[1]);
}

constexpr i64 kLanes = 16;
using Vec = Wide<kLanes>::Floats;
using Ints = Wide<kLanes>::Ints;

// As many as a register of this machine holds.
#ifdef GRAPHLLM_AVX512
constexpr i64 kRegLanes = 16;
#else
constexpr i64 kRegLanes = 8;
#endif
constexpr int kRegs = kLanes / kRegLanes;
using Reg = Wide<kRegLanes>::Floats;
using RegInts = Wide<kRegLanes>::Ints;

// a * b + c, rounded once. Sums made of it keep their order; the compiler may regroup others, and does where it unrolls a loop.
inline Reg multiply_add(Reg a, Reg b, Reg c) {
#if defined(GRAPHLLM_AVX512)
  return (Reg)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Reg)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

template <typename P, typename V>
inline P reg_of(const V& values, int index) {
  P out;
  std::memcpy(&out, reinterpret_cast<const char*>(&values) + index * sizeof out, sizeof out);
  return out;
}
inline void put_reg(Vec& values, int index, Reg reg) {
  std::memcpy(reinterpret_cast<char*>(&values) + index * sizeof reg, &reg, sizeof reg);
}

// A vector that sums and products are not reordered across, where rounding must be that of the order written.
template <typename V>
inline V kept(V x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__AVX__)
  if constexpr (sizeof(V) <= 32)
    asm("" : "+x"(x));
  else
    asm("" : "+m"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

inline Vec load_vec(const float* from) {
  Vec out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}
inline Vec load_vec(const bf16* from) {
#ifdef GRAPHLLM_AVX2
  Vec out;
  for (int h = 0; h < 2; h++) put_reg(out, h, load8(from + 8 * h));
  return out;
#else
  Wide<kLanes>::Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return (Vec)(__builtin_convertvector(halves, Ints) << 16);
#endif
}
inline void store_vec(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }
inline void store_vec(bf16* to, Vec x) {
#ifdef GRAPHLLM_AVX512
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow((__m512)x));
#else
  for (int h = 0; h < 2; h++) store8(to + 8 * h, reg_of<Eight>(x, h));
#endif
}

// The first `count` of 16 values; the others are zeros, or not written.
template <typename T>
inline Vec load_some(const T* from, i64 count) {
  if (count >= kLanes) return load_vec(from);
  T all[kLanes] = {};
  std::memcpy(all, from, count * sizeof(T));
  return load_vec(all);
}
template <typename T>
inline void store_some(T* to, Vec x, i64 count) {
  if (count >= kLanes) return store_vec(to, x);
  T all[kLanes];
  store_vec(all, x);
  std::memcpy(to, all, count * sizeof(T));
}

inline Vec vec(float x) { return x - Vec{}; }
inline Ints ints(std::int32_t x) { return x - Ints{}; }

#ifdef GRAPHLLM_AVX512
inline Vec larger(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
inline unsigned bits(Ints mask) { return _mm512_movepi32_mask((__m512i)mask); }
#else
inline Eight larger(Eight a, Eight b) { return a > b ? a : b; }
inline unsigned bits(EightInts mask) {
#ifdef __AVX2__
  return unsigned(_mm256_movemask_ps((__m256)mask));
#else
  unsigned out = 0;
  for (i64 i = 0; i < 8; i++) out |= unsigned(mask[i] & 1) << i;
  return out;
#endif
}
// gcc 12 compares and chooses among sixteen values one by one.
template <typename Work, typename... Values>
inline Vec by_halves(const Work& work, const Values&... values) {
  Vec out;
  for (int h = 0; h < 2; h++) put_reg(out, h, work(reg_of<Eight>(values, h)...));
  return out;
}
inline Vec larger(Vec a, Vec b) { return by_halves([](Eight x, Eight y) { return larger(x, y); }, a, b); }
inline unsigned bits(Ints mask) { return bits(reg_of<EightInts>(mask, 0)) | bits(reg_of<EightInts>(mask, 1)) << 8; }
#endif

// 2^x for x <= 0, relative error below 2e-7 (precise) or 1e-4: 2^floor(x) times a polynomial in the rest, fitted for least
// relative error. x may be minus infinity.
template <bool kPrecise, typename V>
inline V exp2_rest(V r) {
  V p{};
  if constexpr (kPrecise) {
    p = p + 0.0018775766948238015f;
    p = p * r + 0.00898933969438076f;
    p = p * r + 0.05582631751894951f;
    p = p * r + 0.24015361070632935f;
    p = p * r + 0.6931530833244324f;
    p = p * r + 0.9999999403953552f;
  } else {
    p = p + 0.07802452147006989f;
    p = p * r + 0.22606715559959412f;
    p = p * r + 0.6958335638046265f;
    p = p * r + 0.9999251961708069f;
  }
  return p;
}
#ifdef GRAPHLLM_AVX512
template <bool kPrecise>
inline Vec exp2_vec(Vec x) {
  const Vec r = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return (Vec)_mm512_scalef_ps((__m512)exp2_rest<kPrecise>(r), (__m512)x);
}
#else
template <bool kPrecise>
inline Eight exp2_vec(Eight x) {
  const Eight in_range = larger(x, Eight{} - 126.0f);
  const EightInts n = __builtin_convertvector(in_range - 1.0f, EightInts);
  const Eight r = in_range - __builtin_convertvector(n, Eight);
  return x <= -126.0f ? Eight{} : exp2_rest<kPrecise>(r) * (Eight)((n + 127) << 23);
}
template <bool kPrecise>
inline Vec exp2_vec(Vec x) {
  return by_halves([](Eight half) { return exp2_vec<kPrecise>(half); }, x);
}
#endif

// 1 / (1 + exp(-x)).
inline Vec sigmoid(Vec x) {
  const Vec large = 1.0f / (1.0f + exp2_vec<true>(-1.442695041f * larger(x, -x)));  // of |x|
  const Ints sign = (Ints)x & ints(INT32_MIN);
  return 0.5f + (Vec)((Ints)(large - 0.5f) | sign);
}

}  // namespace
}  // namespace graphllm
