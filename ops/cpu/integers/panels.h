// Many rows of x with AMX: panels (cpu/panels.h) of quantized weights, scaled and rounded to bfloat16 on the way.
#pragma once

#include "cpu/integers/formats.h"
#include "cpu/panels.h"

namespace graphllm {
namespace {

// A packed matrix [.., inner].
struct IntMatrix {
  const std::uint8_t* values;
  const bf16* scales;
  i64 inner;
};

#ifdef GRAPHLLM_AMX

constexpr i64 kMany = 32;  // rows of x from which on weights become bfloat16

// A panel of weights for k in [k0, k0 + depth), k0 a multiple of a group.
template <typename F>
void unpack(const IntMatrix& a, const Panel& panel, i64 k0, i64 depth, bf16* to) {
  const i64 groups = ceil_div(a.inner, F::group);
  alignas(64) static constexpr std::uint16_t kPairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i pairs = _mm512_load_si512(kPairs), last = _mm512_set1_epi32(15), zero = _mm512_set1_epi32(F::parts == 2 ? 8 : 0);
  for (i64 half = 0; half < 2; half++)
    for (i64 g = k0 / F::group; g * F::group < k0 + depth; g++) {
      bf16* at = to + (g * F::group - k0) * kPanel + half * 32;
      if (panel.valid[half] == 0) {
        for (i64 p = 0; p < F::group / 2; p++) _mm512_store_si512(at + p * 2 * kPanel, _mm512_setzero_si512());
        continue;
      }
      const i64 number = panel.row[half] / kRows * groups + g;
      const __m512 scale = load16(a.scales + number * kRows);
      for (i64 l = 0; l < F::lines; l++) {
        const __m512i line = _mm512_loadu_si512(a.values + (number * F::lines + l) * kLine);
        for (int part = 0; part < F::parts; part++) {
          __m512 entries[4];
          for (int e = 0; e < 4; e++) {
            const __m512i bits = F::parts == 1 ? _mm512_srai_epi32(_mm512_slli_epi32(line, 24 - 8 * e), 24)
                                               : _mm512_and_si512(_mm512_srli_epi32(line, 8 * e + 4 * part), last);
            entries[e] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(bits, zero)), scale);
          }
          for (int p = 0; p < 2; p++, at += 2 * kPanel)
            _mm512_store_si512(at, _mm512_permutexvar_epi16(
                                       pairs, (__m512i)_mm512_cvtne2ps_pbh(entries[2 * p + 1], entries[2 * p])));
        }
      }
    }
}

#endif

}  // namespace
}  // namespace graphllm
