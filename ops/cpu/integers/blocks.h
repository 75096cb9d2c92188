// Products of blocks of 16 weight rows and some quantized rows of x: integers within a group, scaled in float32 once.
#pragma once

#include "cpu/integers/formats.h"

namespace graphllm {
namespace {

constexpr i64 kAhead = 2048;            // bytes of weights that are asked for ahead

// Rows of x side by side at most, and the blocks, far apart, that one row takes at once: memory is read faster as streams.
#ifdef GRAPHLLM_VNNI
constexpr int kTile = 12, kStreams = 2;
#elif defined(GRAPHLLM_AVX2)
constexpr int kTile = 8, kStreams = 2;
#else
constexpr int kTile = 2, kStreams = 1;
#endif

#ifdef GRAPHLLM_AVX2

// kBlocks blocks of 16 weight rows, `apart` bytes and `scales_apart` scales from each other, times kM rows of x: totals
// [kBlocks, kM, 16]. As many eights of weight rows at a time as there are registers for their sums. The product of
// unsigned and signed bytes adds pairs in 16 bits, where the eight such sums of a group of int4 fit (8 * 2 * 15 * 127), and
// of int8 (|w| up to 127, a weight is never -128) one.
template <typename F, int kM, int kBlocks>
void block_rows(const std::uint8_t* w, i64 apart, const bf16* scales, i64 scales_apart, const char* x, i64 groups,
                Vec* totals) {
  constexpr int kHalves = kM * kBlocks <= 4 ? 2 : 1, kEights = kBlocks * kHalves;
  const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
  const auto row = [](const char* at) {
    std::int32_t four;
    std::memcpy(&four, at, 4);
    return _mm256_set1_epi32(four);
  };
  for (int half = 0; half < 2; half += kHalves) {
    const std::uint8_t* line = w + half * 32;
    const bf16* scale = scales + half * 8;
    const char* group = x;
    Eight total[kM][kEights] = {};
    for (i64 g = 0; g < groups; g++, scale += kRows) {
      __m256i sums[kM][kEights];
#pragma GCC unroll 8
      for (int m = 0; m < kM; m++)
#pragma GCC unroll 4
        for (int e = 0; e < kEights; e++) sums[m][e] = _mm256_setzero_si256();
      const char* q = group + kM * 8;
      for (i64 l = 0; l < F::lines; l++, line += kLine) {
        __m256i values[kEights];
#pragma GCC unroll 4
        for (int e = 0; e < kEights; e++)
          values[e] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + e / kHalves * apart + e % kHalves * 32));
        if (half == 0)
#pragma GCC unroll 2
          for (int b = 0; b < kBlocks; b++) __builtin_prefetch(line + b * apart + kAhead);
        if constexpr (F::parts == 1) {
#pragma GCC unroll 8
          for (int m = 0; m < kM; m++, q += 4) {
            const __m256i of_x = row(q);
#pragma GCC unroll 4
            for (int e = 0; e < kEights; e++) {
              const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(values[e]), _mm256_sign_epi8(of_x, values[e]));
              sums[m][e] = _mm256_add_epi32(sums[m][e], _mm256_madd_epi16(pairs, ones));
            }
          }
        } else {
          const auto add = [&](bool second) __attribute__((always_inline)) {
            __m256i part[kEights];
#pragma GCC unroll 4
            for (int e = 0; e < kEights; e++)
              part[e] = _mm256_and_si256(second ? _mm256_srli_epi16(values[e], 4) : values[e], low);
#pragma GCC unroll 8
            for (int m = 0; m < kM; m++, q += 4) {
              const __m256i of_x = row(q);
#pragma GCC unroll 4
              for (int e = 0; e < kEights; e++)
                sums[m][e] = _mm256_add_epi16(sums[m][e], _mm256_maddubs_epi16(part[e], of_x));
            }
          };
          add(false), add(true);
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < kM; m++) {
        float of_x;
        std::memcpy(&of_x, group + m * 4, 4);
#pragma GCC unroll 4
        for (int e = 0; e < kEights; e++) {
          const Eight scale_of_w = load8(scale + e / kHalves * scales_apart + e % kHalves * 8);
          __m256i sum = sums[m][e];
          if constexpr (F::parts == 2) sum = _mm256_add_epi32(_mm256_madd_epi16(sum, ones), row(group + (kM + m) * 4));
          // Named, so that gcc multiplies in the same order for any number of rows.
          total[m][e] = (Eight)_mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), (__m256)(scale_of_w * of_x), (__m256)total[m][e]);
        }
      }
      group = q;
    }
