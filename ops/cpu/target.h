// The instruction level that a kernel source is compiled for, and the numbers that all of them use.
//
// Three levels are chosen when the file is compiled: AMX (GRAPHLLM_AMX), AVX-512 with bfloat16 dot products
// (GRAPHLLM_AVX512) and plain C++ that the compiler vectorizes. -DGRAPHLLM_GENERIC forces the last one, for tests.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if !defined(GRAPHLLM_GENERIC) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__AVX512BF16__)
#define GRAPHLLM_AVX512 1
#endif
#ifdef __AVX2__
#include <immintrin.h>
#endif
#if defined(GRAPHLLM_AVX512) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define GRAPHLLM_AMX 1
#endif

namespace graphllm {
namespace {  // every kernel source is its own translation unit of one library

using i64 = std::int64_t;
using f32 = float;

// A number for which a generic lambda is compiled.
template <int kIndex>
using Index = std::integral_constant<int, kIndex>;

constexpr i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

struct bf16 {
  std::uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  std::uint32_t bits = std::uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// Round to nearest even; a NaN stays one because its quiet bit is set.
inline bf16 to_bf16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  std::uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);
  return {std::uint16_t(((bits & 0x7FFFFFFF) > 0x7F800000 ? bits | 0x400000 : rounded) >> 16)};
}
inline void store(float* to, float x) { *to = x; }
inline void store(bf16* to, float x) { *to = to_bf16(x); }

}  // namespace
}  // namespace graphllm
