// Element types of tensors that loop programs read and write, in the order of `graphllm.compile.codegen.loops`.
#pragma once

#include "cpu/target.h"

namespace graphllm {
namespace {

enum Dtype { kFloat32, kBfloat16, kFloat16, kInt64, kInt32, kInt16, kInt8, kUint8, kBoolean };
constexpr i64 kBytes[] = {4, 2, 2, 8, 4, 2, 1, 1, 1};

struct half {
  std::uint16_t bits;
};

inline float to_float(half x) {
#ifdef __F16C__
  return _cvtsh_ss(x.bits);
#else
  const std::uint32_t sign = std::uint32_t(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31, rest = x.bits & 1023;
  std::uint32_t bits;
  float out;
  if (exponent == 0) {
    out = float(rest) * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&bits, &out, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 0x7F800000 : (exponent + 112) << 23) | rest << 13;
  }
  std::memcpy(&out, &bits, 4);
  return out;
#endif
}

inline half to_half(float x) {
#ifdef __F16C__
  return {std::uint16_t(_cvtss_sh(x, 0))};
#else
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const std::uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
  if (size > 0x7F800000) return {std::uint16_t(sign | 0x7E00)};
  if (size >= 0x477FF000) return {std::uint16_t(sign | 0x7C00)};
  if (size < 0x38800000) {  // below the least normal number: the sum is rounded to multiples of 2^-24
    float sum;
    std::memcpy(&sum, &size, 4);
    sum += 0.5f;
    std::uint32_t rounded;
    std::memcpy(&rounded, &sum, 4);
    return {std::uint16_t(sign | (rounded - 0x3F000000))};
  }
  const std::uint32_t rounded = size + 0xFFF + (size >> 13 & 1);
  return {std::uint16_t(sign | (rounded - 0x38000000) >> 13)};
#endif
}

// Copies between a row of a tensor, `step` elements apart, and a register.
template <typename From, typename To, typename Convert>
inline void convert(const From* from, i64 step, To* to, i64 apart, i64 count, Convert&& convert) {
  if (step == 1 && apart == 1)
    for (i64 i = 0; i < count; i++) to[i] = convert(from[i]);
  else
    for (i64 i = 0; i < count; i++) to[i * apart] = convert(from[i * step]);
}

// Calls work with a pointer to elements of the type.
template <typename Work>
inline void with_floats(i64 dtype, void* memory, Work&& work) {
  if (dtype == kFloat32)
    work(static_cast<float*>(memory));
  else if (dtype == kBfloat16)
    work(static_cast<bf16*>(memory));
  else
    work(static_cast<half*>(memory));
}
template <typename Work>
inline void with_integers(i64 dtype, void* memory, Work&& work) {
  switch (dtype) {
    case kInt64: return work(static_cast<std::int64_t*>(memory));
    case kInt32: return work(static_cast<std::int32_t*>(memory));
    case kInt16: return work(static_cast<std::int16_t*>(memory));
    case kInt8: return work(static_cast<std::int8_t*>(memory));
    default: return work(static_cast<std::uint8_t*>(memory));
  }
}

inline void store(half* to, float x) { *to = to_half(x); }

}  // namespace
}  // namespace graphllm
