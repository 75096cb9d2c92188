// paged_attention: write the step's keys and values into the paged cache, then attend, for one ragged batch.
//
// One work item is a block of query tokens of one sequence for one key/value head: its rows are (token, query head of the
// group), 16 of them side by side as the lanes of a vector. Scores are computed transposed, [tokens][16 lanes], so that
// the running maximum and sum of the online softmax are plain vector operations and keys are used as they lie in the
// cache; values are transposed once a chunk and item (tiles.h). Items of few rows, as in decode, go another way
// (few_rows.h). worker.h serves one item, this file hands them out.
#pragma once

#include <type_traits>

#include "cpu/threads.h"
#include "cpu/attention/worker.h"

namespace graphllm {
namespace {

constexpr i64 kMaxRows = 448;  // query rows an item: enough to make the transposition of values cheap
constexpr i64 kMinRows = 64;   // but no fewer, when smaller items would keep all threads busy
constexpr i64 kMinWork = 4 << 10;  // query-key pairs times heads below which a second thread is not worth waking
constexpr i64 kMinBytes = 64 << 10;  // the same in decode, in bytes of the cache

// The items of a batch. In pure decode every thread takes the same share of the tokens of all contexts, one stretch of them,
// so that it knows what comes next; where a share ends inside of an item the parts are merged at the end. Otherwise whole
// items are handed out as threads get free. Where each row must be computed independently of the others, that is always
// so, and items have as many rows as the way of few rows takes, whatever the step has.
template <typename T, typename C>
class Batch {
 public:
  // least: threads that there are in any case.
  explicit Batch(const Args<T, C>& a, i64 least = 1) : a_(a), group_(a.H / a.K) {
    i64 work = 0, read = 0, rows = kMaxRows;
    for (i64 s = 0; s < a.S; s++) {
      const i64 n = queries(s);
      most_ = std::max(most_, n);
      work += n * a.lengths[s] * a.H;
      if (n > 0) read += (a.lengths[s] - first_seen(a.lengths[s] - n)) * a.K * (a.E + a.V) * i64(sizeof(C));
    }
    const i64 wanted = decode() ? read / kMinBytes : work / kMinWork;
    threads_ = std::min(i64(omp_get_max_threads()), std::max(least, wanted));
    static thread_local Scratch first, parts;
    first_ = first.get<i64>(a.S + 1);
    first_[0] = 0;
    for (; decode() || rows >= kMinRows; rows /= 2) {
      block_ = decode() ? 1 : std::max(i64(1), std::min((by_few() ? Worker<T, C>::most_few(a) : rows) / group_, most_));
      for (i64 s = 0; s < a.S; s++) first_[s + 1] = first_[s] + (decode() ? units(s) : a.K * ceil_div(queries(s), block_));
      if (decode() || by_few() || first_[a.S] >= 4 * threads_) break;
    }
    part_size_ = Worker<T, C>::room(a, block_ * group_, heads());
    if (decode() && threads_ > 1) parts_ = parts.get<Vec>(2 * threads_ * part_size_);
  }

  int threads() const { return int(threads_); }

  // Called by every thread of the team.
  void run() {
    if (!decode() && writes()) {
      write(share(a_.starts[a_.S]));
#pragma omp barrier
    }
    Worker<T, C> worker(a_, block_ * group_, heads());
    if (decode()) return run_share(worker);
#pragma omp for schedule(dynamic, 1)
    for (i64 n = 0; n < first_[a_.S]; n++) {
      const Item item = at(n);
      worker.run(item, nullptr);
      worker.finish(item, worker.states());
    }
  }

 private:
  using Math = typename Arithmetic<T>::ManyRows;

  i64 queries(i64 s) const { return a_.starts[s + 1] - a_.starts[s]; }
  bool writes() const { return a_.table && a_.k; }
  bool decode() const { return most_ <= 1 && a_.table && !a_.invariant; }
  bool by_few() const { return a_.invariant && group_ <= Worker<T, C>::most_few(a_); }
  i64 heads() const { return decode() ? a_.K : 1; }  // of an item: all of them are in a block of the cache

  // Where the context of a token at `position` begins: at a multiple of 16, so that 16 tokens never straddle two blocks of
  // such a size; of whole chunks, where they are not to depend on it.
  i64 first_seen(i64 position) const {
    const i64 step = a_.invariant ? kChunk : 16;
    return a_.window > 0 ? std::max(i64(0), position - a_.window + 1) / step * step : 0;
  }

  void write(Range rows) const {
    for (i64 s = 0; s < a_.S; s++)
      for (i64 t = std::max(rows.from, i64(a_.starts[s])); t < std::min(rows.to, i64(a_.starts[s + 1])); t++)
        for (i64 head = 0; head < a_.K; head++) a_.write(s, t, a_.lengths[s] - (a_.starts[s + 1] - t), head);
  }

