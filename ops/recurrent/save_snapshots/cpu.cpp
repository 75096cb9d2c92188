// save_snapshots: a block of columns is read twice, for the largest magnitudes and for the codes.
#include <cmath>

#include "cpu/calls.h"
#include "cpu/snapshots.h"

namespace graphllm {
namespace {

// The scales of `count` columns of R rows that are `stride` apart, and their codes.
inline void round_columns(const float* x, i64 R, i64 stride, i64 count, std::int8_t* codes, float* scales) {
  float most[kColumns] = {}, wrong[kColumns] = {}, inverse[kColumns];
  for (i64 r = 0; r < R; r++)
    for (i64 i = 0; i < count; i++) {
      const float value = x[r * stride + i], size = std::fabs(value);
      most[i] = size > most[i] ? size : most[i];
      wrong[i] += value * 0.0f;  // NaN where a number is not finite
    }
  for (i64 i = 0; i < count; i++) {
    const float scale = most[i] / 127.0f;
    scales[i] = (scale < 1e-37f ? 0.0f : scale) + wrong[i];
    inverse[i] = scales[i] > 0.0f ? 1.0f / scales[i] : 0.0f;
  }
  for (i64 r = 0; r < R; r++)
    for (i64 i = 0; i < count; i++) {
      const float code = x[r * stride + i] * inverse[i];
      codes[r * stride + i] = std::int8_t(std::int32_t(code + (code < 0.0f ? -0.5f : 0.5f)));
    }
}

}  // namespace
}  // namespace graphllm

extern "C" void graphllm_save_snapshots(
    const float* state, const std::int32_t* rest, const std::int32_t* version, const std::int32_t* slots,
    const std::int32_t* snapshots, std::int8_t* codes, float* scales, std::int32_t* kept, std::int64_t P, std::int64_t L,
    std::int64_t H, std::int64_t R, std::int64_t C, std::int64_t B, std::int64_t slot_stride, std::int64_t version_stride,
    std::int64_t state_stride, std::int64_t rest_slot, std::int64_t rest_version, std::int64_t codes_stride,
    std::int64_t codes_state, std::int64_t scales_stride, std::int64_t scales_state, std::int64_t kept_stride,
    std::int64_t versioned) {
  using namespace graphllm;
  const SnapshotPlaces places{slots, snapshots, P, L, H, R, C, B};
  const auto valid = [=](i64 pair) { return slots[pair] < versioned ? i64(version[slots[pair]]) : 0; };
  places.each(
      [=](i64 pair, i64 l, i64 o, i64 i, i64 count) {
        const float* x = state + slots[pair] * slot_stride + valid(pair) * version_stride + l * state_stride + o * R * C + i;
        const i64 snapshot = snapshots[pair];
        round_columns(x, R, C, count, codes + snapshot * codes_stride + l * codes_state + o * R * C + i,
                      scales + snapshot * scales_stride + l * scales_state + o * C + i);
      },
      [=](i64 pair) {
        const std::int32_t* words = rest + slots[pair] * rest_slot + valid(pair) * rest_version;
        std::memcpy(kept + snapshots[pair] * kept_stride, words, std::size_t(B) * sizeof *words);
      });
}
GRAPHLLM_KERNEL(graphllm_save_snapshots)
