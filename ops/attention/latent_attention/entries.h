// Entries of a cache of latents in 8 bits: the codes of a latent, a float for each 128 of them, then the rotated part of a key
// in bfloat16. For the arithmetic of attention a key is the latent and the rotated part, and a value the latent.
#pragma once

#include "cpu/attention/entries.h"

namespace graphllm {
namespace {

constexpr i64 kGroup = 128;  // codes that share a scale

// A byte of an entry. Code: e4m3 or int8.
template <typename Code>
struct Latent {
  Code code;
};

inline float largest_code(e4m3) { return 448; }
inline float largest_code(int8) { return 127; }

#ifdef GRAPHLLM_AVX512
inline Vec load_codes(const e4m3* from) {
  return from_e4m3<Vec>((Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline Vec load_codes(const int8* from) {
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
template <typename T>
inline void store_numbers(T* to, Vec x) {
  store_vec(to, x);
}
#else
template <typename Code>
inline Eight load_codes(const Code* from) {
  return load8(from);
}
template <typename T>
inline void store_numbers(T* to, Eight x) {
  store8(to, x);
}
#endif

// Where the parts of an entry begin.
template <typename Code>
struct Entry {
  const i64 L, R;
  Code* codes;
  char* scales = reinterpret_cast<char*>(codes + L);
  bf16* rotated = reinterpret_cast<bf16*>(scales + 4 * ceil_div(L, kGroup));

  Entry(const Layout& at, Latent<Code>* entry) : L(at.V), R(at.E - at.V), codes(reinterpret_cast<Code*>(entry)) {}
};

template <typename T, typename Code>
inline void read_rows(const Latent<Code>* rows, const Layout& at, i64, i64 count, T* to) {
  for (i64 i = 0; i < count; i++, rows += at.cache_slot, to += at.E) {
    const Entry<Code> entry(at, const_cast<Latent<Code>*>(rows));
    for (i64 first = 0; first < entry.L; first += kGroup) {
      float step;
      std::memcpy(&step, entry.scales + first / kGroup * 4, 4);
      const i64 end = std::min(first + kGroup, entry.L);
      i64 e = first;
      for (; e + kRegLanes <= end; e += kRegLanes) store_numbers(to + e, load_codes(entry.codes + e) * step);
      for (; e < end; e++) store(to + e, to_float(entry.codes[e]) * step);
    }
    for (i64 r = 0; r < entry.R; r++) store(to + entry.L + r, to_float(entry.rotated[r]));
  }
}

template <typename T, typename Code>
inline void write_row(const T* row, const Layout& at, i64 slot, float, Latent<Code>* block) {
  const Entry<Code> entry(at, block + slot * at.cache_slot);
  for (i64 first = 0; first < entry.L; first += kGroup) {
    const i64 end = std::min(first + kGroup, entry.L);
    float most = 0;
    for (i64 e = first; e < end; e++) most = std::max(most, std::fabs(to_float(row[e])));
    const float step = exact_quotient(most, largest_code(Code{}));
    std::memcpy(entry.scales + first / kGroup * 4, &step, 4);
    for (i64 e = first; e < end; e++) store(entry.codes + e, step > 0 ? exact_quotient(to_float(row[e]), step) : 0);
  }
  for (i64 r = 0; r < entry.R; r++) store(entry.rotated + r, to_float(row[entry.L + r]));
}

}  // namespace
}  // namespace graphllm
