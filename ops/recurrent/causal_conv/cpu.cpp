// causal_conv: each channel's weighed sum of its last W inputs.
//
// An item is a block of channels, whose weights are sorted by input once for all sequences. It goes through blocks of
// tokens, so that rows are read in long pieces; the last inputs of 16 channels stay in registers over a block, or in a
// window where there are many. A state is read before it is written.
#include "cpu/recurrent.h"

#include "cpu/calls.h"
#include "cpu/threads.h"
#include "cpu/vectors.h"

namespace graphllm {
namespace {

constexpr i64 kBlock = 256, kTokens = 32;
constexpr i64 kMinWork = 32 << 10;  // products below which a second thread is not worth waking

template <typename T>
struct Conv {
  const T *x, *weight, *bias;
  T *state, *out;
  Slots at;
  i64 S, D, W, x_stride, weight_stride;
  bool silu;

  // The weights of channels from `d` on by input, [groups of 16, W, 16].
  void sort(i64 d, i64 end, float* taps) const {
    for (; d < end; d += kLanes)
      for (i64 j = 0; j < W; j++, taps += kLanes)
        for (i64 lane = 0; lane < kLanes; lane++)
          taps[lane] = d + lane < end ? to_float(weight[(d + lane) * weight_stride + j]) : 0.0f;
  }

  // The input at a place of the step's tokens, or before them.
  Vec input(i64 s, i64 place, i64 d, i64 count) const {
    const T* row = place >= 0 ? x + (at.first(s) + place) * x_stride : state + at.read(s) + (W - 1 + place) * D;
    return load_some(row + d, count);
  }

  // Tokens [from, to) of a sequence in 16 channels or fewer. kWidth: W where it is a number that loops are unrolled for,
  // else 0; then `window` has room for W inputs.
  template <int kWidth>
  void tokens(i64 s, i64 from, i64 to, i64 d, i64 count, const float* taps, float* window) const {
    const i64 width = kWidth ? kWidth : W, kept = width - 1;
    const Vec offset = bias ? load_some(bias + d, count) : Vec{};
    Vec last[kWidth ? kWidth : 1], tap[kWidth ? kWidth : 1];
    for (i64 j = 0; j < kept; j++) {
      if constexpr (kWidth > 0)
        last[j + 1] = input(s, from - kept + j, d, count);
      else
        store_vec(window + (j + 1) * kLanes, input(s, from - kept + j, d, count));
    }
    if constexpr (kWidth > 0)
      for (int j = 0; j < kWidth; j++) tap[j] = load_vec(taps + j * kLanes);
    const T* row = x + (at.first(s) + from) * x_stride + d;
    T* result = out + (at.first(s) + from) * D + d;
    for (i64 i = from; i < to; i++, row += x_stride, result += D) {
      Vec sum = offset;
      if constexpr (kWidth > 0) {
#pragma GCC unroll 8
        for (int j = 0; j + 1 < kWidth; j++) last[j] = last[j + 1];
        last[kWidth - 1] = load_some(row, count);
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; j++) sum += last[j] * tap[j];
      } else {
        std::memmove(window, window + kLanes, kept * kLanes * sizeof(float));
        store_vec(window + kept * kLanes, load_some(row, count));
        for (i64 j = 0; j < width; j++) sum += load_vec(window + j * kLanes) * load_vec(taps + j * kLanes);
      }
      store_some(result, silu ? sum * sigmoid(sum) : sum, count);
      if (const i64 entry = at.written(s, i); entry >= 0)
        for (i64 j = 0; j < kept; j++) {
          if constexpr (kWidth > 0)
            store_some(state + entry + j * D + d, last[j + 1], count);
          else
            store_some(state + entry + j * D + d, load_vec(window + (j + 1) * kLanes), count);
        }
    }
  }

  template <int kWidth>
  void block(i64 begin, i64 end, float* taps) const {
    float* window = taps + kBlock * W;
    sort(begin, end, taps);
    for (i64 s = 0; s < S; s++)
      for (i64 from = 0, n = at.count(s); from < n; from += kTokens)
        for (i64 d = begin; d < end; d += kLanes)
          tokens<kWidth>(s, from, std::min(n, from + kTokens), d, std::min(kLanes, end - d), taps + (d - begin) * W, window);
  }

  void run() const {
    const i64 rows = at.query_start_loc[S];
#pragma omp parallel if (rows * D * W > kMinWork)
    {
      static thread_local Scratch scratch;
      float* taps = scratch.get<float>((kBlock + kLanes) * W);
      const Range mine = share(ceil_div(D, kBlock));
      for (i64 item = mine.from; item < mine.to; item++) {
        const i64 begin = item * kBlock, end = std::min(D, begin + kBlock);
        if (W == 4)
          block<4>(begin, end, taps);
        else if (W == 3)
          block<3>(begin, end, taps);
        else
          block<0>(begin, end, taps);
      }
    }
  }
};

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_CAUSAL_CONV(name, T)                                                                                \
  extern "C" void name(const void* x, const void* weight, const void* bias, void* state, void* out,                  \
                       const void* query_start_loc, const void* slots, const void* state_versions,                   \
                       const void* exports, std::int64_t S,                                                          \
                       std::int64_t D, std::int64_t W, std::int64_t x_stride, std::int64_t weight_stride,            \
                       std::int64_t versions, std::int64_t slot_stride, std::int64_t version_stride,                 \
                       std::int64_t silu) {                                                                          \
    using Number = graphllm::T;                                                                                      \
    using Ids = const std::int32_t*;                                                                                 \
    graphllm::Conv<Number>{static_cast<const Number*>(x), static_cast<const Number*>(weight),                        \
                           static_cast<const Number*>(bias), static_cast<Number*>(state), static_cast<Number*>(out), \
                           {static_cast<Ids>(query_start_loc), static_cast<Ids>(slots),                              \
                            static_cast<Ids>(state_versions), versions, slot_stride, version_stride,                 \
                            static_cast<Ids>(exports)},                                                              \
                           S, D, W, x_stride, weight_stride, silu != 0}                                              \
        .run();                                                                                                      \
  }                                                                                                                  \
  GRAPHLLM_KERNEL(name)

GRAPHLLM_CAUSAL_CONV(graphllm_causal_conv_f32, f32)
GRAPHLLM_CAUSAL_CONV(graphllm_causal_conv_bf16, bf16)
