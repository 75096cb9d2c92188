// Elementary functions that compilers vectorize: no branches, no calls. Errors: about one unit in the last place.
#pragma once

#include <cmath>

#include "cpu/target.h"

namespace graphllm {
namespace {

inline float as_float(std::int32_t bits) {
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline std::int32_t as_bits(float x) {
  std::int32_t out;
  std::memcpy(&out, &x, 4);
  return out;
}

// 2^n is added to the exponent of the rest's series, because a compiler may multiply powers in another order.
inline float exp_of(float x) {
  const float a = x < -87.33f ? -87.33f : x > 88.72f ? 88.72f : x;
  const float n = std::nearbyint(a * 1.44269504088896341f);
  const float r = std::fma(n, -1.42860682030941723e-6f, std::fma(n, -0.693145751953125f, a));
  float sum = 1.f / 5040;
  sum = sum * r + 1.f / 720;
  sum = sum * r + 1.f / 120;
  sum = sum * r + 1.f / 24;
  sum = sum * r + 1.f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.f;
  const float found = as_float(as_bits(std::fma(sum, r, 1.f)) + (std::int32_t(n) << 23));
  const float edge = x > 0.f ? INFINITY : x < 0.f ? 0.f : x;
  return x >= -87.33f && x <= 88.72f ? found : edge;
}

inline float exp2_of(float x) { return exp_of(x * 0.693147180559945309f); }

// log(1 + x) = 2 atanh(x / (2 + x)) by its series, of 1 + x from sqrt(1/2) to sqrt(2).
inline float log1p_near(float x) {
  const float s = x / (2.f + x), z = s * s;
  float sum = 2.f / 13;
  sum = sum * z + 2.f / 11;
  sum = sum * z + 2.f / 9;
  sum = sum * z + 2.f / 7;
  sum = sum * z + 2.f / 5;
  sum = sum * z + 2.f / 3;
  const float half = 0.5f * x * x;  // x - half + s (half + z sum) is exact near 0
  return x - (half - s * (half + z * sum));
}

inline float log_of(float x) {
  const bool small = x < 1.17549435e-38f;
  const float a = small ? x * 16777216.f : x;
  const std::int32_t bits = as_bits(a) - 0x3F3504F3;  // of sqrt(1/2)
  const float exponent = float(bits >> 23) - (small ? 24.f : 0.f);
  const float rest = log1p_near(as_float((bits & 0x7FFFFF) + 0x3F3504F3) - 1.f);
  const float found = std::fma(exponent, 0.693145751953125f, std::fma(exponent, 1.42860682030941723e-6f, rest));
  const float edge = x == 0.f ? -INFINITY : x < 0.f ? NAN : x;  // of 0, negative numbers, infinity and NaN
  return x > 0.f && x < INFINITY ? found : edge;
}

inline float log1p_of(float x) { return x > -0.29f && x < 0.41f ? log1p_near(x) : log_of(1.f + x); }

inline float expm1_of(float x) {
  float sum = 1.f / 362880;
  sum = sum * x + 1.f / 40320;
  sum = sum * x + 1.f / 5040;
  sum = sum * x + 1.f / 720;
  sum = sum * x + 1.f / 120;
  sum = sum * x + 1.f / 24;
  sum = sum * x + 1.f / 6;
  sum = sum * x + 0.5f;
  sum = sum * x + 1.f;
  return std::fabs(x) < 0.5f ? sum * x : exp_of(x) - 1.f;
}

inline float tanh_of(float x) {
  const float size = std::fabs(x), z = x * x;
  float sum = -1382.f / 155925;
  sum = sum * z + 62.f / 2835;
  sum = sum * z - 17.f / 315;
  sum = sum * z + 2.f / 15;
  sum = sum * z - 1.f / 3;
  const float far = 1.f - 2.f / (exp_of(2.f * size) + 1.f);
  return size < 0.3f ? x + x * z * sum : x < 0.f ? -far : far;
}

inline float sigmoid_of(float x) { return 1.f / (1.f + exp_of(-x)); }

// By Abramowitz and Stegun 7.1.26, and a series near 0; the error is below 3e-7.
inline float erf_of(float x) {
  const float size = std::fabs(x), z = x * x, t = 1.f / (1.f + 0.3275911f * size);
  float sum = 1.061405429f;
  sum = sum * t - 1.453152027f;
  sum = sum * t + 1.421413741f;
  sum = sum * t - 0.284496736f;
  sum = sum * t + 0.254829592f;
  const float far = 1.f - sum * t * exp_of(-z);
  float series = 1.f / 216;
  series = series * z - 1.f / 42;
  series = series * z + 1.f / 10;
  series = series * z - 1.f / 3;
  const float near = 1.12837916709551257f * (x + x * z * series);
  return size < 0.3f ? near : x < 0.f ? -far : far;
}

// Sine (quarter = 0) or cosine (quarter = 1), in double: within half a unit in the last place of a float.
inline float turn_of(float x, double quarter) {
  const double a = x, q = std::floor(a * 0.63661977236758134308 + 0.5);
  const double r = std::fma(q, -6.12323399573676603587e-17, std::fma(q, -1.57079632679489655800, a)), s = r * r;
  double sine = s * (1.0 / 6227020800) - 1.0 / 39916800;
  sine = sine * s + 1.0 / 362880;
  sine = sine * s - 1.0 / 5040;
  sine = sine * s + 1.0 / 120;
  sine = sine * s - 1.0 / 6;
  sine = r + r * s * sine;
  double cosine = s * (1.0 / 479001600) - 1.0 / 3628800;
  cosine = cosine * s + 1.0 / 40320;
  cosine = cosine * s - 1.0 / 720;
  cosine = cosine * s + 1.0 / 24;
  cosine = cosine * s - 0.5;
  cosine = cosine * s + 1.0;
  const double n = q + quarter, turns = n - 4 * std::floor(n * 0.25);  // 0 to 3
  const double found = turns == 0 || turns == 2 ? sine : cosine;
  return float(turns >= 2 ? -found : found);
}

}  // namespace
}  // namespace graphllm