  i64 sequence(i64 number) const { return std::upper_bound(first_, first_ + a_.S + 1, number) - first_ - 1; }

  // The item of that number; the last block of a sequence, which sees most context, comes first.
  Item at(i64 number) const {
    const i64 s = sequence(number), n = queries(s), start = ((first_[s + 1] - 1 - number) / a_.K) * block_;
    Item item{s, number % a_.K, 1, a_.starts[s] + start, std::min(block_, n - start), a_.lengths[s] - n + start, 0, 0};
    const bool tree = a_.ancestors && a_.ancestors[item.row] >= 0;
    item.from = first_seen(tree ? item.position - start : item.position);
    item.to = tree ? i64(a_.lengths[s]) : std::min(i64(a_.lengths[s]), item.position + item.tokens + a_.ahead);
    return item;
  }

  // ---- Decode. first_ counts units of work: every 16 tokens of a context, and two for the rest.

  static constexpr i64 kUnit = 16, kRest = 2;
  i64 units(i64 s) const {
    const i64 length = a_.lengths[s];
    return queries(s) == 0 ? 0 : kRest + ceil_div(length - first_seen(length - 1), kUnit);
  }
  // Where the share of a thread begins.
  i64 begin(i64 thread, i64 threads) const { return first_[a_.S] * thread / threads; }

  // The part of an item from `unit` on, before `end`.
  struct Part {
    Item item;
    i64 next;
    bool starts, ends;  // the item
  };
  Part part(i64 unit, i64 end) const {
    const i64 s = sequence(unit), position = a_.lengths[s] - 1, seen = first_seen(position);
    const auto at = [&](i64 u) { return seen + std::max(i64(0), u - first_[s] - kRest) * kUnit; };
    end = std::min(end, first_[s + 1]);
    return {{s, 0, a_.K, a_.starts[s], 1, position, at(unit), std::min(position + 1, at(end))}, end,
            unit == first_[s], end == first_[s + 1]};
  }

  void run_share(Worker<T, C>& worker) {
    const i64 threads = omp_get_num_threads(), me = omp_get_thread_num(), end = begin(me + 1, threads);
    for (i64 unit = begin(me, threads); unit < end;) {
      const Part now = part(unit, end);
      unit = now.next;
      const Item& item = now.item;
      if (now.ends && writes())
        for (i64 head = 0; head < a_.K; head++) a_.write(item.s, item.row, item.position, head);
      const Item next = unit < end ? part(unit, end).item : item;
      worker.run(item, unit < end ? &next : nullptr);
      if (now.starts && now.ends) {
        worker.finish(item, worker.states());
      } else {
        Vec* to = parts_ + (2 * me + now.starts) * part_size_;
        std::copy(worker.states(), worker.states() + a_.K * worker.head_size(item), to);
      }
    }
    if (threads == 1) return;
#pragma omp barrier
    if (begin(me, threads) < end) merge(worker, me, threads);
  }

  // Who began an item that others end merges their parts.
  void merge(const Worker<T, C>& worker, i64 me, i64 threads) const {
    const i64 end = begin(me + 1, threads), s = sequence(end - 1), from = first_[s], to = first_[s + 1];
    if (from < begin(me, threads) || to == end) return;
    const Item item = part(from, to).item;
    const i64 unit = worker.unit_size(item);
    Vec* whole = parts_ + (2 * me + 1) * part_size_;
    for (i64 other = me + 1; other < threads && begin(other, threads) < to; other++) {
      if (begin(other, threads) == begin(other + 1, threads)) continue;
      const Vec* part = parts_ + 2 * other * part_size_;
      for (i64 at = 0; at < a_.K * worker.head_size(item); at += unit) {
        const Vec top = larger(whole[at], part[at]);
        const Vec keep = exp2_vec<true>(whole[at] - top), add = exp2_vec<true>(part[at] - top);
        for (i64 i = at + 1; i < at + unit; i++) whole[i] = whole[i] * keep + part[i] * add;
        whole[at] = top;
      }
    }
    worker.finish(item, whole);
  }

  const Args<T, C>& a_;
  i64 group_, most_ = 0, threads_, block_ = 1, part_size_;
  i64* first_;
  Vec* parts_ = nullptr;
};

template <typename T, typename C>
void attend(const Args<T, C>& a) {
  for (i64 t = a.starts[a.S]; t < a.T_; t++) std::memset(a.out + t * a.H * a.V, 0, a.H * a.V * sizeof(T));
  Batch<T, C> batch(a);
#pragma omp parallel num_threads(batch.threads())
  {
    const TilesOf<T> configured;
    batch.run();
  }
}

}  // namespace
}  // namespace graphllm
