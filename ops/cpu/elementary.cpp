// The elementary functions that generated kernels call by the names of a library within torch's: here, so that an
// artifact's library needs none of torch's: loading them takes longer than loading a model.
#ifdef __x86_64__
#include <immintrin.h>

#include <cmath>
#include <cstdint>

#define GRAPHLLM_HIDDEN extern "C" __attribute__((visibility("hidden")))

namespace {

constexpr double kTwoByPi = 0.63661977236758134308, kHalfPi = 1.57079632679489655800, kHalfPiRest = 6.12323399573676603587e-17;

// Sine (quarter = 0) or cosine (quarter = 1), in double: within half a unit in the last place of a float.
template <int N>
inline void turn(const float* x, float* out, double quarter) {
  for (int i = 0; i < N; ++i) {
    const double a = x[i], q = std::floor(a * kTwoByPi + 0.5);
    const double r = std::fma(-q, kHalfPiRest, std::fma(-q, kHalfPi, a)), s = r * r;
    double sine = std::fma(s, std::fma(s, 1.0 / 6227020800, -1.0 / 39916800), 1.0 / 362880);
    sine = std::fma(s, std::fma(s, std::fma(s, sine, -1.0 / 5040), 1.0 / 120), -1.0 / 6);
    sine = std::fma(r * s, sine, r);
    double cosine = std::fma(s, std::fma(s, 1.0 / 479001600, -1.0 / 3628800), 1.0 / 40320);
    cosine = std::fma(s, std::fma(s, std::fma(s, cosine, -1.0 / 720), 1.0 / 24), -0.5);
    cosine = std::fma(s, cosine, 1.0);
    const double n = q + quarter, turns = n - 4 * std::floor(n * 0.25);  // 0 to 3
    const double found = turns == 0 || turns == 2 ? sine : cosine;
    out[i] = static_cast<float>(turns >= 2 ? -found : found);
  }
}

// exp(r) - 1 of |r| <= ln(2) / 2 by its series: 1 / k! from k = 7 on.
constexpr float kSeries[] = {1.f / 5040, 1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f};
constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693145751953125f, kLn2Rest = 1.42860682030941723e-6f;
constexpr float kLowest = -105.f, kHighest = 89.5f;  // beyond: 0 and infinity

}  // namespace

#ifdef __AVX512F__
GRAPHLLM_HIDDEN __m512 Sleef_expf16_u10(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(kLowest), _mm512_min_ps(_mm512_set1_ps(kHighest), x));  // NaN stays
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(kLog2E)), 8);
  const __m512 near = _mm512_fnmadd_ps(n, _mm512_set1_ps(kLn2), x), r = _mm512_fnmadd_ps(n, _mm512_set1_ps(kLn2Rest), near);
  __m512 sum = _mm512_set1_ps(kSeries[0]);
  for (int i = 1; i < 7; ++i) sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(kSeries[i]));
  return _mm512_scalef_ps(_mm512_fmadd_ps(sum, r, _mm512_set1_ps(1.f)), n);
}

GRAPHLLM_HIDDEN __m512 Sleef_sinf16_u35(__m512 x) {
  alignas(64) float in[16], out[16];
  _mm512_store_ps(in, x);
  turn<16>(in, out, 0);
  return _mm512_load_ps(out);
}

GRAPHLLM_HIDDEN __m512 Sleef_cosf16_u35(__m512 x) {
  alignas(64) float in[16], out[16];
  _mm512_store_ps(in, x);
  turn<16>(in, out, 1);
  return _mm512_load_ps(out);
}
#endif

#ifdef __AVX2__
GRAPHLLM_HIDDEN __m256 Sleef_expf8_u10(__m256 x) {
  x = _mm256_max_ps(_mm256_set1_ps(kLowest), _mm256_min_ps(_mm256_set1_ps(kHighest), x));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(kLog2E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 near = _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2), x), r = _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2Rest), near);
  __m256 sum = _mm256_set1_ps(kSeries[0]);
  for (int i = 1; i < 7; ++i) sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(kSeries[i]));
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
  const auto power = [&](__m256i e) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, bias), 23)); };
  __m256 found = _mm256_mul_ps(_mm256_fmadd_ps(sum, r, _mm256_set1_ps(1.f)), power(half));
  asm("" : "+x"(found));  // the compiler may multiply in another order, and the powers together are too large
  return _mm256_mul_ps(found, power(_mm256_sub_epi32(whole, half)));
}

GRAPHLLM_HIDDEN __m256 Sleef_sinf8_u35(__m256 x) {
  alignas(32) float in[8], out[8];
  _mm256_store_ps(in, x);
  turn<8>(in, out, 0);
  return _mm256_load_ps(out);
}

GRAPHLLM_HIDDEN __m256 Sleef_cosf8_u35(__m256 x) {
  alignas(32) float in[8], out[8];
  _mm256_store_ps(in, x);
  turn<8>(in, out, 1);
  return _mm256_load_ps(out);
}
#endif
#endif
