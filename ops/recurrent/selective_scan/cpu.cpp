// selective_scan: lanes are channels. The states of a block of channels stay in registers, or in the first cache, for all
// tokens of a sequence.
#include "cpu/calls.h"
#include "cpu/recurrent.h"
#include "cpu/threads.h"
#include "cpu/vectors.h"

namespace graphllm {
namespace {

constexpr i64 kMostN = 256;
constexpr i64 kMostBlocks = 4;     // of a sequence in a row: they lie side by side
constexpr i64 kAhead = 8;          // tokens: rows are far apart, so the processor does not read ahead by itself
constexpr i64 kMinWork = 1 << 15;  // numbers of states that make a thread worth its start
constexpr float kLog2e = 1.442695041f;

template <typename T>
struct Args {
  const T *x, *dt;
  const float* A;
  const T *B, *C;
  float* state;
  Slots slots;
  const float *D, *dt_bias;
  T* out;
  i64 sequences, channels, N, x_stride, dt_stride, A_stride, B_stride, C_stride;
};

template <typename T>
inline Reg load_reg(const T* from) {
  if constexpr (kRegLanes == kLanes)
    return load_vec(from);
  else
    return load8(from);
}
template <typename T>
inline void store_reg(T* to, Reg x) {
  if constexpr (kRegLanes == kLanes)
    store_vec(to, x);
  else
    store8(to, x);
}
// The first count lanes; the others are 0 and not written.
template <typename T>
inline Reg load_reg(const T* from, i64 count) {
  if (count == kRegLanes) return load_reg(from);
  T padded[kRegLanes] = {};
  std::memcpy(padded, from, std::size_t(count) * sizeof(T));
  return load_reg(padded);
}
template <typename T>
inline void store_reg(T* to, Reg x, i64 count) {
  if (count == kRegLanes) return store_reg(to, x);
  T padded[kRegLanes];
  store_reg(padded, x);
  std::memcpy(to, padded, std::size_t(count) * sizeof(T));
}

// Rows of N numbers, one for each of count channels, as N columns, and columns as rows.
inline void to_columns(const float* rows, i64 stride, i64 count, i64 N, Reg* columns) {
#ifdef GRAPHLLM_AVX512
  if (count == 16 && N % 16 == 0) {
    for (i64 n = 0; n < N; n += 16) {
      __m512i tile[16];
      for (i64 i = 0; i < 16; i++) tile[i] = _mm512_loadu_si512(rows + i * stride + n);
      transpose16(tile);
      for (i64 i = 0; i < 16; i++) columns[n + i] = (Reg)tile[i];
    }
    return;
  }
#endif
  for (i64 c = 0; c < kRegLanes; c += 8)
    for (i64 n = 0; n < N; n += 8)
      if (c + 8 <= count && n + 8 <= N) {
        Eight tile[8];
        for (i64 i = 0; i < 8; i++) tile[i] = load8(rows + (c + i) * stride + n);
        transpose8(tile);
        for (i64 i = 0; i < 8; i++) std::memcpy(reinterpret_cast<char*>(columns + n + i) + 4 * c, &tile[i], sizeof tile[i]);
      } else {
        for (i64 j = n; j < std::min(n + 8, N); j++)
          for (i64 i = c; i < c + 8; i++) columns[j][i] = i < count ? rows[i * stride + j] : 0.0f;
      }
}
inline void to_rows(const Reg* columns, i64 stride, i64 count, i64 N, float* rows) {
#ifdef GRAPHLLM_AVX512
  if (count == 16 && N % 16 == 0) {
    for (i64 n = 0; n < N; n += 16) {
      __m512i tile[16];
      for (i64 i = 0; i < 16; i++) tile[i] = (__m512i)columns[n + i];
      transpose16(tile);
      for (i64 i = 0; i < 16; i++) _mm512_storeu_si512(rows + i * stride + n, tile[i]);
    }
    return;
  }
#endif
  for (i64 c = 0; c < count; c += 8)
    for (i64 n = 0; n < N; n += 8)
      if (c + 8 <= count && n + 8 <= N) {
        Eight tile[8];
        for (i64 i = 0; i < 8; i++)
          std::memcpy(&tile[i], reinterpret_cast<const char*>(columns + n + i) + 4 * c, sizeof tile[i]);
        transpose8(tile);
        for (i64 i = 0; i < 8; i++) store8(rows + (c + i) * stride + n, tile[i]);
      } else {
        for (i64 j = n; j < std::min(n + 8, N); j++)
          for (i64 i = c; i < std::min(c + 8, count); i++) rows[i * stride + j] = columns[j][i];
      }
}

// log(1 + exp(v)). The logarithm is 2 atanh(e / (2 + e)) by its series, of e from 0 to 1 only.
inline Reg softplus(Reg v) {
  const Reg e = exp2_vec<true>(-kLog2e * larger(v, -v)), s = e / (2.0f + e), z = s * s;
  Reg sum = Reg{} + 2.0f / 13;
  sum = sum * z + 2.0f / 11;
  sum = sum * z + 2.0f / 9;
  sum = sum * z + 2.0f / 7;
  sum = sum * z + 2.0f / 5;
  sum = sum * z + 2.0f / 3;
  sum = sum * z + 2.0f;
  return larger(v, Reg{}) + s * sum;
}

// What a block of channels has of its own. decay: A log2(e), by columns. The decays of blocks lie side by side: where they
// begin at multiples of 4 KiB, as states do, a processor takes reads of one for reads of the other's writes.
struct Block {
  i64 first, count;
  Reg *decay, skip, bias;

