// quant_linear: out [M, N] = x [M, K] times quantized weights [N, K] transposed, plus bias [N]. op.py has the layout.
//
// The weights are one stream of 64-byte lines, each of four inner entries (int4: two times four) of 16 rows. Rows of x
// are quantized to int8 in the same groups of inner entries when the kernel begins, so that a line is one integer
// product (vpdpbusd), or two, for each row of x; products of a group add up exactly and are scaled in float32 once. Many rows
// of x with AMX: weights are scaled and rounded to bfloat16 on the way, and x stays what it is.
#include "cpu_panels.h"

#if !defined(GRAPHLLM_GENERIC) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define GRAPHLLM_VNNI 1
#elif !defined(GRAPHLLM_GENERIC) && defined(__AVX2__) && defined(__FMA__)
#define GRAPHLLM_AVX2 1
#endif

namespace graphllm {
namespace {

constexpr i64 kRows = kLanes;           // weight rows a block
constexpr i64 kLine = 64;               // bytes: four or, of int4, eight inner entries of 16 rows
constexpr i64 kPartBytes = 256 << 10;   // of weights that a thread takes at least at a time
constexpr i64 kMinBytes = 64 << 10;     // less weight than this is not worth waking another thread
constexpr i64 kOwnBytes = 16 << 10;     // less x than this each thread quantizes for itself, which saves a barrier
constexpr i64 kAhead = 2048;            // bytes of weights that are asked for ahead
constexpr i64 kChunkBytes = 256 << 10;  // quantized rows of x that stay in the second-level cache
// Rows of x side by side at most, and the blocks, far apart, that one row takes at once: memory is read faster as streams.
#ifdef GRAPHLLM_VNNI
constexpr int kTile = 12, kStreams = 2;
#elif defined(GRAPHLLM_AVX2)
constexpr int kTile = 8, kStreams = 2;
#else
constexpr int kTile = 2, kStreams = 1;
#endif

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

template <typename T>
struct Args {
  const T* x;
  const std::uint8_t* values;
  const bf16* scales;
  const T* bias;
  T* out;
  i64 M, N, K, x_stride;
};

// Rows of x as int8, a tile of rows at a time and in the order in which they are read: for each group of inner entries
// the scale of each row and what corrects for the zero point of the weights, then four entries of each row by turns.
template <typename F>
struct Quantized {
  char* data;
  i64 rows, groups, tile_rows = ceil_div(rows, ceil_div(rows, kTile));

