// A matrix in tiles of GGUF blocks: its products with quantized rows of x, its panels for many rows, its rows as numbers.
#pragma once

#include "cpu/integers/gguf_formats.h"
#include "cpu/integers/panels.h"
#include "cpu/integers/rows.h"

namespace graphllm {
namespace {

// How far ahead lines of tiles are asked for, and into which cache: on Xeons with AMX the first level's few outstanding
// misses are too few, and nothing but these reads ahead there (without them a third of the speed).
#ifdef GRAPHLLM_AMX
constexpr i64 kTilesAhead = 4096;
constexpr int kHint = 2;
#else
constexpr i64 kTilesAhead = kAhead;
constexpr int kHint = 3;
#endif

inline __attribute__((always_inline)) Floats times_plus(Floats a, Floats b, Floats c) {
#ifdef GRAPHLLM_VNNI
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(GRAPHLLM_AVX2)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Sums of a group's products, for kM rows of x: codes of four entries at a time. With AVX2 pairs of products add up in 16
// bits, of as many quads as fit.
template <typename F, int kM>
struct Sums {
  Numbers sums[kM];

#ifdef GRAPHLLM_VNNI
  void begin(const char* corrections) {
#pragma GCC unroll 16
    for (int m = 0; m < kM; m++) {
      if constexpr (F::minima) {
        sums[m] = Numbers{};
      } else {
        std::int32_t correction;
        std::memcpy(&correction, corrections + m * 4, 4);
        sums[m] = ints(correction);
      }
    }
  }
  __attribute__((always_inline)) void add(Codes codes, int m, const char* q, int) {
    std::int32_t four;
    std::memcpy(&four, q, 4);
    sums[m] = (Numbers)_mm512_dpbusd_epi32((__m512i)sums[m], (__m512i)codes, _mm512_set1_epi32(four));
  }
  Floats floats(int m, const char*) const { return floats_of(sums[m]); }
#elif defined(GRAPHLLM_AVX2)
  static constexpr int fits = std::min(F::quads, 32767 / (2 * 127 * F::largest));
  __m256i pairs[kM];

  void begin(const char*) {
#pragma GCC unroll 8
    for (int m = 0; m < kM; m++) sums[m] = Numbers{};
  }
  __attribute__((always_inline)) void add(Codes codes, int m, const char* q, int i) {
    std::int32_t four;
    std::memcpy(&four, q, 4);
    const __m256i x = _mm256_set1_epi32(four), w = (__m256i)codes;
    const __m256i products =
        F::negative ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)) : _mm256_maddubs_epi16(w, x);
    pairs[m] = i % fits == 0 ? products : _mm256_add_epi16(pairs[m], products);
    if (i % fits == fits - 1 || i == F::quads - 1)
      sums[m] += (Numbers)_mm256_madd_epi16(pairs[m], _mm256_set1_epi16(1));
  }
  Floats floats(int m, const char* corrections) const {
    if constexpr (F::minima) return floats_of(sums[m]);
    std::int32_t correction;
    std::memcpy(&correction, corrections + m * 4, 4);
    return floats_of(sums[m] + correction);
  }
#else
  void begin(const char*) {
    for (int m = 0; m < kM; m++) sums[m] = Numbers{};
  }
  void add(Codes codes, int m, const char* q, int) {
    std::uint8_t bytes[sizeof codes];
    std::memcpy(bytes, &codes, sizeof codes);
    for (i64 r = 0; r < kTogether; r++)
      for (int j = 0; j < 4; j++) {
        const int code = F::negative ? std::int8_t(bytes[4 * r + j]) : bytes[4 * r + j];
        sums[m][r] += code * static_cast<signed char>(q[j]);
      }
  }
  Floats floats(int m, const char* corrections) const {
    if constexpr (F::minima) return floats_of(sums[m]);
    std::int32_t correction;
    std::memcpy(&correction, corrections + m * 4, 4);
    return floats_of(sums[m] + correction);
  }
#endif
};

// kBlocks rows of tiles, `apart` bytes from each other, times kM rows of x: totals [kBlocks, kM, 16].
template <typename F, int kM, int kBlocks>
void tile_rows(const std::uint8_t* w, i64 apart, const char* x, i64 groups, Vec* totals) {
  constexpr i64 x_bytes = kM * (8 + F::group), steps = F::groups / F::step;
  constexpr int lines = int(ceil_div(F::tile_bytes, kLine * steps));  // of a step, to be asked for ahead
  const i64 tiles = groups / F::groups;
  for (int half = 0; half < kHalves; half++) {
    const std::uint8_t* tile = w;
    const char* group = x;
    Floats total[kBlocks][kM] = {};
    for (i64 t = 0; t < tiles; t++, tile += F::tile_bytes) {
      typename F::Head heads[kBlocks];
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; b++) heads[b] = F::head(tile + b * apart, half);
      for (int step = 0; step < steps; step++) {
        const std::uint8_t* ahead = tile + kTilesAhead + step * lines * kLine;
        int asked = 0;
#pragma GCC unroll 8
        for (int s = 0; s < F::step; s++, group += x_bytes) {
          const int g = step * F::step + s;
          const char *corrections = group + kM * 4, *q = group + kM * 8;
          Sums<F, kM> sums[kBlocks];
#pragma GCC unroll 2
          for (int b = 0; b < kBlocks; b++) sums[b].begin(corrections);
#pragma GCC unroll 8
          for (int i = 0; i < F::quads; i++) {
            if (half == 0 && asked < lines) {
#pragma GCC unroll 2
              for (int b = 0; b < kBlocks; b++) __builtin_prefetch(ahead + b * apart + asked * kLine, 0, kHint);
              asked++;
            }
            Codes codes[kBlocks];
#pragma GCC unroll 2
            for (int b = 0; b < kBlocks; b++) codes[b] = F::codes(tile + b * apart, half, g, i);
#pragma GCC unroll 16
            for (int m = 0; m < kM; m++)
#pragma GCC unroll 2
              for (int b = 0; b < kBlocks; b++) sums[b].add(codes[b], m, q + (i * kM + m) * 4, i);
          }
#pragma GCC unroll 2
          for (int b = 0; b < kBlocks; b++) {
            const Floats scale = F::scale(tile + b * apart, heads[b], half, g);
            Floats minimum{};
            if constexpr (F::minima) minimum = F::minimum(tile + b * apart, heads[b], half, g);
#pragma GCC unroll 16
            for (int m = 0; m < kM; m++) {
              float of_x, of_sum;
              std::memcpy(&of_x, group + m * 4, 4);
              // Named, so that gcc multiplies in the same order for any number of rows.
              total[b][m] = times_plus(sums[b].floats(m, corrections), kept(scale * of_x), total[b][m]);
              if constexpr (F::minima) {
                std::memcpy(&of_sum, corrections + m * 4, 4);
                total[b][m] = times_plus(-minimum, Floats{} + of_sum, total[b][m]);
              }
            }
          }
        }
        if (half == 0)
          for (; asked < lines; asked++)
#pragma GCC unroll 2
            for (int b = 0; b < kBlocks; b++) __builtin_prefetch(ahead + b * apart + asked * kLine, 0, kHint);
      }
    }
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; b++)
#pragma GCC unroll 16
      for (int m = 0; m < kM; m++)
        std::memcpy(reinterpret_cast<char*>(&totals[b * kM + m]) + half * sizeof(Floats), &total[b][m], sizeof(Floats));
  }
}

