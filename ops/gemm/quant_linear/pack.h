// Rounding and packing of weights while they are loaded: what graphllm/weights/formats/integers.py specifies, bit by bit. So divisions
// must be divisions, and sums stay in order.
#pragma once

#include <algorithm>

#include "cpu/integers/formats.h"

#pragma GCC push_options
#pragma GCC optimize("no-reciprocal-math", "no-associative-math", "signed-zeros")

namespace graphllm {
namespace {

inline Vec wide(const float* from) {
  Vec out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}
inline Vec wide(const bf16* from) {
  Wide<kLanes>::Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return (Vec)(__builtin_convertvector(halves, Ints) << 16);
}

// The scale of a group before it is rounded: a 127th of the largest magnitude; of int4 an eighth of the number with the
// largest magnitude, with the other sign. NaN if any is.
template <typename F, i64 kParts>
float scale_of(const Vec (&numbers)[kParts]) {
  Ints most = {};
  Vec high = numbers[0], low = numbers[0];
  for (const Vec& v : numbers) {
    const Ints bits = (Ints)v & 0x7FFFFFFF;
    most = bits > most ? bits : most;
    high = v > high ? v : high;
    low = v < low ? v : low;
  }
  std::int32_t bits = 0;
  float largest, highest = high[0], lowest = low[0];
  for (int i = 0; i < kLanes; i++) {
    bits = std::max(bits, most[i]);
    highest = high[i] > highest ? high[i] : highest;
    lowest = low[i] < lowest ? low[i] : lowest;
  }
  std::memcpy(&largest, &bits, 4);
  if (F::parts == 1) return largest / 127.0f;
  if (bits > 0x7F800000) return largest;
  return (-lowest > highest ? -lowest : -highest) / 8.0f + 0.0f;  // never -0
}

// Numbers [rows, inner] into a packed matrix of `groups` groups a row, from that row and inner entry on.
template <typename F, typename T>
void pack(const T* numbers, std::uint8_t* values, bf16* scales, i64 rows, i64 inner, i64 stride, i64 groups, i64 row,
          i64 entry) {
  using Bytes = Wide<kLanes>::Bytes;
  constexpr i64 parts = F::group / kLanes;
  constexpr float least = F::parts == 1 ? -127 : -8, most = F::parts == 1 ? 127 : 7;
  constexpr float whole = 12582912.0f;  // 3 * 2^22: adding it rounds to an integer, to even ones in the middle
  for (i64 done = 0, many; done < rows; done += many) {
    const i64 block = (row + done) / kRows, lane = (row + done) % kRows;
    many = std::min(kRows - lane, rows - done);
    for (i64 g = 0; g * F::group < inner; g++) {
      const i64 at = block * groups + entry / F::group + g, inside = std::min<i64>(F::group, inner - g * F::group);
      for (i64 r = 0; r < many; r++) {
        const T* from = numbers + (done + r) * stride + g * F::group;
        T padded[F::group] = {};
        if (inside < F::group) {
          std::memcpy(padded, from, inside * sizeof(T));
          from = padded;
        }
        Vec loaded[parts];
        for (i64 i = 0; i < parts; i++) loaded[i] = wide(from + i * kLanes);
        const bf16 scale = to_bf16(scale_of<F>(loaded));
        scales[at * kRows + lane + r] = scale;
        const float divisor = to_float(scale) == 0 ? 1.0f : to_float(scale);
        std::int8_t bytes[F::group];
        for (i64 i = 0; i < parts; i++) {
          Vec v = (loaded[i] / divisor + whole) - whole;
          v = v < least ? vec(least) : v;
          v = v > most ? vec(most) : v;
          v = v == v ? v : Vec{};  // NaN: the scale of its group says so
          const Bytes rounded = __builtin_convertvector(__builtin_convertvector(v, Ints) + (F::parts == 1 ? 0 : 8), Bytes);
          std::memcpy(bytes + i * kLanes, &rounded, sizeof rounded);
        }
        for (i64 l = 0; l < F::lines; l++) {
          std::uint32_t word, high;
          std::memcpy(&word, bytes + l * 4 * F::parts, 4);
          if constexpr (F::parts == 2) {
            std::memcpy(&high, bytes + l * 8 + 4, 4);
            word |= high << 4;
          }
          std::memcpy(values + (at * F::lines + l) * kLine + (lane + r) * 4, &word, 4);
        }
      }
    }
  }
}

}  // namespace
}  // namespace graphllm

#pragma GCC pop_options
