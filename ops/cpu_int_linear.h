// Products with quantized weights, for quant_linear and gguf_linear: out [M, N] = x [M, K] times weights [N, K] transposed,
// plus bias [N]. Rows of x are quantized to int8 in the groups of the weights when a kernel begins, so that a line of
// weights is one integer product, or two, for each row of x; products of a group add up exactly and are scaled in float32
// once. Many rows of x with AMX: weights are scaled and rounded to bfloat16 on the way, and x stays what it is. With a
// gate, whoever has a block of it multiplies that of the value, too: out [M, N / 2] = silu(gate) * value.
//
// A matrix of weights has a Format (what `Quantized` wants), block_bytes: of 16 of its rows, multiply<kM, kBlocks>(block,
// apart, x, groups, totals): kM quantized rows of x times kBlocks blocks, `apart` from each other, and with AMX
// unpack(panel, k0, depth, to).
#pragma once

#include <type_traits>

#include "cpu_int_panels.h"
#include "cpu_int_rows.h"

namespace graphllm {
namespace {

constexpr i64 kPartBytes = 256 << 10;   // of weights that a thread takes at least at a time
constexpr i64 kMinBytes = 64 << 10;     // less weight than this is not worth waking another thread
constexpr i64 kOwnBytes = 16 << 10;     // less x than this each thread quantizes for itself, which saves a barrier
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
  T* to = a.out + m * a.N + n;
  if (valid == kRows) return store_vec(to, a.bias ? sum + load_vec(a.bias + n) : sum);
  for (i64 i = 0; i < valid; i++) store(to + i, a.bias ? sum[i] + to_float(a.bias[n + i]) : sum[i]);
}

template <typename T>
void finish_gated(const IntProduct<T>& a, i64 m, i64 n, Vec gate, Vec value) {
  if (a.bias) gate += load_vec(a.bias + n), value += load_vec(a.bias + a.columns() + n);
  store_vec(a.out + m * a.columns() + n, gate * sigmoid(gate) * value);
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
  static thread_local Scratch shared, own;
  const i64 groups = ceil_div(a.K, F::group), bytes = Quantized<F>::bytes(a.M, groups);
  const i64 blocks = ceil_div(a.columns(), kRows), block_bytes = a.gated ? 2 * w.block_bytes : w.block_bytes;
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
    Vec totals[kTile], values[kTile];
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
          multiply_some<kTile>(w, block, x.tile(m0), groups, totals, width);
          if (a.gated) multiply_some<kTile>(w, blocks + block, x.tile(m0), groups, values, width);
          for (i64 m = 0; m < width; m++)
            if (a.gated)
              finish_gated(a, m0 + m, block * kRows, totals[m], values[m]);
            else
              finish(a, m0 + m, block * kRows, totals[m]);
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
