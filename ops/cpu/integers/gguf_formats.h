// Tiles of GGUF blocks (gguf_blocks.py): where the codes, scales and minima of 16 rows are, for every instruction level.
//
// A number is scale * (code - zero) - minimum. A format says for group g of a tile (its entries share a scale) what its
// scales and minima are, in float32 and exact, and the codes of its entries 4 i to 4 i + 3 of all rows: a line of 16 times
// four bytes. Codes are unsigned, but for eight bits without VNNI, where `negative` says so.
#pragma once

#include "cpu/integers/formats.h"

namespace graphllm {
namespace {

// What one register, or what stands for one, holds: codes of all 16 rows, or with AVX2 of eight of them, `half` 0 or 1.
#ifdef GRAPHLLM_AVX2
constexpr int kHalves = 2;
#else
constexpr int kHalves = 1;
#endif
constexpr i64 kTogether = kRows / kHalves;
using Floats = Wide<kTogether>::Floats;
using Numbers = Wide<kTogether>::Ints;
typedef std::uint16_t Codes __attribute__((vector_size(4 * kTogether)));

inline __attribute__((always_inline)) Codes line_at(const std::uint8_t* at, int half) {
  Codes out;
  std::memcpy(&out, at + half * sizeof out, sizeof out);
  return out;
}
// The lowest bits of every byte, of those from `shift` on. Bits come from the byte above: `mask` has to go without them.
inline __attribute__((always_inline)) Codes bits_of(Codes x, int shift, std::uint8_t mask) {
  return (x >> shift) & (Codes{} + std::uint16_t(mask * 0x0101));
}
// Those bits, further up in the byte.
inline __attribute__((always_inline)) Codes high_bits(Codes x, int shift, std::uint8_t mask, int to) {
  const Codes moved = shift >= to ? x >> (shift - to) : x << (to - shift);
  return moved & (Codes{} + std::uint16_t(std::uint16_t(mask << to) * 0x0101));
}

inline float half_to_float(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t(bits & 0x8000) << 16, rest = bits & 0x7FFF;
  // Subnormal ones too: 2^-14 times a fraction is a number with the wrong exponent, less that exponent's 1.
  std::uint32_t word = rest >= 0x7C00 ? 0x7F800000 | (rest << 13) : (rest << 13) + (112u << 23);
  float out, least = 6.103515625e-05f;
  if (rest < 0x400) word = (113u << 23) | (rest << 13);
  std::memcpy(&out, &word, 4);
  if (rest < 0x400) out -= least;
  std::memcpy(&word, &out, 4);
  word |= sign;
  std::memcpy(&out, &word, 4);
  return out;
}

// 16-bit floats of the rows.
inline __attribute__((always_inline)) Floats halves_at(const std::uint8_t* at, int half) {
#ifdef GRAPHLLM_VNNI
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#elif defined(GRAPHLLM_AVX2) && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at + half * 16)));
#else
  std::uint16_t bits[kTogether];
  std::memcpy(bits, at + half * sizeof bits, sizeof bits);
  Floats out;
  for (i64 i = 0; i < kTogether; i++) out[i] = half_to_float(bits[i]);
  return out;
#endif
}

// Bytes of the rows.
inline __attribute__((always_inline)) Numbers bytes_at(const std::uint8_t* at, int half) {
#ifdef GRAPHLLM_VNNI
  return (Numbers)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#elif defined(GRAPHLLM_AVX2)
  return (Numbers)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at + half * 8)));
#else
  std::uint8_t bytes[kTogether];
  std::memcpy(bytes, at + half * sizeof bytes, sizeof bytes);
  Numbers out;
  for (i64 i = 0; i < kTogether; i++) out[i] = bytes[i];
  return out;
#endif
}
inline __attribute__((always_inline)) Floats floats_of(Numbers x) { return __builtin_convertvector(x, Floats); }

// bytes: of a block. entries: of a block. group: of them share a scale. step: groups that are alike but for their place.
template <int kBytes, int kEntries, int kGroup, int kStep>
struct Blocks {
  static constexpr i64 bytes = kBytes, tile_bytes = kBytes * kRows, entries = kEntries, group = kGroup;
  static constexpr int groups = kEntries / kGroup, step = kStep, quads = kGroup / 4;
  static constexpr bool minima = false, negative = false;
  static constexpr int largest = 15;  // code
};

// Minima: what is subtracted is the minimum times the sum of the entries of x.
struct Minima {
  static constexpr int zero = 0;
  static constexpr bool minima = true;
  static std::int32_t correction(float scale, std::int32_t sum) {
    const float product = scale * float(sum);
    std::int32_t out;
    std::memcpy(&out, &product, 4);
    return out;
  }
};

