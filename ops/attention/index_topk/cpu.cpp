// index_topk: write the step's keys into their cache, score all keys that a token sees, and select the best.
//
// An item of scoring is some rows of a sequence and a segment of its keys. Some keys lie side by side as the lanes of a
// register, while rows and heads go past them. Then each row is selected by itself.
#include <cmath>
#include <functional>

#include "cpu/calls.h"
#include "cpu/threads.h"
#include "cpu/vectors.h"

namespace graphllm {
namespace {

constexpr i64 kRows = 16;              // of an item
constexpr i64 kSegment = 1024;         // keys of an item
constexpr i64 kMostScores = 16 << 20;  // of a pass over some rows
constexpr i64 kMinProducts = 256 << 10;  // below which a second thread is not worth waking
constexpr i64 kHeads = 8;              // that go past a register of keys together

template <typename T>
struct IndexArgs {
  const T *q, *k;
  const float* weights;
  T* cache;
  const std::int32_t *table, *starts, *lengths;
  std::int32_t* chosen;
  i64 tokens, S, H, E, P, topk, q_token, q_head, k_token, weights_token, cache_block, cache_slot, table_stride;

  i64 position(i64 s, i64 t) const { return lengths[s] - (starts[s + 1] - t); }
  T* key(i64 s, i64 position) const {
    return cache + table[s * table_stride + position / P] * cache_block + position % P * cache_slot;
  }
};

// Rows [row, row + count) of sequence s, whose first has a position.
struct Rows {
  i64 s, row, count, position;
  i64 seen() const { return position + count; }
};

template <typename T>
class Scores {
 public:
  explicit Scores(const IndexArgs<T>& a) : a_(a) {
    static thread_local Scratch queries, keys;
    heads_ = (a.H + kHeads - 1) / kHeads * kHeads;
    queries_ = queries.get<float>(kRows * heads_ * a.E);
    keys_ = keys.get<float>(a.E * kRegLanes);
  }

  // Scores of keys [from, to) go to `scores`, whose rows are `width` apart.
  void run(const Rows& rows, i64 from, i64 to, float* scores, i64 width) {
    for (i64 i = 0; i < rows.count; i++)
      for (i64 h = 0; h < heads_; h++) {
        float* row = queries_ + (i * heads_ + h) * a_.E;
        if (h < a_.H)
          widen_row(a_.q + (rows.row + i) * a_.q_token + h * a_.q_head, a_.E, row);
        else
          std::fill_n(row, a_.E, 0.0f);
      }
    for (i64 at = from; at < to; at += kRegLanes) {
      const i64 count = std::min(kRegLanes, to - at);
      for (i64 lane = 0; lane < kRegLanes; lane++) {
        const T* key = a_.key(rows.s, at + std::min(lane, count - 1));
        for (i64 e = 0; e < a_.E; e++) keys_[e * kRegLanes + lane] = to_float(key[e]);
      }
      for (i64 i = 0; i < rows.count; i++) {
        const Reg found = score(queries_ + i * heads_ * a_.E, a_.weights + (rows.row + i) * a_.weights_token);
        for (i64 lane = 0; lane < count; lane++) scores[i * width + at + lane] = found[lane];
      }
    }
  }

 private:
  Reg score(const float* query, const float* weights) const {
    Reg total{};
    for (i64 h = 0; h < a_.H; h += kHeads, query += kHeads * a_.E) {
      Reg sums[kHeads] = {};
      for (i64 e = 0; e < a_.E; e++) {
        const Reg key = reg_of<Reg>(keys_[e * kRegLanes], 0);
#pragma GCC unroll 8
        for (i64 i = 0; i < kHeads; i++) sums[i] += query[i * a_.E + e] * key;
      }
      for (i64 i = 0; i < std::min(kHeads, a_.H - h); i++) total += weights[h + i] * (sums[i] > 0 ? sums[i] : 0);
    }
    return total;
  }