#pragma GCC unroll 8
    for (int m = 0; m < kM; m++)
#pragma GCC unroll 4
      for (int e = 0; e < kEights; e++) put_reg(totals[e / kHalves * kM + m], half + e % kHalves, total[m][e]);
  }
}

#else

// A line of weights as operands: one of int8, two of int4.
#ifdef GRAPHLLM_VNNI
template <typename F>
struct Line {
  __m512i part[2];
  Line() = default;
  explicit Line(const std::uint8_t* at) {
    const __m512i line = _mm512_loadu_si512(at);
    if constexpr (F::parts == 1) {
      part[0] = _mm512_xor_si512(line, _mm512_set1_epi8(char(0x80)));
    } else {
      const __m512i low = _mm512_set1_epi8(15);
      part[0] = _mm512_and_si512(line, low);
      part[1] = _mm512_and_si512(_mm512_srli_epi16(line, 4), low);
    }
  }
  Ints add(Ints sum, int p, const char* x) const {
    std::int32_t four;
    std::memcpy(&four, x, 4);
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, part[p], _mm512_set1_epi32(four));
  }
};
#else
template <typename F>
struct Line {
  Ints part[2][4];
  Line() = default;
  explicit Line(const std::uint8_t* at) {
    for (int i = 0; i < kLanes; i++)
      for (int j = 0; j < 4; j++) {
        const std::uint8_t byte = at[4 * i + j];
        part[0][j][i] = F::parts == 1 ? std::int8_t(byte) : byte & 15;
        if constexpr (F::parts == 2) part[1][j][i] = byte >> 4;
      }
  }
  Ints add(Ints sum, int p, const char* x) const {
    for (int j = 0; j < 4; j++) sum += part[p][j] * ints(static_cast<signed char>(x[j]));
    return sum;
  }
};
#endif

// kBlocks blocks of 16 weight rows, `apart` bytes and `scales_apart` scales from each other, times kM rows of x: totals
// [kBlocks, kM, 16].
template <typename F, int kM, int kBlocks>
void block_rows(const std::uint8_t* w, i64 apart, const bf16* scales, i64 scales_apart, const char* x, i64 groups,
                Vec* totals) {
  Vec total[kBlocks * kM] = {};
  for (i64 g = 0; g < groups; g++, scales += kRows) {
    Ints sums[kBlocks * kM];
    for (int m = 0; m < kM; m++) {
      std::int32_t correction;
      std::memcpy(&correction, x + (kM + m) * 4, 4);
      for (int b = 0; b < kBlocks; b++) sums[b * kM + m] = ints(correction);
    }
    const char* q = x + kM * 8;
#pragma GCC unroll 16
    for (i64 l = 0; l < F::lines; l++, w += kLine) {
      Line<F> lines[kBlocks];
      for (int b = 0; b < kBlocks; b++) {
#ifdef GRAPHLLM_VNNI
        _mm_prefetch(w + b * apart + kAhead, _MM_HINT_T0);
#endif
        lines[b] = Line<F>(w + b * apart);
      }
      for (int p = 0; p < F::parts; p++, q += kM * 4)
        for (int m = 0; m < kM; m++)
          for (int b = 0; b < kBlocks; b++) sums[b * kM + m] = lines[b].add(sums[b * kM + m], p, q + m * 4);
    }
    for (int b = 0; b < kBlocks; b++) {
      const Vec scale = load_vec(scales + b * scales_apart);
      for (int m = 0; m < kM; m++) {
        float of_x;
        std::memcpy(&of_x, x + m * 4, 4);
        const Vec factor = kept(scale * of_x);  // gcc must multiply in the same order for any number of rows
        total[b * kM + m] += __builtin_convertvector(sums[b * kM + m], Vec) * factor;
      }
    }
    x = q;
  }
  for (int i = 0; i < kBlocks * kM; i++) totals[i] = total[i];
}

#endif  // GRAPHLLM_AVX2

// One block and any number of rows, at most kM.
template <typename F, int kM>
void some_rows(const std::uint8_t* w, const bf16* scales, const char* x, i64 groups, Vec* totals, i64 rows) {
  if constexpr (kM > 0) {
    if (rows == kM)
      block_rows<F, kM, 1>(w, 0, scales, 0, x, groups, totals);
    else
      some_rows<F, kM - 1>(w, scales, x, groups, totals, rows);
  }
}

}  // namespace
}  // namespace graphllm