// A scale, eight-bit integers.
#ifdef GRAPHLLM_VNNI
struct Q8_0 : Blocks<34, 32, 32, 1>, ZeroPoint<128> {
  static constexpr std::uint16_t flip = 0x8080;
#else
struct Q8_0 : Blocks<34, 32, 32, 1>, ZeroPoint<0> {
  static constexpr std::uint16_t flip = 0;
  static constexpr bool negative = true;
#endif
  static constexpr int largest = 128;
  struct Head {
    Floats d;
  };
  static Head head(const std::uint8_t* tile, int half) { return {halves_at(tile, half)}; }
  static Floats scale(const std::uint8_t*, const Head& h, int, int) { return h.d; }
  static __attribute__((always_inline)) Codes codes(const std::uint8_t* tile, int half, int, int i) {
    return line_at(tile + 2 * kRows + i * kLine, half) ^ (Codes{} + flip);
  }
};

// A scale, perhaps a minimum, perhaps a fifth bit, and four bits: the first 16 entries the low ones of the bytes. ggml adds
// its minimum.
template <int kBytes, bool kMinimum, bool kFifth>
struct Simple : Blocks<kBytes, 32, 32, 1> {
  static constexpr int largest = kFifth ? 31 : 15;
  struct Head {
    Floats d, m;
  };
  static Head head(const std::uint8_t* tile, int half) {
    return {halves_at(tile, half), kMinimum ? -halves_at(tile + 2 * kRows, half) : Floats{}};
  }
  static Floats scale(const std::uint8_t*, const Head& h, int, int) { return h.d; }
  static Floats minimum(const std::uint8_t*, const Head& h, int, int) { return h.m; }
  static __attribute__((always_inline)) Codes codes(const std::uint8_t* tile, int half, int, int i) {
    constexpr i64 bits = (kMinimum ? 4 : 2) * kRows, low = bits + (kFifth ? kLine : 0);
    const Codes fours = bits_of(line_at(tile + low + i % 4 * kLine, half), i / 4 * 4, 15);
    if constexpr (!kFifth) return fours;
    return fours | high_bits(line_at(tile + bits, half), i, 1, 4);
  }
};
struct Q4_0 : Simple<18, false, false>, ZeroPoint<8> {};
struct Q5_0 : Simple<22, false, true>, ZeroPoint<16> {};
struct Q4_1 : Minima, Simple<20, true, false> {
  static constexpr bool minima = true;
};
struct Q5_1 : Minima, Simple<24, true, true> {
  static constexpr bool minima = true;
};

// Eight groups with scales and minima of six bits, and factors of both. Groups 2 c and 2 c + 1 are the low and the high
// bits of 32 bytes.
template <int kBytes, bool kFifth>
struct Super : Blocks<kBytes, 256, 32, 2> {
  static constexpr int largest = kFifth ? 31 : 15;
  struct Head {
    Floats d, m;
  };
  static Head head(const std::uint8_t* tile, int half) {
    return {halves_at(tile, half), halves_at(tile + 2 * kRows, half)};
  }
  static Numbers packed(const std::uint8_t* tile, int half, int byte) { return bytes_at(tile + (4 + byte) * kRows, half); }
  static Floats scale(const std::uint8_t* tile, const Head& h, int half, int g) {
    const Numbers n = g < 4 ? packed(tile, half, g) & 63 : (packed(tile, half, g + 4) & 15) | (packed(tile, half, g - 4) >> 6 << 4);
    return h.d * floats_of(n);
  }
  static Floats minimum(const std::uint8_t* tile, const Head& h, int half, int g) {
    const Numbers n = g < 4 ? packed(tile, half, g + 4) & 63 : (packed(tile, half, g + 4) >> 4) | (packed(tile, half, g) >> 6 << 4);
    return h.m * floats_of(n);
  }
  static __attribute__((always_inline)) Codes codes(const std::uint8_t* tile, int half, int g, int i) {
    constexpr i64 bits = 16 * kRows, low = bits + (kFifth ? 8 * kLine : 0);
    const Codes fours = bits_of(line_at(tile + low + (g / 2 * 8 + i) * kLine, half), g % 2 * 4, 15);
    if constexpr (!kFifth) return fours;
    return fours | high_bits(line_at(tile + bits + i * kLine, half), g, 1, 4);
  }
};
struct Q4_K : Minima, Super<144, false> {
  static constexpr bool minima = true;
};
struct Q5_K : Minima, Super<176, true> {
  static constexpr bool minima = true;
};

// 16 groups with scales of eight bits. Half of them, eight: low bits are of 64 bytes, twice, high ones of 32 bytes, four
// times.
struct Q6_K : Blocks<210, 256, 16, 8>, ZeroPoint<32> {
  static constexpr int largest = 63;
  struct Head {
    Floats d;
  };
  static Head head(const std::uint8_t* tile, int half) { return {halves_at(tile + 208 * kRows, half)}; }
  static Floats scale(const std::uint8_t* tile, const Head& h, int half, int g) {
    return h.d * floats_of(bytes_at(tile + (192 + g) * kRows, half) << 24 >> 24);
  }
  static __attribute__((always_inline)) Codes codes(const std::uint8_t* tile, int half, int g, int i) {
    const int upper = g / 8, part = g % 8 / 2, quad = g % 2 * 4 + i;
    const Codes fours = bits_of(line_at(tile + (upper * 16 + part % 2 * 8 + quad) * kLine, half), part / 2 * 4, 15);
    return fours | high_bits(line_at(tile + (32 + upper * 8 + quad) * kLine, half), part * 2, 3, 4);
  }
};

}  // namespace
}  // namespace graphllm