  static i64 bytes(i64 rows, i64 groups) { return rows * groups * (8 + F::group); }
  i64 width(i64 m0) const { return std::min(tile_rows, rows - m0); }
  const char* tile(i64 m0) const { return data + bytes(m0, groups); }
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
  using Halves = std::uint16_t __attribute__((vector_size(32)));
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return (Vec)(__builtin_convertvector(halves, Ints) << 16);
#endif
}

using Bytes = std::int8_t __attribute__((vector_size(16)));

inline Bytes to_bytes(Ints x) {
#ifdef GRAPHLLM_AVX2  // for which gcc 12 has no good translation
  const __m256i turned = _mm256_packs_epi32((__m256i)reg_of<EightInts>(x, 0), (__m256i)reg_of<EightInts>(x, 1));
  const __m256i words = _mm256_permute4x64_epi64(turned, 0xD8);
  return (Bytes)_mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#else
  return __builtin_convertvector(x, Bytes);
#endif
}

// The largest absolute value is found among the bits as integers, where a NaN is the largest of all: its group becomes
// NaN.
template <typename F, typename T>
void quantize_rows(const Args<T>& a, const Quantized<F>& to, Range rows) {
  constexpr i64 parts = F::group / kLanes;
  for (i64 m = rows.from; m < rows.to; m++) {
    const i64 m0 = m / to.tile_rows * to.tile_rows, width = to.width(m0);
    char* at = to.data + Quantized<F>::bytes(m0, to.groups) + (m - m0) * 4;
    for (i64 g = 0; g < to.groups; g++, at += width * (8 + F::group)) {
      const T* x = a.x + m * a.x_stride + g * F::group;
      T padded[F::group] = {};
      if (const i64 inside = a.K - g * F::group; inside < F::group) {
        std::memcpy(padded, x, inside * sizeof(T));
        x = padded;
      }
      Vec numbers[parts];
      RegInts most = {};
      for (i64 i = 0; i < parts; i++) {
        numbers[i] = load_vec(x + i * kLanes);
        for (int r = 0; r < kRegs; r++) {
          const RegInts bits = reg_of<RegInts>(numbers[i], r) & 0x7FFFFFFF;
          most = bits > most ? bits : most;
        }
      }
      std::int32_t largest_bits = 0, sum = 0;
      for (int i = 0; i < kRegLanes; i++) largest_bits = std::max(largest_bits, most[i]);
      float largest;
      std::memcpy(&largest, &largest_bits, 4);
      const float inverse = largest > 0 ? 127.0f / largest : 0, scale = largest / 127.0f;
      Ints sums = {};
      for (i64 i = 0; i < parts; i++) {
        const Vec scaled = numbers[i] * inverse, half = (Vec)(((Ints)scaled & INT32_MIN) | 0x3F000000);
        const Ints rounded = __builtin_convertvector(scaled + half, Ints);
        sums += rounded;
        const Bytes bytes = to_bytes(rounded);
        for (int quad = 0; quad < 4; quad++)
          std::memcpy(at + width * (8 + (i * 4 + quad) * 4), reinterpret_cast<const char*>(&bytes) + quad * 4, 4);
      }
      for (int i = 0; i < kLanes; i++) sum += sums[i];
      const std::int32_t correction = -F::zero * sum;
      std::memcpy(at, &scale, 4);
      std::memcpy(at + width * 4, &correction, 4);
    }
  }
}

#ifdef GRAPHLLM_AVX2

// kBlocks blocks of 16 weight rows, `apart` bytes and `scales_apart` scales from each other, times kM rows of x: totals
// [kBlocks, kM, 16]. As many eights of weight rows at a time as there are registers for their sums. The product of
// unsigned and signed bytes adds pairs in 16 bits, where the eight such sums of a group of int4 fit (8 * 2 * 15 * 127), and
// of int8 (|w| up to 127, a weight is never -128) one.
template <typename F, int kM, int kBlocks>
void block_rows(const std::uint8_t* w, i64 apart, const bf16* scales, i64 scales_apart, const char* x, i64 groups,
                Vec* totals) {
  constexpr int kHalves = kM * kBlocks <= 4 ? 2 : 1, kEights = kBlocks * kHalves;
  const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
  const auto row = [](const char* at) {
    std::int32_t four;
    std::memcpy(&four, at, 4);
    return _mm256_set1_epi32(four);
  };
  for (int half = 0; half < 2; half += kHalves) {
    const std::uint8_t* line = w + half * 32;
    const bf16* scale = scales + half * 8;
    const char* group = x;
    Eight total[kM][kEights] = {};
    for (i64 g = 0; g < groups; g++, scale += kRows) {
      __m256i sums[kM][kEights];
#pragma GCC unroll 8
      for (int m = 0; m < kM; m++)
#pragma GCC unroll 4
        for (int e = 0; e < kEights; e++) sums[m][e] = _mm256_setzero_si256();
      const char* q = group + kM * 8;
      for (i64 l = 0; l < F::lines; l++, line += kLine) {
        __m256i values[kEights];
#pragma GCC unroll 4
        for (int e = 0; e < kEights; e++)
          values[e] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + e / kHalves * apart + e % kHalves * 32));
        if (half == 0)
#pragma GCC unroll 2
          for (int b = 0; b < kBlocks; b++) __builtin_prefetch(line + b * apart + kAhead);
        if constexpr (F::parts == 1) {
#pragma GCC unroll 8
          for (int m = 0; m < kM; m++, q += 4) {
            const __m256i of_x = row(q);
#pragma GCC unroll 4
            for (int e = 0; e < kEights; e++) {
              const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(values[e]), _mm256_sign_epi8(of_x, values[e]));
              sums[m][e] = _mm256_add_epi32(sums[m][e], _mm256_madd_epi16(pairs, ones));
            }
          }
        } else {
          const auto add = [&](bool second) __attribute__((always_inline)) {
            __m256i part[kEights];
#pragma GCC unroll 4
            for (int e = 0; e < kEights; e++)
              part[e] = _mm256_and_si256(second ? _mm256_srli_epi16(values[e], 4) : values[e], low);
#pragma GCC unroll 8
            for (int m = 0; m < kM; m++, q += 4) {
              const __m256i of_x = row(q);
#pragma GCC unroll 4
              for (int e = 0; e < kEights; e++)
                sums[m][e] = _mm256_add_epi16(sums[m][e], _mm256_maddubs_epi16(part[e], of_x));
            }
          };
          add(false), add(true);
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < kM; m++) {
        float of_x;
        std::memcpy(&of_x, group + m * 4, 4);
#pragma GCC unroll 4
        for (int e = 0; e < kEights; e++) {
          const Eight scale_of_w = load8(scale + e / kHalves * scales_apart + e % kHalves * 8);
          __m256i sum = sums[m][e];
          if constexpr (F::parts == 2) sum = _mm256_add_epi32(_mm256_madd_epi16(sum, ones), row(group + (kM + m) * 4));
          // Named, so that gcc multiplies in the same order for any number of rows.
          total[m][e] = (Eight)_mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), (__m256)(scale_of_w * of_x), (__m256)total[m][e]);
        }
      }
      group = q;
    }
