// quant_linear: out [M, N] = x [M, K] times quantized weights [N, K] transposed, plus bias [N]. op.py has the layout.
//
// The weights are one stream of 64-byte lines, each of four inner entries (int4: two times four) of 16 rows. Rows of x
// are quantized to int8 in the same groups of inner entries when the kernel begins, so that a line is one integer
// product (vpdpbusd), or two, for each row of x; products of a group add up exactly and are scaled in float32 once. Many rows
// of x with AMX: weights are scaled and rounded to bfloat16 on the way, and x stays what it is.
#include <type_traits>

#include "cpu_int_blocks.h"
#include "cpu_int_panels.h"
#include "cpu_int_rows.h"
#include "pack.h"

namespace graphllm {
namespace {

constexpr i64 kPartBytes = 256 << 10;   // of weights that a thread takes at least at a time
constexpr i64 kMinBytes = 64 << 10;     // less weight than this is not worth waking another thread
constexpr i64 kOwnBytes = 16 << 10;     // less x than this each thread quantizes for itself, which saves a barrier
constexpr i64 kChunkBytes = 256 << 10;  // quantized rows of x that stay in the second-level cache

template <typename T>
struct Args {
  const T* x;
  const std::uint8_t* values;
  const bf16* scales;
  const T* bias;
  T* out;
  i64 M, N, K, x_stride;
};

template <typename T>
void finish(const Args<T>& a, i64 m, i64 n, Vec sum) {
  const i64 valid = std::min(kRows, a.N - n);
  for (i64 i = 0; i < valid; i++) store(a.out + m * a.N + n + i, a.bias ? sum[i] + to_float(a.bias[n + i]) : sum[i]);
}

template <typename F, typename T>
void quant_linear(const Args<T>& a) {
  if (a.M <= 0 || a.N <= 0) return;
#ifdef GRAPHLLM_AMX
  if constexpr (std::is_same_v<T, bf16>)
    if (a.M >= kMany && amx_granted()) {
      const Product product{a.x, nullptr, a.bias, a.out, a.M, a.N, a.K, a.x_stride, 0, a.N, false};
      const auto pack = [&](const Panel& panel, i64 k0, i64 depth, bf16* to) { unpack<F>({a.values, a.scales, a.K}, panel, k0, depth, to); };
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
      quantize_rows(a.x, a.x_stride, a.K, x, {0, a.M});
    } else {
      quantize_rows(a.x, a.x_stride, a.K, x, share(a.M));
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

// Rounding and packing of weights, see pack.h.
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
