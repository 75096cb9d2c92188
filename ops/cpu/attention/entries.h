// What a cache holds of keys and values: numbers of the arithmetic's type, or 8 bits for each. Those are rounded as they are
// written, and read as rows of numbers into scratch memory of the thread, which the arithmetic then takes for the cache.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/vectors.h"

namespace graphllm {
namespace {

struct e4m3 {
  std::uint8_t bits;
};
struct int8 {  // times the float of its row, which lies after all rows of a block's head
  std::int8_t value;
};

// Where keys of E numbers and values of V numbers lie. Values are cache_kind elements after keys; 0: they are the first numbers
// of keys.
struct Layout {
  i64 E, V, P, cache_block, cache_kind, cache_head, cache_slot;
};

// ---- E4M3

// Round to nearest even, at most 448; a NaN stays one.
inline e4m3 to_e4m3(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const std::uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7FFFFFFF;
  if (size > 0x7F800000) return {std::uint8_t(sign | 0x7F)};
  if (size >= 0x43E00000) return {std::uint8_t(sign | 0x7E)};  // 448
  if (size >= 0x3C800000)                                      // 2^-6
    return {std::uint8_t(sign | (((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - (120 << 3)))};
  float moved;  // so far that the last bit is 2^-9
  std::memcpy(&moved, &size, 4);
  moved += 0x1p14f;
  std::memcpy(&bits, &moved, 4);
  return {std::uint8_t(sign | (bits - 0x46800000))};
}

inline void store(e4m3* to, float x) { *to = to_e4m3(x); }

template <typename Floats, typename Ints>
inline Floats from_e4m3(Ints code) {
  const Ints size = code & 0x7F;
  const Floats whole = (Floats)((size << 20) + (120 << 23)), part = __builtin_convertvector(size, Floats) * 0x1p-9f;
  return (Floats)((Ints)(size < 8 ? part : whole) | (code & 0x80) << 24);
}
inline Eight load8(const e4m3* from) {
#ifdef __AVX2__
  const EightInts code = (EightInts)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  EightInts code;
  for (i64 i = 0; i < 8; i++) code[i] = from[i].bits;
#endif
  return from_e4m3<Eight>(code);
}
inline float to_float(e4m3 x) {
  const float part = float(x.bits & 7) * 0.125f;
  const int exponent = x.bits >> 3 & 15;
  const float size = exponent ? std::ldexp(1 + part, exponent - 7) : part * 0x1p-6f;
  return x.bits & 0x80 ? -size : size;
}

template <typename T>
inline void read_row(const e4m3* from, i64 E, float, T* to) {
  i64 e = 0;
#ifdef GRAPHLLM_AVX512
  if constexpr (std::is_same_v<T, bf16>) {
    alignas(64) static constexpr std::uint16_t kSmall[32] = {0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60};
    const __m512i small = _mm512_load_si512(kSmall);
    for (; e + 32 <= E; e += 32) {
      const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + e)));
      const __m512i size = _mm512_and_si512(code, _mm512_set1_epi16(0x7F));
      const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8);
      __m512i number = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
      number = _mm512_mask_permutexvar_epi16(number, _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8)), size, small);
      _mm512_storeu_si512(to + e, _mm512_or_si512(number, sign));
    }
  }
#endif
  for (; e + 8 <= E; e += 8) store8(to + e, load8(from + e));
  for (; e < E; e++) store(to + e, to_float(from[e]));
}

// ---- int8

// The floats of a row of entries and of the entries after it.
inline float* steps_of(int8* head, const Layout& at, i64 slot) {
  return reinterpret_cast<float*>(head + at.P * at.E) + slot;
}

inline Eight load8(const int8* from) {
#ifdef __AVX2__
  const EightInts values = (EightInts)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  EightInts values;
  for (i64 i = 0; i < 8; i++) values[i] = from[i].value;
#endif
  return __builtin_convertvector(values, Eight);
}
inline float to_float(int8 x) { return float(x.value); }
inline void store(int8* to, float x) { to->value = std::int8_t(std::nearbyint(x)); }

template <typename T>
inline void read_row(const int8* from, i64 E, float step, T* to) {
  i64 e = 0;
#ifdef GRAPHLLM_AVX512
  if constexpr (std::is_same_v<T, bf16>)
    for (; e + 16 <= E; e += 16) {
      const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + e));
      const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(values));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + e), narrow(_mm512_mul_ps(numbers, _mm512_set1_ps(step))));
    }
#endif
  for (; e + 8 <= E; e += 8) store8(to + e, load8(from + e) * step);
  for (; e < E; e++) store(to + e, to_float(from[e]) * step);
}

// ---- both

// Rows of a piece of a block's head, `slot` the first one's, whatever its entries are.
template <typename T>
inline void read_rows(const e4m3* rows, const Layout& at, i64, i64 count, T* to) {
  for (i64 i = 0; i < count; i++) read_row(rows + i * at.cache_slot, at.E, 1, to + i * at.E);
}
template <typename T>
inline void read_rows(const int8* rows, const Layout& at, i64 slot, i64 count, T* to) {
  const float* steps = steps_of(const_cast<int8*>(rows) - slot * at.cache_slot, at, slot);
  for (i64 i = 0; i < count; i++) read_row(rows + i * at.cache_slot, at.E, steps[i], to + i * at.E);
}

// A quotient that is not made a product with a reciprocal, which would round otherwise.
inline float exact_quotient(float x, float y) {
  asm("" : "+m"(y));
  return x / y;
}

// Write row `slot` of a block's head. scale: what a number stands for.
template <typename T>
inline void write_row(const T* row, const Layout& at, i64 slot, float, T* head) {
  std::memcpy(head + slot * at.cache_slot, row, at.E * sizeof(T));
}
template <typename T>
inline void write_row(const T* row, const Layout& at, i64 slot, float scale, e4m3* head) {
  e4m3* to = head + slot * at.cache_slot;
  for (i64 e = 0; e < at.E; e++) store(to + e, exact_quotient(to_float(row[e]), scale));
}
template <typename T>
inline void write_row(const T* row, const Layout& at, i64 slot, float, int8* head) {
  float most = 0;
  for (i64 e = 0; e < at.E; e++) most = std::max(most, std::fabs(to_float(row[e])));
  const float step = exact_quotient(most, 127);
  *steps_of(head, at, slot) = step;
  int8* to = head + slot * at.cache_slot;
  for (i64 e = 0; e < at.E; e++) store(to + e, step > 0 ? exact_quotient(to_float(row[e]), step) : 0);
}

}  // namespace
}  // namespace graphllm