  template <typename T>
  void read(const Args<T>& a, i64 number, Reg* memory) {
    decay = memory;
    first = number * kRegLanes, count = std::min(kRegLanes, a.channels - first);
    to_columns(a.A + first * a.A_stride, a.A_stride, count, a.N, decay);
    for (i64 n = 0; n < a.N; n++) decay[n] *= kLog2e;
    skip = a.D ? load_reg(a.D + first, count) : Reg{};
    bias = a.dt_bias ? load_reg(a.dt_bias + first, count) : Reg{};
  }
};

// All tokens of a sequence for a block of channels. kN: N where it is known, so that states are in registers, else 0.
template <int kN, typename T>
void scan(const Args<T>& a, const Block& block, i64 sequence) {
  const i64 N = kN ? kN : a.N, d = block.first, count = block.count, tokens = a.slots.count(sequence);
  Reg columns[kN ? kN : kMostN];
  to_columns(a.state + a.slots.read(sequence) + d * N, N, count, N, columns);
  for (i64 i = 0; i < tokens; i++) {
    const i64 t = a.slots.first(sequence) + i, next = t + std::min(kAhead, tokens - 1 - i);
    __builtin_prefetch(a.x + next * a.x_stride + d);
    __builtin_prefetch(a.dt + next * a.dt_stride + d);
    __builtin_prefetch(a.out + next * a.channels + d, 1);
    float input[kN ? kN : kMostN], output[kN ? kN : kMostN];
    widen_row(a.B + t * a.B_stride, N, input);
    widen_row(a.C + t * a.C_stride, N, output);
    const Reg x = load_reg(a.x + t * a.x_stride + d, count);
    const Reg step = softplus(load_reg(a.dt + t * a.dt_stride + d, count) + block.bias), in = step * x;
    Reg sums[2] = {block.skip * x, Reg{}};
#pragma GCC unroll 16
    for (i64 n = 0; n < N; n++) {
      columns[n] = columns[n] * exp2_vec<true>(step * block.decay[n]) + in * input[n];
      sums[n % 2] += columns[n] * output[n];
    }
    store_reg(a.out + t * a.channels + d, sums[0] + sums[1], count);
    if (const i64 at = a.slots.written(sequence, i); at >= 0) to_rows(columns, N, count, N, a.state + at + d * N);
  }
}

// Begins to read the states of a block of a sequence, which lie elsewhere.
template <typename T>
inline void prefetch(const Args<T>& a, i64 first, i64 sequence) {
  const i64 count = std::min(kRegLanes, a.channels - first) * a.N;
  const float* states = a.state + a.slots.read(sequence) + first * a.N;
  for (i64 i = 0; i < count; i += 16) __builtin_prefetch(states + i);
}

template <typename T>
void selective_scan(const Args<T>& a) {
  const i64 work = a.sequences ? a.slots.query_start_loc[a.sequences] * a.channels * a.N : 0;
  if (work == 0) return;
  const i64 threads = std::min<i64>(omp_get_max_threads(), std::max<i64>(1, work / kMinWork));
  const i64 blocks = ceil_div(a.channels, kRegLanes);
  const i64 each = blocks * a.sequences >= 8 * kMostBlocks * threads ? kMostBlocks : 1;
#pragma omp parallel num_threads(int(threads))
  {
    static thread_local Scratch memory;
    Reg* decays = memory.get<Reg>(each * a.N);
    Block own[kMostBlocks];
    i64 known = -1, count = 0;
    const Range mine = share(ceil_div(blocks, each) * a.sequences);
    for (i64 item = mine.from; item < mine.to; item++) {
      const i64 group = item / a.sequences, sequence = item % a.sequences;
      if (known != group) {
        count = std::min(each, blocks - group * each);
        for (i64 b = 0; b < count; b++) own[b].read(a, group * each + b, decays + b * a.N);
        known = group;
      }
      if (a.slots.count(sequence) == 0) continue;
      for (i64 b = 0; b < count; b++) {
        const bool last = sequence + 1 == a.sequences;
        prefetch(a, own[b].first + (last ? each * kRegLanes : 0), last ? 0 : sequence + 1);
        if (a.N == 16)
          scan<16>(a, own[b], sequence);
        else
          scan<0>(a, own[b], sequence);
      }
    }
  }
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_SELECTIVE_SCAN(name, T)                                                                            \
  extern "C" void name(const void* x, const void* dt, const void* A, const void* B, const void* C, void* state,     \
                       const void* query_start_loc, const void* slots, const void* state_versions,                  \
                       const void* exports, const void* D,                                                          \
                       const void* dt_bias, void* out, std::int64_t sequences, std::int64_t channels,               \
                       std::int64_t N,                                                                              \
                       std::int64_t x_stride, std::int64_t dt_stride, std::int64_t A_stride, std::int64_t B_stride, \
                       std::int64_t C_stride, std::int64_t versions, std::int64_t slot_stride,                      \
                       std::int64_t version_stride) {                                                               \
    using namespace graphllm;                                                                                       \
    selective_scan<T>({static_cast<const T*>(x), static_cast<const T*>(dt), static_cast<const float*>(A),           \
                       static_cast<const T*>(B), static_cast<const T*>(C), static_cast<float*>(state),              \
                       {static_cast<const std::int32_t*>(query_start_loc), static_cast<const std::int32_t*>(slots), \
                        static_cast<const std::int32_t*>(state_versions), versions, slot_stride,                    \
                        version_stride, static_cast<const std::int32_t*>(exports)},                                 \
                       static_cast<const float*>(D), static_cast<const float*>(dt_bias), static_cast<T*>(out),      \
                       sequences, channels, N, x_stride, dt_stride, A_stride, B_stride, C_stride});                 \
  }                                                                                                                 \
  GRAPHLLM_KERNEL(name)

GRAPHLLM_SELECTIVE_SCAN(graphllm_selective_scan_f32, f32)
GRAPHLLM_SELECTIVE_SCAN(graphllm_selective_scan_bf16, bf16)
