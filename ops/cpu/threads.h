// How the threads of a team divide work, and the memory that each keeps for itself.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "cpu/target.h"

namespace graphllm {
namespace {

// A thread's reusable buffer, 64-byte aligned: grows, is never returned, so that no step after the first allocates.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  template <typename T>
  T* get(i64 count) {
    std::size_t bytes = (std::size_t(count) * sizeof(T) + 127) / 64 * 64;
    if (bytes > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, bytes);
      if (!data_) std::abort();
      size_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

// The [from, to) of ``count`` equal items that falls to this thread of the team.
struct Range {
  i64 from, to;
};
inline Range share(i64 count) {
  i64 threads = omp_get_num_threads(), mine = omp_get_thread_num();
  return {count * mine / threads, count * (mine + 1) / threads};
}

// `count` equal items for the threads of a team: each takes of its share, in order and a quarter of what is left at a time, at
// least `part` items, then of the others' shares. A thread that the machine holds up, or that has the slower half of
// the memory, is then not waited for. Few takes: at each the processor stops to read ahead.
class Shares {
 public:
  Shares(i64 count, i64 part, i64 threads) : part_(part), shares_(std::min<i64>(threads, kMost)) {
    for (i64 t = 0; t < shares_; t++) {
      all_[t].next.store(count * t / shares_, std::memory_order_relaxed);
      all_[t].to = count * (t + 1) / shares_;
    }
  }

  // By every thread of the team: work(Range) for the parts that fall to it.
  template <typename Work>
  void each(Work&& work) {
    const i64 own = omp_get_thread_num();
    for (i64 i = 0; i < shares_; i++) {
      Share& share = all_[(own + i) % shares_];
      i64 from = share.next.load(std::memory_order_relaxed);
      while (from < share.to) {
        const i64 left = share.to - from, to = from + std::min(left, std::max(part_, left / 4));
        if (!share.next.compare_exchange_weak(from, to, std::memory_order_relaxed)) continue;
        work(Range{from, to});
        from = share.next.load(std::memory_order_relaxed);
      }
    }
  }

 private:
  static constexpr i64 kMost = 128;  // shares: further threads take of these
  struct alignas(64) Share {
    std::atomic<i64> next;
    i64 to;
  };
  const i64 part_, shares_;
  Share all_[kMost];
};

}  // namespace
}  // namespace graphllm
