// Where the recurrent states of a step's sequences are; the words are those of ops/recurrent/slots.py.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/target.h"

namespace graphllm {
namespace {

constexpr i64 kBorder = 64;  // tokens; states are exported at multiples of it

// Arguments that each kernel gets.
// slot_stride, version_stride: in elements of the state. exports: null for none.
struct Slots {
  const std::int32_t* query_start_loc;
  const std::int32_t* slots;
  const std::int32_t* state_versions;
  i64 versions, slot_stride, version_stride;
  const std::int32_t* exports;

  i64 first(i64 s) const { return query_start_loc[s]; }
  i64 count(i64 s) const { return query_start_loc[s + 1] - query_start_loc[s]; }
  // Where the sequence's state is read, and where version 0 of it is.
  i64 read(i64 s) const { return entry(s) + state_versions[s] * version_stride; }
  i64 entry(i64 s) const { return slots[s] * slot_stride; }
  // After how many tokens the sequence's state is exported, 0 for never, and where to.
  i64 border(i64 s) const { return exports && exports[s] >= 0 ? std::max<i64>(0, count(s) - 1) / kBorder * kBorder : 0; }
  i64 exported(i64 s) const { return exports[s] * slot_stride; }
  // Where the state after the token i of a sequence is written; -1 where it is not.
  i64 written(i64 s, i64 i) const {
    const i64 n = count(s);
    if (n <= versions || i == n - 1) return entry(s) + std::min(i, versions - 1) * version_stride;
    return i + 1 == border(s) ? exported(s) : -1;
  }
};

}  // namespace
}  // namespace graphllm