#pragma GCC unroll 8
    for (int m = 0; m < kM; m++)
#pragma GCC unroll 4
      for (int e = 0; e < kEights; e++) put_reg(totals[e / kHalves * kM + m], half + e % kHalves, total[m][e]);
  }
}

#else

// A line of weights as operands: one of int8, two of int4.
#ifdef GRAPHLLM_VNNI
template <typename F>
struct Line {
  __m512i part[2];
  Line() = default;
  explicit Line(const std::uint8_t* at) {
    const __m512i line = _mm512_loadu_si512(at);
    if constexpr (F::parts == 1) {
      part[0] = _mm512_xor_si512(line, _mm512_set1_epi8(char(0x80)));
    } else {
      const __m512i low = _mm512_set1_epi8(15);
      part[0] = _mm512_and_si512(line, low);
      part[1] = _mm512_and_si512(_mm512_srli_epi16(line, 4), low);
    }
  }
  Ints add(Ints sum, int p, const char* x) const {
    std::int32_t four;
    std::memcpy(&four, x, 4);
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, part[p], _mm512_set1_epi32(four));
  }
};
#else
template <typename F>
struct Line {
  Ints part[2][4];
  Line() = default;
  explicit Line(const std::uint8_t* at) {
    for (int i = 0; i < kLanes; i++)
      for (int j = 0; j < 4; j++) {
        const std::uint8_t byte = at[4 * i + j];
        part[0][j][i] = F::parts == 1 ? std::int8_t(byte) : byte & 15;
        if constexpr (F::parts == 2) part[1][j][i] = byte >> 4;
      }
  }
  Ints add(Ints sum, int p, const char* x) const {
    for (int j = 0; j < 4; j++) sum += part[p][j] * ints(static_cast<signed char>(x[j]));
    return sum;
  }
};
#endif

// kBlocks blocks of 16 weight rows, `apart` bytes and `scales_apart` scales from each other, times kM rows of x: totals
// [kBlocks, kM, 16].
template <typename F, int kM, int kBlocks>
void block_rows(const std::uint8_t* w, i64 apart, const bf16* scales, i64 scales_apart, const char* x, i64 groups,
                Vec* totals) {
  Vec total[kBlocks * kM] = {};
  for (i64 g = 0; g < groups; g++, scales += kRows) {
    Ints sums[kBlocks * kM];
    for (int m = 0; m < kM; m++) {
      std::int32_t correction;
      std::memcpy(&correction, x + (kM + m) * 4, 4);
      for (int b = 0; b < kBlocks; b++) sums[b * kM + m] = ints(correction);
    }
    const char* q = x + kM * 8;
#pragma GCC unroll 16
    for (i64 l = 0; l < F::lines; l++, w += kLine) {
      Line<F> lines[kBlocks];
      for (int b = 0; b < kBlocks; b++) {
#ifdef GRAPHLLM_VNNI
        _mm_prefetch(w + b * apart + kAhead, _MM_HINT_T0);
#endif
        lines[b] = Line<F>(w + b * apart);
      }
      for (int p = 0; p < F::parts; p++, q += kM * 4)
        for (int m = 0; m < kM; m++)
          for (int b = 0; b < kBlocks; b++) sums[b * kM + m] = lines[b].add(sums[b * kM + m], p, q + m * 4);
    }
    for (int b = 0; b < kBlocks; b++) {
      const Vec scale = load_vec(scales + b * scales_apart);
      for (int m = 0; m < kM; m++) {
        float of_x;
        std::memcpy(&of_x, x + m * 4, 4);
        const Vec factor = kept(scale * of_x);  // gcc must multiply in the same order for any number of rows
        total[b * kM + m] += __builtin_convertvector(sums[b * kM + m], Vec) * factor;
      }
    }
    x = q;
  }
  for (int i = 0; i < kBlocks * kM; i++) totals[i] = total[i];
}

