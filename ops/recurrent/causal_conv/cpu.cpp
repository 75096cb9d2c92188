// causal_conv: each channel's weighed sum of its last W inputs.
//
// An item is a sequence's block of channels. Its last W - 1 inputs are kept as float32 in a buffer that is one row longer
// than the block of tokens, so a token's sum reads W rows of it. The state is read before it is written.
#include "cpu/recurrent.h"

#include "cpu/calls.h"
#include "cpu/threads.h"
#include "cpu/vectors.h"

namespace graphllm {
namespace {

constexpr i64 kBlock = 64;          // channels of an item
constexpr i64 kMinWork = 32 << 10;  // products below which a second thread is not worth waking

template <typename T>
struct Conv {
  const T *x, *weight, *bias;
  T *state, *out;
  Slots at;
  i64 S, D, W, x_stride, weight_stride;
  bool silu;

  // 16 channels or fewer of a sequence, from `d` on. kWidth: W where it is a number that loops are unrolled for, else 0.
  template <int kWidth>
  void channels(i64 s, i64 d, i64 count, float* window) const {
    const i64 width = kWidth ? kWidth : W, n = at.count(s), kept = width - 1;
    Vec taps[kWidth ? kWidth : 1];
    float* spread = window + width * kLanes;  // the weights by input, where they are not in registers
    for (i64 j = 0; j < width; j++) {
      float tap[kLanes] = {};
      for (i64 lane = 0; lane < count; lane++) tap[lane] = to_float(weight[(d + lane) * weight_stride + j]);
      if constexpr (kWidth > 0)
        taps[j] = load_vec(tap);
      else
        store_vec(spread + j * kLanes, load_vec(tap));
    }
    const Vec offset = bias ? load_some(bias + d, count) : Vec{};
    const T* from = state + at.read(s) + d;
    Vec last[kWidth ? kWidth : 1];
    for (i64 j = 0; j < kept; j++) {
      if constexpr (kWidth > 0)
        last[j + 1] = load_some(from + j * D, count);
      else
        store_vec(window + (j + 1) * kLanes, load_some(from + j * D, count));
    }
    const T* row = x + at.first(s) * x_stride + d;
    T* to = out + at.first(s) * D + d;
    for (i64 i = 0; i < n; i++, row += x_stride, to += D) {
      Vec sum = offset;
      if constexpr (kWidth > 0) {
#pragma GCC unroll 8
        for (int j = 0; j + 1 < kWidth; j++) last[j] = last[j + 1];
        last[kWidth - 1] = load_some(row, count);
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; j++) sum += last[j] * taps[j];
      } else {
        std::memmove(window, window + kLanes, kept * kLanes * sizeof(float));
        store_vec(window + kept * kLanes, load_some(row, count));
        for (i64 j = 0; j < width; j++) sum += load_vec(window + j * kLanes) * load_vec(spread + j * kLanes);
      }
      store_some(to, silu ? sum * sigmoid(sum) : sum, count);
      if (const i64 entry = at.written(s, i); entry >= 0)
        for (i64 j = 0; j < kept; j++) {
          if constexpr (kWidth > 0)
            store_some(state + entry + j * D + d, last[j + 1], count);
          else
            store_some(state + entry + j * D + d, load_vec(window + (j + 1) * kLanes), count);
        }
    }
  }

  void run() const {
    const i64 blocks = ceil_div(D, kBlock), tokens = at.query_start_loc[S];
#pragma omp parallel if (tokens * D * W > kMinWork)
    {
      static thread_local Scratch scratch;
      float* window = scratch.get<float>(2 * W * kLanes);
      const Range mine = share(S * blocks);
      for (i64 item = mine.from; item < mine.to; item++) {
        const i64 s = item / blocks, from = item % blocks * kBlock;
        if (at.count(s) == 0) continue;
        for (i64 d = from; d < std::min(D, from + kBlock); d += kLanes) {
          const i64 count = std::min(kLanes, D - d);
          if (W == 4)
            channels<4>(s, d, count, window);
          else if (W == 3)
            channels<3>(s, d, count, window);
          else
            channels<0>(s, d, count, window);
        }
      }
    }
  }
};

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_CAUSAL_CONV(name, T)                                                                                 \
  extern "C" void name(const void* x, const void* weight, const void* bias, void* state, void* out,                  \
                       const void* query_start_loc, const void* slots, const void* state_versions, std::int64_t S,   \
                       std::int64_t D, std::int64_t W, std::int64_t x_stride, std::int64_t weight_stride,             \
                       std::int64_t versions, std::int64_t slot_stride, std::int64_t version_stride,                  \
                       std::int64_t silu) {                                                                           \
    using Number = graphllm::T;                                                                                       \
    using Ids = const std::int32_t*;                                                                                  \
    graphllm::Conv<Number>{static_cast<const Number*>(x), static_cast<const Number*>(weight),                         \
                           static_cast<const Number*>(bias), static_cast<Number*>(state), static_cast<Number*>(out),  \
                           {static_cast<Ids>(query_start_loc), static_cast<Ids>(slots),                               \
                            static_cast<Ids>(state_versions), versions, slot_stride, version_stride},                 \
                           S, D, W, x_stride, weight_stride, silu != 0}                                               \
        .run();                                                                                                       \
  }                                                                                                                   \
  GRAPHLLM_KERNEL(name)

GRAPHLLM_CAUSAL_CONV(graphllm_causal_conv_f32, f32)
GRAPHLLM_CAUSAL_CONV(graphllm_causal_conv_bf16, bf16)
