// The formats of quantized weights, and the integer products that serve them: VNNI's (GRAPHLLM_VNNI), AVX2's (GRAPHLLM_AVX2) or
// plain ones.
#pragma once

#include "cpu_vectors.h"

#if !defined(GRAPHLLM_GENERIC) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define GRAPHLLM_VNNI 1
#elif !defined(GRAPHLLM_GENERIC) && defined(__AVX2__) && defined(__FMA__)
#define GRAPHLLM_AVX2 1
#endif

namespace graphllm {
namespace {

constexpr i64 kRows = kLanes;           // weight rows a block
constexpr i64 kLine = 64;               // bytes: four or, of int4, eight inner entries of 16 rows

// The formats. group: inner entries that share a scale. lines: of a group. parts: operands in a line, of four inner
// entries each. zero: what is added to a weight to make the number that `Line` holds.
struct Int8 {
  static constexpr i64 group = 64, lines = group / 4;
  static constexpr int parts = 1;
#ifdef GRAPHLLM_VNNI
  static constexpr int zero = 128;
#else
  static constexpr int zero = 0;
#endif
};
struct Int4 {
  static constexpr i64 group = 32, lines = group / 8;
  static constexpr int parts = 2, zero = 8;
};

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

}  // namespace
}  // namespace graphllm