#endif  // GRAPHLLM_AVX2

template <typename F, int kM>
void some_rows(const std::uint8_t* w, const bf16* scales, const char* x, i64 groups, Vec* totals, i64 rows) {
  if constexpr (kM > 0) {
    if (rows == kM)
      block_rows<F, kM, 1>(w, 0, scales, 0, x, groups, totals);
    else
      some_rows<F, kM - 1>(w, scales, x, groups, totals, rows);
  }
}

template <typename T>
void finish(const Args<T>& a, i64 m, i64 n, Vec sum) {
  const i64 valid = std::min(kRows, a.N - n);
  for (i64 i = 0; i < valid; i++) store(a.out + m * a.N + n + i, a.bias ? sum[i] + to_float(a.bias[n + i]) : sum[i]);
}

#ifdef GRAPHLLM_AMX

constexpr i64 kMany = 32;  // rows of x from which on weights become bfloat16

// A panel of weights for k in [k0, k0 + depth), k0 a multiple of a group.
template <typename F>
void unpack(const Args<bf16>& a, const Panel& panel, i64 k0, i64 depth, bf16* to) {
  const i64 groups = ceil_div(a.K, F::group);
  alignas(64) static constexpr std::uint16_t kPairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i pairs = _mm512_load_si512(kPairs), last = _mm512_set1_epi32(15), zero = _mm512_set1_epi32(F::parts == 2 ? 8 : 0);
  for (i64 half = 0; half < 2; half++)
    for (i64 g = k0 / F::group; g * F::group < k0 + depth; g++) {
      bf16* at = to + (g * F::group - k0) * kPanel + half * 32;
      if (panel.valid[half] == 0) {
        for (i64 p = 0; p < F::group / 2; p++) _mm512_store_si512(at + p * 2 * kPanel, _mm512_setzero_si512());
        continue;
      }
      const i64 number = panel.row[half] / kRows * groups + g;
      const __m512 scale = load16(a.scales + number * kRows);
      for (i64 l = 0; l < F::lines; l++) {
        const __m512i line = _mm512_loadu_si512(a.values + (number * F::lines + l) * kLine);
        for (int part = 0; part < F::parts; part++) {
          __m512 entries[4];
          for (int e = 0; e < 4; e++) {
            const __m512i bits = F::parts == 1 ? _mm512_srai_epi32(_mm512_slli_epi32(line, 24 - 8 * e), 24)
                                               : _mm512_and_si512(_mm512_srli_epi32(line, 8 * e + 4 * part), last);
            entries[e] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(bits, zero)), scale);
          }
          for (int p = 0; p < 2; p++, at += 2 * kPanel)
            _mm512_store_si512(at, _mm512_permutexvar_epi16(
                                       pairs, (__m512i)_mm512_cvtne2ps_pbh(entries[2 * p + 1], entries[2 * p])));
        }
      }
    }
}

#endif

