// What the C++ kernels of several ops share: bfloat16, vector helpers, AMX set-up, aligned scratch and work division.
//
// Three levels are chosen when the file is compiled: AMX (GRAPHLLM_AMX), AVX-512 with bfloat16 dot products
// (GRAPHLLM_AVX512) and plain C++ that the compiler vectorizes. -DGRAPHLLM_GENERIC forces the last one, for tests.
#pragma once

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
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
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace graphllm {
namespace {  // every kernel source is its own translation unit of one library

using i64 = std::int64_t;
using f32 = float;

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

// A thread's reusable buffer, 64-byte aligned: grows, is never returned, so that no step after the first allocates.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  template <typename T>
  T* get(i64 count) {
    std::size_t bytes = (std::size_t(count) * sizeof(T) + 127) / 64 * 64;
    if (bytes > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, bytes);
      if (!data_) std::abort();
      size_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

// The [from, to) of ``count`` equal items that falls to this thread of the team.
struct Range {
  i64 from, to;
};
inline Range share(i64 count) {
  i64 threads = omp_get_num_threads(), mine = omp_get_thread_num();
  return {count * mine / threads, count * (mine + 1) / threads};
}

inline i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

// `count` equal items for the threads of a team: each takes of its share, in order and a quarter of what is left at a time, at
// least `part` items, then of the others' shares. A thread that the machine holds up, or whose half of the memory is slower,
// is then not waited for. Few takes: at each the processor stops to read ahead.
class Shares {
 public:
  Shares(i64 count, i64 part, i64 threads) : part_(part), shares_(std::min<i64>(threads, kMost)) {
    for (i64 t = 0; t < shares_; t++) {
      all_[t].next.store(count * t / shares_, std::memory_order_relaxed);
      all_[t].to = count * (t + 1) / shares_;
    }
  }

  // By every thread of the team: work(Range) for the parts that fall to it.
  template <typename Work>
  void each(Work&& work) {
    const i64 own = omp_get_thread_num();
    for (i64 i = 0; i < shares_; i++) {
      Share& share = all_[(own + i) % shares_];
      i64 from = share.next.load(std::memory_order_relaxed);
      while (from < share.to) {
        const i64 left = share.to - from, to = from + std::min(left, std::max(part_, left / 4));
        if (!share.next.compare_exchange_weak(from, to, std::memory_order_relaxed)) continue;
        work(Range{from, to});
        from = share.next.load(std::memory_order_relaxed);
      }
    }
  }

 private:
  static constexpr i64 kMost = 128;  // shares: further threads take of these
  struct alignas(64) Share {
    std::atomic<i64> next;
    i64 to;
  };
  const i64 part_, shares_;
  Share all_[kMost];
};

#ifdef GRAPHLLM_AVX512

inline __mmask16 first16(i64 count) { return count >= 16 ? __mmask16(0xFFFF) : __mmask16((1u << count) - 1); }
inline __mmask32 first32(i64 count) { return count >= 32 ? __mmask32(~0u) : __mmask32((1u << count) - 1); }

inline __m512 widen(__m256i bf16s) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16s), 16));
}
inline __m256i narrow(__m512 floats) { return (__m256i)_mm512_cvtneps_pbh(floats); }

inline __m512 load16(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 load16(const bf16* from) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline __m512 load16(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }
inline __m512 load16(const bf16* from, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, from)); }
inline void store16(float* to, __m512 x, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, x); }
inline void store16(bf16* to, __m512 x, __mmask16 mask) { _mm256_mask_storeu_epi16(to, mask, narrow(x)); }

inline __m512bh load_pairs(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }
inline __m512bh load_pairs(const bf16* from, __mmask32 mask) { return (__m512bh)_mm512_maskz_loadu_epi16(mask, from); }

// Transpose a 16 x 16 block of 32-bit values held in 16 registers.
inline void transpose16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xDD);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xDD);
  }
}

// Lane i of the result is the sum of all lanes of v[i].
inline __m512 add_lanes(const __m512 v[16]) {
  __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 8
  for (int i = 0; i < 4; i++) {
    const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
#pragma GCC unroll 8
  for (int i = 0; i < 2; i++)
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xDD));
  return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xDD));
}

#endif  // GRAPHLLM_AVX512

// Eight floats: what AVX2 has; gcc 12 keeps wider sums in memory there.
using Eight = float __attribute__((vector_size(32)));
using EightInts = std::int32_t __attribute__((vector_size(32)));
using EightWords = std::uint32_t __attribute__((vector_size(32)));
using EightHalves = std::uint16_t __attribute__((vector_size(16)));

