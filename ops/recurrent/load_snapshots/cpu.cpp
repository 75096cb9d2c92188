// load_snapshots: codes times scales, a block of columns at a time.
#include "cpu/calls.h"
#include "cpu/snapshots.h"

extern "C" void graphllm_load_snapshots(
    const std::int8_t* codes, const float* scales, const std::int32_t* kept, const std::int32_t* slots,
    const std::int32_t* snapshots, float* state, std::int32_t* rest, std::int64_t P, std::int64_t L, std::int64_t H,
    std::int64_t R, std::int64_t C, std::int64_t B, std::int64_t slot_stride, std::int64_t state_stride,
    std::int64_t rest_slot, std::int64_t codes_stride, std::int64_t codes_state, std::int64_t scales_stride,
    std::int64_t scales_state, std::int64_t kept_stride) {
  using namespace graphllm;
  const SnapshotPlaces places{slots, snapshots, P, L, H, R, C, B};
  places.each(
      [=](i64 pair, i64 l, i64 o, i64 i, i64 count) {
        const i64 snapshot = snapshots[pair];
        float* x = state + slots[pair] * slot_stride + l * state_stride + o * R * C + i;
        const std::int8_t* code = codes + snapshot * codes_stride + l * codes_state + o * R * C + i;
        const float* scale = scales + snapshot * scales_stride + l * scales_state + o * C + i;
        for (i64 r = 0; r < R; r++)
          for (i64 c = 0; c < count; c++) x[r * C + c] = float(code[r * C + c]) * scale[c];
      },
      [=](i64 pair) {
        const std::int32_t* words = kept + snapshots[pair] * kept_stride;
        std::memcpy(rest + slots[pair] * rest_slot, words, std::size_t(B) * sizeof *words);
      });
}
GRAPHLLM_KERNEL(graphllm_load_snapshots)