  const IndexArgs<T>& a_;
  i64 heads_;
  float *queries_, *keys_;
};

// Positions of the topk largest of n scores in ascending order, of equal ones the first; then -1.
inline void select(const float* scores, i64 n, i64 topk, std::int32_t* chosen) {
  if (n <= topk) {
    for (i64 i = 0; i < topk; i++) chosen[i] = i < n ? std::int32_t(i) : -1;
    return;
  }
  static thread_local Scratch scratch;
  float* sorted = scratch.get<float>(n);
  std::copy_n(scores, n, sorted);
  std::nth_element(sorted, sorted + topk - 1, sorted + n, std::greater<float>());
  const float bound = sorted[topk - 1];
  i64 missing = topk;
  for (i64 i = 0; i < n; i++) missing -= scores[i] > bound;
  for (i64 i = 0; i < n; i++)
    if (scores[i] > bound || (scores[i] == bound && missing-- > 0)) *chosen++ = std::int32_t(i);
}

template <typename T>
void index_topk(const IndexArgs<T>& a) {
  static thread_local Scratch groups, numbers;
  const i64 used = a.starts[a.S];
  Rows* all = groups.get<Rows>(used + 1);
  i64 count = 0, width = 1, pairs = 0;
  for (i64 s = 0; s < a.S; s++)
    for (i64 t = a.starts[s]; t < a.starts[s + 1]; t += kRows) {
      all[count++] = {s, t, std::min(kRows, a.starts[s + 1] - t), a.position(s, t)};
      width = std::max(width, i64(a.lengths[s])), pairs += all[count - 1].count * a.lengths[s];
    }
  const i64 some = std::max(i64(1), kMostScores / (kRows * width)), segments = (width + kSegment - 1) / kSegment;
  float* scores = numbers.get<float>(std::min(some, count) * kRows * width + 1);
  const i64 wanted = std::max(i64(1), pairs * a.H * a.E / kMinProducts);
#pragma omp parallel num_threads(int(std::min(i64(omp_get_max_threads()), wanted)))
  {
    Scores<T> scoring(a);
#pragma omp for schedule(static)
    for (i64 g = 0; g < count; g++)
      for (i64 i = 0; i < all[g].count; i++)
        std::copy_n(a.k + (all[g].row + i) * a.k_token, a.E, a.key(all[g].s, all[g].position + i));
    for (i64 first = 0; first < count; first += some) {
      const i64 here = std::min(some, count - first);
#pragma omp for schedule(dynamic, 1)
      for (i64 item = 0; item < here * segments; item++) {
        const i64 g = item / segments, from = item % segments * kSegment;
        const Rows& rows = all[first + g];
        scoring.run(rows, from, std::min(from + kSegment, rows.seen()), scores + g * kRows * width, width);
      }
#pragma omp for schedule(dynamic, 1)
      for (i64 row = 0; row < here * kRows; row++) {
        const Rows& rows = all[first + row / kRows];
        const i64 i = row % kRows;
        if (i < rows.count) select(scores + row * width, rows.position + i + 1, a.topk, a.chosen + (rows.row + i) * a.topk);
      }
    }
  }
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_INDEX_TOPK(name, T)                                                                                   \
  extern "C" void name(const void* q, const void* k, const void* weights, void* cache, const void* table,             \
                       const void* starts, const void* lengths, void* chosen, std::int64_t tokens, std::int64_t S,     \
                       std::int64_t H, std::int64_t E, std::int64_t P, std::int64_t topk, std::int64_t q_token,        \
                       std::int64_t q_head, std::int64_t k_token, std::int64_t weights_token,                          \
                       std::int64_t cache_block, std::int64_t cache_slot, std::int64_t table_stride) {                 \
    using Number = graphllm::T;                                                                                        \
    using Ids = const std::int32_t*;                                                                                   \
    graphllm::index_topk<Number>({static_cast<const Number*>(q), static_cast<const Number*>(k),                        \
                                  static_cast<const float*>(weights), static_cast<Number*>(cache),                     \
                                  static_cast<Ids>(table), static_cast<Ids>(starts), static_cast<Ids>(lengths),        \
                                  static_cast<std::int32_t*>(chosen), tokens, S, H, E, P, topk, q_token, q_head,       \
                                  k_token, weights_token, cache_block, cache_slot, table_stride});                     \
  }                                                                                                                    \
  GRAPHLLM_KERNEL(name)

GRAPHLLM_INDEX_TOPK(graphllm_index_topk_f32, f32)
GRAPHLLM_INDEX_TOPK(graphllm_index_topk_bf16, bf16)