inline Eight load8(const float* from) {
  Eight out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
inline Eight load8(const bf16* from) {
#ifdef __AVX2__  // for which gcc 12 has no good translation
  return (Eight)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16);
#else
  EightHalves halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Eight)(__builtin_convertvector(halves, EightWords) << 16);
#endif
}
inline void store8(float* to, Eight x) { std::memcpy(to, &x, sizeof x); }
inline void store8(bf16* to, Eight x) {  // as to_bf16
  const EightWords bits = (EightWords)x, rounded = bits + 0x7FFF + ((bits >> 16) & 1);
  const EightHalves halves =
      __builtin_convertvector(((bits & 0x7FFFFFFF) > 0x7F800000 ? bits | 0x400000 : rounded) >> 16, EightHalves);
  std::memcpy(to, &halves, sizeof halves);
}

template <typename T>
inline void widen_row(const T* from, i64 count, float* to) {
  i64 i = 0;
  for (; i + 8 <= count; i += 8) store8(to + i, load8(from + i));
  for (; i < count; i++) to[i] = to_float(from[i]);
}

template <int... kLanesOf>
inline Eight mix(Eight a, Eight b) {
  return __builtin_shuffle(a, b, EightWords{kLanesOf...});
}

// Transpose an 8 x 8 block.
inline void transpose8(Eight r[8]) {
  Eight t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = mix<0, 8, 1, 9, 4, 12, 5, 13>(r[i], r[i + 1]);
    t[i + 1] = mix<2, 10, 3, 11, 6, 14, 7, 15>(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const int j = i / 2 * 4 + i % 2;
    r[2 * i] = mix<0, 1, 8, 9, 4, 5, 12, 13>(t[j], t[j + 2]);
    r[2 * i + 1] = mix<2, 3, 10, 11, 6, 7, 14, 15>(t[j], t[j + 2]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = mix<0, 1, 2, 3, 8, 9, 10, 11>(r[i], r[i + 4]);
    t[i + 4] = mix<4, 5, 6, 7, 12, 13, 14, 15>(r[i], r[i + 4]);
  }
  std::copy(t, t + 8, r);
}

// Lane i of the result is the sum of all lanes of v[i].
inline Eight add_lanes(const Eight v[8]) {
  Eight a[4], b[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    a[i] = mix<0, 8, 1, 9, 4, 12, 5, 13>(v[2 * i], v[2 * i + 1]) + mix<2, 10, 3, 11, 6, 14, 7, 15>(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    b[i] = mix<0, 1, 8, 9, 4, 5, 12, 13>(a[2 * i], a[2 * i + 1]) + mix<2, 3, 10, 11, 6, 7, 14, 15>(a[2 * i], a[2 * i + 1]);
  return mix<0, 1, 2, 3, 8, 9, 10, 11>(b[0], b[1]) + mix<4, 5, 6, 7, 12, 13, 14, 15>(b[0], b[1]);
}

// Sixteen values side by side. The compiler splits them into what the machine has; where it has no good translation of
// what is meant, the AVX-512 instruction is named.
constexpr i64 kLanes = 16;
using Vec = float __attribute__((vector_size(64)));
using Ints = std::int32_t __attribute__((vector_size(64)));  // a comparison gives -1 and 0

// As many of them as a register of this machine holds.
#ifdef GRAPHLLM_AVX512
using Reg = Vec;
using RegInts = Ints;
#else
using Reg = Eight;
using RegInts = EightInts;
#endif
constexpr int kRegs = sizeof(Vec) / sizeof(Reg);
constexpr i64 kRegLanes = kLanes / kRegs;

template <typename P, typename V>
inline P reg_of(const V& values, int index) {
  P out;
  std::memcpy(&out, reinterpret_cast<const char*>(&values) + index * sizeof out, sizeof out);
  return out;
}
inline void put_reg(Vec& values, int index, Reg reg) {
  std::memcpy(reinterpret_cast<char*>(&values) + index * sizeof reg, &reg, sizeof reg);
}

// A vector that sums and products are not reordered across, where rounding must be that of the order written.
template <typename V>
inline V kept(V x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__AVX__)
  if constexpr (sizeof(V) <= 32)
    asm("" : "+x"(x));
  else
    asm("" : "+m"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

inline Vec vec(float x) { return x - Vec{}; }
inline Ints ints(std::int32_t x) { return x - Ints{}; }

#ifdef GRAPHLLM_AVX512
inline Vec larger(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
inline unsigned bits(Ints mask) { return _mm512_movepi32_mask((__m512i)mask); }
#else
inline Eight larger(Eight a, Eight b) { return a > b ? a : b; }
inline unsigned bits(EightInts mask) {
#ifdef __AVX2__
  return unsigned(_mm256_movemask_ps((__m256)mask));
#else
  unsigned out = 0;
  for (i64 i = 0; i < 8; i++) out |= unsigned(mask[i] & 1) << i;
  return out;
#endif
}
// gcc 12 compares and chooses among sixteen values one by one.
template <typename Work, typename... Values>
inline Vec by_halves(const Work& work, const Values&... values) {
  Vec out;
  for (int h = 0; h < 2; h++) put_reg(out, h, work(reg_of<Eight>(values, h)...));
  return out;
}
inline Vec larger(Vec a, Vec b) { return by_halves([](Eight x, Eight y) { return larger(x, y); }, a, b); }
inline unsigned bits(Ints mask) { return bits(reg_of<EightInts>(mask, 0)) | bits(reg_of<EightInts>(mask, 1)) << 8; }
#endif

// 2^x for x <= 0, relative error below 2e-7 (precise) or 1e-4: 2^floor(x) times a polynomial in the rest, fitted for least
// relative error. x may be minus infinity.
template <bool kPrecise, typename V>
inline V exp2_rest(V r) {
  V p{};
  if constexpr (kPrecise) {
    p = p + 0.0018775766948238015f;
    p = p * r + 0.00898933969438076f;
    p = p * r + 0.05582631751894951f;
    p = p * r + 0.24015361070632935f;
    p = p * r + 0.6931530833244324f;
    p = p * r + 0.9999999403953552f;
  } else {
    p = p + 0.07802452147006989f;
    p = p * r + 0.22606715559959412f;
    p = p * r + 0.6958335638046265f;
    p = p * r + 0.9999251961708069f;
  }
  return p;
}
#ifdef GRAPHLLM_AVX512
template <bool kPrecise>
inline Vec exp2_vec(Vec x) {
  const Vec r = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return (Vec)_mm512_scalef_ps((__m512)exp2_rest<kPrecise>(r), (__m512)x);
}
#else
template <bool kPrecise>
inline Eight exp2_vec(Eight x) {
  const Eight in_range = larger(x, Eight{} - 126.0f);
  const EightInts n = __builtin_convertvector(in_range - 1.0f, EightInts);
  const Eight r = in_range - __builtin_convertvector(n, Eight);
  return x <= -126.0f ? Eight{} : exp2_rest<kPrecise>(r) * (Eight)((n + 127) << 23);
}
template <bool kPrecise>
inline Vec exp2_vec(Vec x) {
  return by_halves([](Eight half) { return exp2_vec<kPrecise>(half); }, x);
}
#endif

#ifdef GRAPHLLM_AMX

// The kernel grants AMX state to a process that asks once; containers may refuse it.
inline bool amx_granted() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return granted;
}

// Tile t has ``rows[t]`` rows of ``columns[t]`` 32-bit columns. The configuration is per thread and is released at the end of a
// kernel, so that context switches need not save 8 KB and oneDNN finds the state it expects.
class Tiles {
 public:
  using Sizes = std::array<int, 8>;
  static constexpr Sizes kWhole = {16, 16, 16, 16, 16, 16, 16, 16};

  explicit Tiles(const Sizes& columns = kWhole, const Sizes& rows = kWhole) {
    struct alignas(64) {
      std::uint8_t palette, start, reserved[14];
      std::uint16_t bytes_per_row[16];
      std::uint8_t rows[16];
    } config{};
    config.palette = 1;
    for (int t = 0; t < 8; t++) {
      config.rows[t] = std::uint8_t(rows[t]);
      config.bytes_per_row[t] = std::uint16_t(columns[t] * 4);
    }
    // gcc's own macro says that it reads eight bytes of it: the rest may not have been written then.
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
};

// The tile instructions by constant tile number. Unlike gcc's own macros they clobber memory, so that what is written to
// a buffer is there when a tile is loaded from it.
template <int kTile>
inline void tile_load(const void* from, i64 stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(kTile) : "memory");
}
template <int kTile>
inline void tile_store(void* to, i64 stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride_bytes), "i"(kTile) : "memory");
}
template <int kTile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
// kSum += kLeft (16 rows of 32 bf16) times kRight (16 rows of `columns` pairs of bf16).
template <int kSum, int kLeft, int kRight>
inline void tile_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}

#endif  // GRAPHLLM_AMX

}  // namespace
}  // namespace graphllm
