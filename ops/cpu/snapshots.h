// What save_snapshots and load_snapshots share: where states of slots and of snapshots lie, and how threads divide them.
#pragma once

#include <cstring>

#include "cpu/threads.h"

namespace graphllm {
namespace {

constexpr i64 kColumns = 64;  // scales of a work item where they lie side by side

struct SnapshotPlaces {
  const std::int32_t *slots, *snapshots;
  i64 P, L, H, R, C, B;

  // work(pair, state, head, first column, columns) for blocks of columns of a head of a state; copied(pair) for the words.
  template <typename Work, typename Copied>
  void each(Work&& work, Copied&& copied) const {
    const i64 blocks = ceil_div(C, kColumns), items = P * (L * H * blocks + 1);
#pragma omp parallel for schedule(static) if (P * L * H * R * C > 1 << 15)
    for (i64 item = 0; item < items; item++) {
      const i64 pair = item / (L * H * blocks + 1), at = item % (L * H * blocks + 1);
      if (snapshots[pair] < 0) continue;
      if (at == L * H * blocks) {
        copied(pair);
        continue;
      }
      const i64 column = at % blocks * kColumns, head = at / blocks;
      work(pair, head / H, head % H, column, std::min(kColumns, C - column));
    }
  }
};

}  // namespace
}  // namespace graphllm
