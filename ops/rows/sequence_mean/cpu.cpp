// sequence_mean: rows are added into float32 sums, a stretch of columns at a time.
#include <algorithm>

#include "cpu/calls.h"
#include "cpu/threads.h"
#include "cpu/vectors.h"

namespace graphllm {
namespace {

constexpr i64 kColumns = 256;  // sums of a work item, which stay in the first-level cache

template <typename T>
void means(const T* x, const std::int32_t* starts, const std::int32_t* rows, float* out, i64 S, i64 R, i64 D, i64 stride) {
  const i64 parts = ceil_div(D, kColumns);
#pragma omp parallel for schedule(dynamic, 1) if (R * parts > 1 && i64(starts[S]) * D > 1 << 16)
  for (i64 item = 0; item < R * parts; item++) {
    const i64 r = item / parts, from = item % parts * kColumns, width = std::min(kColumns, D - from), row = rows[r];
    const std::int32_t* after = std::upper_bound(starts, starts + S + 1, std::int32_t(row));
    const i64 first = after == starts + S + 1 ? row : after[-1];
    float sums[kColumns] = {};
    for (i64 t = first; t <= row; t++) {
      const T* at = x + t * stride + from;
      i64 e = 0;
      for (; e + 8 <= width; e += 8) store8(sums + e, load8(sums + e) + load8(at + e));
      for (; e < width; e++) sums[e] += to_float(at[e]);
    }
    const float share = 1.0f / float(row + 1 - first);
    for (i64 e = 0; e < width; e++) out[r * D + from + e] = sums[e] * share;
  }
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_SEQUENCE_MEAN(name, T)                                                                               \
  extern "C" void name(const void* x, const void* starts, const void* rows, void* out, std::int64_t S, std::int64_t R, \
                       std::int64_t D, std::int64_t stride) {                                                         \
    graphllm::means(static_cast<const graphllm::T*>(x), static_cast<const std::int32_t*>(starts),                     \
                    static_cast<const std::int32_t*>(rows), static_cast<float*>(out), S, R, D, stride);               \
  }                                                                                                                   \
  GRAPHLLM_KERNEL(name)

GRAPHLLM_SEQUENCE_MEAN(graphllm_sequence_mean_f32, f32)
GRAPHLLM_SEQUENCE_MEAN(graphllm_sequence_mean_bf16, bf16)
