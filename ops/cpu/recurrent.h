// Where the recurrent states of a step's sequences are; the words are those of ops/recurrent/slots.py.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/target.h"

namespace graphllm {
namespace {

// Arguments that each kernel gets.
// slot_stride, version_stride: in elements of the state.
struct Slots {
  const std::int32_t* query_start_loc;
  const std::int32_t* slots;
  const std::int32_t* state_versions;
  i64 versions, slot_stride, version_stride;

  i64 first(i64 s) const { return query_start_loc[s]; }
  i64 count(i64 s) const { return query_start_loc[s + 1] - query_start_loc[s]; }
  // Where the sequence's state is read, and where version 0 of it is.
  i64 read(i64 s) const { return entry(s) + state_versions[s] * version_stride; }
  i64 entry(i64 s) const { return slots[s] * slot_stride; }
  // Where the state after the token i of a sequence is written; -1 where it is not.
  i64 written(i64 s, i64 i) const {
    const i64 n = count(s);
    return n <= versions || i == n - 1 ? entry(s) + std::min(i, versions - 1) * version_stride : -1;
  }
};

}  // namespace
}  // namespace graphllm