template <typename F>
struct TiledMatrix {
  using Format = F;
  const std::uint8_t* tiles;
  i64 inner;
  i64 block_bytes = inner / F::entries * F::tile_bytes;

  template <int kM, int kBlocks>
  void multiply(i64 block, i64 apart, const char* x, i64 groups, Vec* totals) const {
    tile_rows<F, kM, kBlocks>(tiles + block * block_bytes, apart * block_bytes, x, groups, totals);
  }

  // Row n as numbers, decoded with its neighbours.
  template <typename T>
  void row(i64 n, T* to) const {
    const std::uint8_t* tile = tiles + n / kRows * block_bytes;
    const int lane = int(n % kRows), half = lane / int(kTogether), place = lane % int(kTogether);
    for (i64 k = 0; k < inner; k += F::entries, tile += F::tile_bytes) {
      const auto head = F::head(tile, half);
      for (int g = 0; g < F::groups; g++) {
        const float scale = F::scale(tile, head, half, g)[place];
        float minimum = 0;
        if constexpr (F::minima) minimum = F::minimum(tile, head, half, g)[place];
        for (int i = 0; i < F::quads; i++, to += 4) {
          const Codes line = F::codes(tile, half, g, i);
          std::uint8_t four[4];
          std::memcpy(four, reinterpret_cast<const char*>(&line) + place * 4, 4);
          for (int e = 0; e < 4; e++) {
            const int code = F::negative ? std::int8_t(four[e]) : four[e];
            store(to + e, scale * float(code - F::zero) - minimum);
          }
        }
      }
    }
  }

#ifdef GRAPHLLM_AMX
  // A panel of weights for k in [k0, k0 + depth), k0 a multiple of a group.
  void unpack(const Panel& panel, i64 k0, i64 depth, bf16* to) const {
    alignas(64) static constexpr std::uint16_t kPairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i pairs = _mm512_load_si512(kPairs), last = _mm512_set1_epi32(255);
    const i64 end = std::min(inner, k0 + depth);
    for (i64 half = 0; half < 2; half++) {
      bf16* at = to + half * 32;
      const std::uint8_t* row = tiles + panel.row[half] / kRows * block_bytes;
      for (i64 k = k0; k < end; k += F::group) {
        if (panel.valid[half] == 0) {
          for (i64 p = 0; p < F::group / 2; p++, at += 2 * kPanel) _mm512_store_si512(at, _mm512_setzero_si512());
          continue;
        }
        const std::uint8_t* tile = row + k / F::entries * F::tile_bytes;
        const int g = int(k % F::entries / F::group);
        const auto head = F::head(tile, 0);
        const __m512 scale = (__m512)F::scale(tile, head, 0, g);
        __m512 offset = _mm512_mul_ps(scale, _mm512_set1_ps(F::zero));
        if constexpr (F::minima) offset = (__m512)F::minimum(tile, head, 0, g);
#pragma GCC unroll 8
        for (int i = 0; i < F::quads; i++) {
          const __m512i line = (__m512i)F::codes(tile, 0, g, i);
          __m512 entries[4];
          for (int e = 0; e < 4; e++) {
            const __m512i code = _mm512_and_si512(_mm512_srli_epi32(line, 8 * e), last);
            entries[e] = _mm512_fmsub_ps(_mm512_cvtepi32_ps(code), scale, offset);
          }
          for (int p = 0; p < 2; p++, at += 2 * kPanel)
            _mm512_store_si512(at, _mm512_permutexvar_epi16(
                                       pairs, (__m512i)_mm512_cvtne2ps_pbh(entries[2 * p + 1], entries[2 * p])));
        }
      }
      for (i64 k = end; k < k0 + depth; k += 2, at += 2 * kPanel) _mm512_store_si512(at, _mm512_setzero_si512());
    }
  }
#endif
};

}  // namespace
}  // namespace graphllm
