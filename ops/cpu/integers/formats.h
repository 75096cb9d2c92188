// The formats of quantized weights, and the integer products that serve them: VNNI's (GRAPHLLM_VNNI), AVX2's (GRAPHLLM_AVX2) or
// plain ones.
#pragma once

#include "cpu/vectors.h"

#if !defined(GRAPHLLM_GENERIC) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define GRAPHLLM_VNNI 1
#elif !defined(GRAPHLLM_GENERIC) && defined(__AVX2__) && defined(__FMA__)
#define GRAPHLLM_AVX2 1
#endif

namespace graphllm {
namespace {

constexpr i64 kRows = kLanes;           // weight rows a block
constexpr i64 kLine = 64;               // bytes: four or, of int4, eight inner entries of 16 rows

// What the sum of a group's products lacks, for integers to which `zero` was added, by the sum of the entries of x.
template <int kZero>
struct ZeroPoint {
  static constexpr int zero = kZero;
  static std::int32_t correction(float, std::int32_t sum) { return -kZero * sum; }
};

// The formats. group: inner entries that share a scale. lines: of a group. parts: operands in a line, of four inner
// entries each. zero: what is added to a weight to make the number that `Line` holds.
#ifdef GRAPHLLM_VNNI
struct Int8 : ZeroPoint<128> {
#else
struct Int8 : ZeroPoint<0> {
#endif
  static constexpr i64 group = 64, lines = group / 4;
  static constexpr int parts = 1;
};
struct Int4 : ZeroPoint<8> {
  static constexpr i64 group = 32, lines = group / 8;
  static constexpr int parts = 2;
};

}  // namespace
}  // namespace graphllm
