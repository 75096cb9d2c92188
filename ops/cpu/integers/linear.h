// Products with quantized weights, for quant_linear and gguf_linear: out [M, N] = x [M, K] times weights [N, K] transposed,
// plus bias [N]. Rows of x are quantized to int8 in the groups of the weights when a kernel begins, so that a line of
// weights is one integer product, or two, for each row of x; products of a group add up exactly and are scaled in float32
// once. Many rows of x with AMX: weights are scaled and rounded to bfloat16 on the way, and x stays what it is.
//
// With a gate, out [M, N / 2] = silu(gate) * value, and whoever has a block of gates multiplies that of the values, too.
// Of a few rows, which take as long as the weight is read, that would cost 5 to 18 %: one stream is read faster than two
// places by turns. There the gate waits until all is multiplied.
//
// A matrix of weights has a Format (what `Quantized` wants), block_bytes: of 16 of its rows, multiply<kM, kBlocks>(block,
// apart, x, groups, totals): kM quantized rows of x times kBlocks blocks, `apart` from each other, and with AMX
// unpack(panel, k0, depth, to).
#pragma once

#include <type_traits>

#include "cpu/integers/panels.h"
#include "cpu/integers/rows.h"

namespace graphllm {
namespace {

constexpr i64 kPartBytes = 256 << 10;   // of weights that a thread takes at least at a time
constexpr i64 kMinBytes = 64 << 10;     // less weight than this is not worth waking another thread
constexpr i64 kOwnBytes = 16 << 10;     // less x than this each thread quantizes for itself, which saves a barrier
constexpr i64 kFewGated = 16;           // rows of x with which the gate waits
constexpr i64 kChunkBytes = 256 << 10;  // quantized rows of x that stay in the second-level cache

template <typename T>
struct IntProduct {
  const T *x, *bias;
  T* out;
  i64 M, N, K, x_stride;
  bool gated;  // the weight's halves, of whole blocks, are a gate and a value

  i64 columns() const { return gated ? N / 2 : N; }
};

template <typename T>
void finish(const IntProduct<T>& a, i64 m, i64 n, Vec sum) {
  const i64 valid = std::min(kRows, a.N - n);
  for (i64 i = 0; i < valid; i++) store(a.out + m * a.N + n + i, a.bias ? sum[i] + to_float(a.bias[n + i]) : sum[i]);
}

inline void silu_times(Vec gate, Vec value, float* to) { store_vec(to, gate * sigmoid(gate) * value); }
inline void silu_times(Vec gate, Vec value, bf16* to) {
#ifdef GRAPHLLM_AVX512
  store_vec(to, (Vec)silu((__m512)gate) * value);
#else
  store_vec(to, by_halves([](Eight x) { return silu(x); }, gate) * value);
#endif
}
template <typename T>
void finish_gated(const IntProduct<T>& a, i64 m, i64 n, Vec gate, Vec value) {
  if (a.bias) gate += load_vec(a.bias + n), value += load_vec(a.bias + a.columns() + n);
  silu_times(gate, value, a.out + m * a.columns() + n);
}

// One block and any number of rows, at most kM.
template <int kM, typename Matrix>
void multiply_some(const Matrix& w, i64 block, const char* x, i64 groups, Vec* totals, i64 rows) {
  if constexpr (kM > 0) {
    if (rows == kM)
      w.template multiply<kM, 1>(block, 0, x, groups, totals);
    else
      multiply_some<kM - 1>(w, block, x, groups, totals, rows);
  }
}

template <typename Matrix, typename T>
void int_linear(const IntProduct<T>& a, const Matrix& w) {
  using F = typename Matrix::Format;
  if (a.M <= 0 || a.N <= 0) return;
#ifdef GRAPHLLM_AMX
  if constexpr (std::is_same_v<T, bf16>)
    if (a.M >= kMany && amx_granted()) {
      const Product product{a.x, nullptr, a.bias, a.out, a.M, a.N, a.K, a.x_stride, 0, a.columns(), a.gated};
      const auto pack = [&](const Panel& panel, i64 k0, i64 depth, bf16* to) { w.unpack(panel, k0, depth, to); };
#pragma omp parallel
      panels_by_thread<AmxTile>(product, pack);
      return;
    }
#endif
  static thread_local Scratch shared, own, sums;
  const i64 groups = ceil_div(a.K, F::group), bytes = Quantized<F>::bytes(a.M, groups);
  const bool waits = a.gated && a.M > 1 && a.M <= kFewGated, pairs = a.gated && !waits;
  float* halves = waits ? sums.get<float>(a.M * a.N) : nullptr;
  const i64 blocks = ceil_div(pairs ? a.columns() : a.N, kRows);
  const i64 block_bytes = pairs ? 2 * w.block_bytes : w.block_bytes;
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
    Vec totals[2 * kTile];  // of gates, or all there is, and of values
    auto multiply = [&](i64 first, Range mine) {
      i64 block = mine.from;
      if (kStreams == 2 && a.M == 1 && a.gated) {
        for (; block < mine.to; block++) {
          w.template multiply<1, kStreams>(block, blocks, x.tile(0), groups, totals);
          finish_gated(a, 0, block * kRows, totals[0], totals[1]);
        }
      } else if (kStreams > 1 && a.M == 1) {
        const i64 apart = (mine.to - mine.from) / kStreams;
        for (; block < mine.from + apart; block++) {
          w.template multiply<1, kStreams>(block, apart, x.tile(0), groups, totals);
          for (int s = 0; s < kStreams; s++) finish(a, 0, (block + s * apart) * kRows, totals[s]);
        }
        block = mine.from + kStreams * apart;
      }
      for (; block < mine.to; block++)
        for (i64 m0 = first; m0 < std::min(a.M, first + chunk); m0 += x.tile_rows) {
          const i64 width = x.width(m0);
          for (int half = 0; half < (pairs ? 2 : 1); half++)
            multiply_some<kTile>(w, block + half * blocks, x.tile(m0), groups, totals + half * kTile, width);
          for (i64 m = 0; m < width; m++)
            if (waits)
              store_vec(halves + (m0 + m) * a.N + block * kRows, totals[m]);
            else if (pairs)
              finish_gated(a, m0 + m, block * kRows, totals[m], totals[kTile + m]);
            else
              finish(a, m0 + m, block * kRows, totals[m]);
        }
    };
    if (a.M <= chunk)
      shares.each([&](Range part) { multiply(0, part); });
    else
      for (i64 first = 0; first < a.M; first += chunk) multiply(first, share(blocks));
    if (waits) {
#pragma omp barrier
      const Range mine = share(a.columns() / kRows);
      for (i64 m = 0; m < a.M; m++)
        for (i64 n = mine.from * kRows; n < mine.to * kRows; n += kRows)
          finish_gated(a, m, n, load_vec(halves + m * a.N + n), load_vec(halves + m * a.N + a.columns() + n));
    }
  }
}

}  // namespace
}  // namespace graphllm