template <typename F, typename T>
void quant_linear(const Args<T>& a) {
  if (a.M <= 0 || a.N <= 0) return;
#ifdef GRAPHLLM_AMX
  if constexpr (std::is_same_v<T, bf16>)
    if (a.M >= kMany && amx_granted()) {
      const Product product{a.x, nullptr, a.bias, a.out, a.M, a.N, a.K, a.x_stride, 0, a.N, false};
      const auto pack = [&](const Panel& panel, i64 k0, i64 depth, bf16* to) { unpack<F>(a, panel, k0, depth, to); };
#pragma omp parallel
      panels_by_thread<AmxTile>(product, pack);
      return;
    }
#endif
  static thread_local Scratch shared, own;
  const i64 groups = ceil_div(a.K, F::group), bytes = Quantized<F>::bytes(a.M, groups);
  const i64 blocks = ceil_div(a.N, kRows), block_bytes = groups * F::lines * kLine;
  const i64 threads = std::min<i64>(omp_get_max_threads(), std::max<i64>(1, blocks * block_bytes / kMinBytes));
  const bool each = bytes <= kOwnBytes;
  char* together = each ? nullptr : shared.get<char>(bytes);
  Shares shares(blocks, std::max<i64>(1, kPartBytes / block_bytes), threads);
#pragma omp parallel num_threads(int(threads))
  {
    const Quantized<F> x{each ? own.get<char>(bytes) : together, a.M, groups};
    if (each) {
      quantize_rows(a, x, {0, a.M});
    } else {
      quantize_rows(a, x, share(a.M));
#pragma omp barrier
    }
    const i64 chunk = std::max<i64>(1, kChunkBytes / x.bytes(x.tile_rows, groups)) * x.tile_rows;
    Vec totals[kTile];
    auto multiply = [&](i64 first, Range mine) {
      i64 block = mine.from;
      if (kStreams > 1 && a.M == 1) {
        const i64 apart = (mine.to - mine.from) / kStreams;
        for (; block < mine.from + apart; block++) {
          block_rows<F, 1, kStreams>(a.values + block * block_bytes, apart * block_bytes, a.scales + block * groups * kRows,
                                     apart * groups * kRows, x.tile(0), groups, totals);
          for (int s = 0; s < kStreams; s++) finish(a, 0, (block + s * apart) * kRows, totals[s]);
        }
        block = mine.from + kStreams * apart;
      }
      for (; block < mine.to; block++)
        for (i64 m0 = first; m0 < std::min(a.M, first + chunk); m0 += x.tile_rows) {
          const i64 width = x.width(m0);
          some_rows<F, kTile>(a.values + block * block_bytes, a.scales + block * groups * kRows, x.tile(m0), groups,
                              totals, width);
          for (i64 m = 0; m < width; m++) finish(a, m0 + m, block * kRows, totals[m]);
        }
    };
    if (a.M <= chunk)
      shares.each([&](Range part) { multiply(0, part); });
    else
      for (i64 first = 0; first < a.M; first += chunk) multiply(first, share(blocks));
  }
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_QUANT_LINEAR(name, bytes, T)                                                                       \
  extern "C" void graphllm_quant_linear_##name(                                                                     \
      const void* x, const void* values, const void* scales, const void* bias, void* out, std::int64_t M,           \
      std::int64_t N, std::int64_t K, std::int64_t x_stride) {                                  \
    using namespace graphllm;                                                                                       \
    quant_linear<bytes, T>({static_cast<const T*>(x), static_cast<const std::uint8_t*>(values),                     \
                            static_cast<const bf16*>(scales), static_cast<const T*>(bias), static_cast<T*>(out), M, \
                            N, K, x_stride});                                                                \
  }

GRAPHLLM_QUANT_LINEAR(int8_bf16, Int8, bf16)
GRAPHLLM_QUANT_LINEAR(int8_f32, Int8, f32)
GRAPHLLM_QUANT_LINEAR(int4_bf16, Int4, bf16)
GRAPHLLM_QUANT_LINEAR(int4_f32, Int4, f32)

// ---- Rounding and packing of weights while they are loaded: what graphllm/weights/integers.py specifies, bit by bit. So
// divisions must be divisions, and sums stay in order.
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
  using Halves = std::uint16_t __attribute__((vector_size(32)));
  Halves halves;
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
  using Bytes = std::int8_t __attribute__((vector_size(16)));
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
          v = v == v ? v : Vec{};  // NaN, whose group has a scale that says so
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

#define GRAPHLLM_PACK(name, format, T)                                                                                \
  extern "C" void graphllm_pack_##name(const void* numbers, void* values, void* scales, std::int64_t rows,            \
                                       std::int64_t inner, std::int64_t stride, std::int64_t groups, std::int64_t row, \
                                       std::int64_t entry) {                                                           \
    using namespace graphllm;                                                                                         \
    pack<format, T>(static_cast<const T*>(numbers), static_cast<std::uint8_t*>(values), static_cast<bf16*>(scales),    \
                    rows, inner, stride, groups, row, entry);                                                         \
  }

GRAPHLLM_PACK(int8_bf16, Int8, bf16)
GRAPHLLM_PACK(int8_f32, Int8, f32)
GRAPHLLM_PACK(int4_bf16, Int4, bf16)
GRAPHLLM_PACK(int4_f32, Int4, f32)
