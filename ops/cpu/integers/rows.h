// Rows of x rounded to int8 in groups, in the order in which products of a block of weights read them.
#pragma once

#include <algorithm>

#include "cpu/threads.h"
#include "cpu/integers/blocks.h"

namespace graphllm {
namespace {

// Rows of x as int8, a tile of rows at a time and in the order in which they are read: for each group of inner entries
// the scale of each row, what corrects for the zero point or the minimum of the weights, then four entries of each row by
// turns.
template <typename F>
struct Quantized {
  char* data;
  i64 rows, groups, tile_rows = ceil_div(rows, ceil_div(rows, kTile));

  static i64 bytes(i64 rows, i64 groups) { return rows * groups * (8 + F::group); }
  i64 width(i64 m0) const { return std::min(tile_rows, rows - m0); }
  const char* tile(i64 m0) const { return data + bytes(m0, groups); }
};

using Bytes = Wide<kLanes>::Bytes;

inline Bytes to_bytes(Ints x) {
#ifdef GRAPHLLM_AVX2  // for which gcc 12 has no good translation
  const __m256i turned = _mm256_packs_epi32((__m256i)reg_of<EightInts>(x, 0), (__m256i)reg_of<EightInts>(x, 1));
  const __m256i words = _mm256_permute4x64_epi64(turned, 0xD8);
  return (Bytes)_mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#else
  return __builtin_convertvector(x, Bytes);
#endif
}

// Rows of x [.., K], `rows` of them. The largest absolute value is found among the bits as integers, where a NaN is the largest of all: its group becomes
// NaN.
template <typename F, typename T>
void quantize_rows(const T* rows_of_x, i64 stride, i64 K, const Quantized<F>& to, Range rows) {
  constexpr i64 parts = F::group / kLanes;
  for (i64 m = rows.from; m < rows.to; m++) {
    const i64 m0 = m / to.tile_rows * to.tile_rows, width = to.width(m0);
    char* at = to.data + Quantized<F>::bytes(m0, to.groups) + (m - m0) * 4;
    for (i64 g = 0; g < to.groups; g++, at += width * (8 + F::group)) {
      const T* x = rows_of_x + m * stride + g * F::group;
      T padded[F::group] = {};
      if (const i64 inside = K - g * F::group; inside < F::group) {
        std::memcpy(padded, x, inside * sizeof(T));
        x = padded;
      }
      Vec numbers[parts];
      RegInts most = {};
      for (i64 i = 0; i < parts; i++) {
        numbers[i] = load_vec(x + i * kLanes);
        for (int r = 0; r < kRegs; r++) {
          const RegInts bits = reg_of<RegInts>(numbers[i], r) & 0x7FFFFFFF;
          most = bits > most ? bits : most;
        }
      }
      std::int32_t largest_bits = 0, sum = 0;
      for (int i = 0; i < kRegLanes; i++) largest_bits = std::max(largest_bits, most[i]);
      float largest;
      std::memcpy(&largest, &largest_bits, 4);
      const float inverse = largest > 0 ? 127.0f / largest : 0, scale = largest / 127.0f;
      Ints sums = {};
      for (i64 i = 0; i < parts; i++) {
        const Vec scaled = numbers[i] * inverse, half = (Vec)(((Ints)scaled & INT32_MIN) | 0x3F000000);
        const Ints rounded = __builtin_convertvector(scaled + half, Ints);
        sums += rounded;
        const Bytes bytes = to_bytes(rounded);
        for (int quad = 0; quad < 4; quad++)
          std::memcpy(at + width * (8 + (i * 4 + quad) * 4), reinterpret_cast<const char*>(&bytes) + quad * 4, 4);
      }
      for (int i = 0; i < kLanes; i++) sum += sums[i];
      const std::int32_t correction = F::correction(scale, sum);
      std::memcpy(at, &scale, 4);
      std::memcpy(at + width * 4, &correction, 4);
    }
  }
}

}  // namespace
}  // namespace graphllm
