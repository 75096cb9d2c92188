// latent_attention: write the step's tokens into the cache of latents, then attend, for one ragged batch.
//
// Absorbed: queries are brought to the latents, [k_up^T q_nope, q_rope], and attend over the cache as if it were one head's
// keys, whose values are their first L numbers; v_up makes results of the sums. Each latent is read once for all heads.
// Expanded: keys and values of a head are made of latents, a chunk of tokens at a time, and serve all rows of a sequence.
// That takes fewer products for each pair of tokens, and more for each token of a context: prompts are expanded.
#pragma once

#include "cpu/attention/batch.h"
#include "cpu/calls.h"
#include "entries.h"
#include "products.h"

namespace graphllm {
namespace {

constexpr i64 kMostExpanded = 2048;  // query rows for which keys and values are made once
constexpr i64 kLeastExpanded = 256;  // but no fewer, when more items would keep all threads busy
constexpr i64 kMinProducts = 256 << 10;  // below which a second thread is not worth waking
constexpr i64 kPackedTokens = 16;    // as many tokens' keys cost what it costs to lay out the matrices for them

// Matrices of all heads: [H, rows, L].
template <typename T>
struct Matrices {
  const T* at;
  i64 head, row;
};

template <typename T, typename C>
struct LatentArgs {
  const T *q_nope, *q_rope, *latent, *k_rope;
  Matrices<T> k_up, v_up;
  C* cache;
  const std::int32_t *table, *starts, *lengths;
  T* out;
  i64 tokens, S, H, N, R, L, V, P;
  i64 nope_token, nope_head, rope_token, rope_head, latent_token, k_rope_token, cache_block, cache_slot, table_stride;
  float scale;
  const i64* ancestors;
  bool invariant;

  i64 queries(i64 s) const { return starts[s + 1] - starts[s]; }
  // The latents of the cache as keys of L + R numbers.
  Layout layout() const { return {L + R, L, P, cache_block, 0, 0, cache_slot}; }
  const T* nope(i64 t, i64 h) const { return q_nope + t * nope_token + h * nope_head; }
  const T* rope(i64 t, i64 h) const { return q_rope + t * rope_token + h * rope_head; }
};

// Rows of one head of one sequence, over keys and values that are made of latents.
template <typename T, typename C>
class Expanded {
  static constexpr bool kPlain = std::is_same_v<T, C>;
  using Cell = typename Arithmetic<T>::ManyRows::Cell;
  using Number = std::conditional_t<kPlain, T, Cell>;
  using Math = typename Arithmetic<Number>::ManyRows;

 public:
  // cached: of the cache, as `LatentArgs::layout` has it.
  Expanded(const LatentArgs<T, C>& a, const Args<T, C>& cached, i64 most_rows)
      : a_(a), cached_(cached), depth_(Math::query_depth(a.L)), width_(a.N + a.R + a.V),
        near_{{a.N + a.R, a.V, 1, 0, a.N + a.R, 0, width_}, nullptr, nullptr, nullptr, nullptr, nullptr, a.starts, a.lengths,
              a.out, a.tokens, a.S, a.H, a.H, a.N + a.R, 0, 0, 0, 0, 0, 0, a.scale, 0, 0, nullptr, 1, 1, a.ancestors},
        worker_(near_, most_rows, 1) {
    static thread_local Scratch cells, rows, numbers;
    const i64 columns = (ceil_div(a.N, kLanes) + ceil_div(a.V, kLanes)) * kLanes;
    matrices_ = cells.get<Cell>(columns * depth_ + kChunk * (std::max(depth_, Math::height(a.L)) + 16));
    latents_ = matrices_ + columns * depth_;
    made_ = rows.get<T>(kChunk * width_ + most_rows * near_.E);
    query_ = made_ + kChunk * width_;
    numbers_ = kPlain ? nullptr : numbers.get<Number>(kChunk * (a.L + a.R));
  }

  void run(const Item& item) {
    if (item.head != head_) pack(item.head);
    for (i64 i = 0; i < item.tokens; i++) {
      T* to = query_ + i * near_.E;
      std::copy_n(a_.nope(item.row + i, item.head), a_.N, to);
      std::copy_n(a_.rope(item.row + i, item.head), a_.R, to + a_.N);
    }
    near_.q = query_ - item.row * near_.q_token;
    worker_.begin(item);
    Item part = item;
    for (part.from = item.from; part.from < item.to; part.from = part.to) {
      part.to = std::min(item.to, part.from + kChunk);
      expand(item.s, part.from, part.to - part.from);
      near_.cache = made_ - (a_.starts[item.s] + part.from) * near_.cache_slot;
      worker_.extend(part);
    }
    worker_.finish(item, worker_.states());
  }

 private:
  // 16 rows of the matrices, and where what is made of them lies in a row.
  struct Columns {
    i64 at, count;
  };
  Columns columns(i64 tile) const {
    const i64 first = tile * kLanes, keys = ceil_div(a_.N, kLanes) * kLanes;
    if (first < keys) return {first, std::min(kLanes, a_.N - first)};
    return {near_.E + first - keys, std::min(kLanes, a_.V - (first - keys))};
  }
  i64 tiles() const { return ceil_div(a_.N, kLanes) + ceil_div(a_.V, kLanes); }

  void pack(i64 head) {
    head_ = head;
    for (i64 tile = 0; tile < tiles(); tile++) {
      const Columns mine = columns(tile);
      const bool of_keys = mine.at < a_.N;
      const Matrices<T>& from = of_keys ? a_.k_up : a_.v_up;
      const T* rows[kLanes];
      for (i64 i = 0; i < kLanes; i++)
        rows[i] = from.at + head * from.head + (mine.at - (of_keys ? 0 : near_.E) + std::min(i, mine.count - 1)) * from.row;
      Math::pack_query(rows, mine.count, a_.L, false, matrices_ + tile * kLanes * depth_);
    }
  }

  // Rows of `count` tokens from position `from`: keys, the rotated part, values.
  void expand(i64 s, i64 from, i64 count) {
    C* places[kChunk];
    Number* rows[kChunk];
    cached_.locate(s, 0, from, count, places);
    Layout at = cached_;
    if constexpr (kPlain) {
      std::copy(places, places + count, rows);
    } else {
      for (i64 i = 0; i < count; i++) read_rows(places[i], at, 0, 1, rows[i] = numbers_ + i * at.E);
      at.P = kChunk, at.cache_slot = at.E;
    }
    for (i64 i = 0; i < count; i++)
      for (i64 r = 0; r < a_.R; r++) store(made_ + i * width_ + a_.N + r, to_float(rows[i][a_.L + r]));
    at.E = a_.L;
    const auto keys = Math::keys(at, rows, count, latents_);
    for (i64 tile = 0, together; tile < tiles(); tile += together) {
      together = std::min(i64(2), tiles() - tile);
      alignas(64) Vec found[2 * kChunk];
      Math::scores(keys, matrices_ + tile * kLanes * depth_, a_.L, ceil_div(count, Math::kRound) * Math::kRound, found,
                   together, kRegs);
      for (i64 side = 0; side < together; side++) {
        const Columns mine = columns(tile + side);
        for (i64 i = 0; i < count; i++) store_some(made_ + i * width_ + mine.at, found[side * kChunk + i], mine.count);
      }
    }
  }

  const LatentArgs<T, C>& a_;
  const Args<T, C>& cached_;
  const i64 depth_, width_;
  Args<T, T> near_;
  Worker<T, T> worker_;
  i64 head_ = -1;
  Cell *matrices_, *latents_;
  T *made_, *query_;
  Number* numbers_;
};

// A batch in both ways, each with its own sequences.
template <typename T, typename C>
class LatentBatch {
 public:
  explicit LatentBatch(const LatentArgs<T, C>& a) : a_(a), cached_(arguments()), batch_(cached_, least_threads()) {
    i64 most = 0;
    for (i64 s = 0; s < a.S; s++) most = std::max(most, expands(s) ? a.queries(s) : 0);
    for (rows_ = std::min(kMostExpanded, most); most > 0; rows_ = ceil_div(rows_, 2)) {
      blocks_ = 0;
      for (i64 s = 0; s < a.S; s++) blocks_ += expands(s) ? ceil_div(a.queries(s), rows_) : 0;
      if (blocks_ * a.H >= 2 * threads() || rows_ <= kLeastExpanded) break;
    }
  }

  int threads() const { return batch_.threads(); }

  // Called by every thread of the team.
  void run() {
    write(share(a_.starts[a_.S]));
    absorb();
#pragma omp barrier
    batch_.run();
    if (blocks_ > 0) expand();
#pragma omp barrier
    finish();
  }

 private:
  // Which way takes fewer products for a sequence, and how many those are.
  bool expands(i64 s) const { return !a_.invariant && a_.queries(s) > 1 && expanded(s) < absorbed(s); }
  i64 each() const { return a_.L * (a_.N + a_.V); }  // of keys and values of a token, or of its query and result
  i64 pairs(i64 s) const { return a_.queries(s) * (2 * a_.lengths[s] - a_.queries(s) + 1) / 2; }
  i64 expanded(i64 s) const { return (a_.lengths[s] + kPackedTokens) * each() + pairs(s) * (a_.N + a_.R + a_.V); }
  i64 absorbed(i64 s) const { return a_.queries(s) * each() + pairs(s) * (2 * a_.L + a_.R); }

  // The absorbed sequences, in rows of their own; the others have none there.
  Args<T, C> arguments() {
    static thread_local Scratch tables, trees, rows;
    std::int32_t* starts = tables.get<std::int32_t>(a_.S + 1 + a_.tokens);
    i64* ancestors = a_.ancestors ? trees.get<i64>(a_.tokens) : nullptr;
    row_ = starts + a_.S + 1;
    starts[0] = 0;
    for (i64 s = 0; s < a_.S; s++) {
      for (i64 t = a_.starts[s]; !expands(s) && t < a_.starts[s + 1]; t++) {
        if (ancestors) ancestors[count_] = a_.ancestors[t];
        row_[count_++] = std::int32_t(t);
      }
      starts[s + 1] = std::int32_t(count_);
    }
    queries_ = rows.get<T>(count_ * a_.H * (width() + a_.L));
    sums_ = queries_ + count_ * a_.H * width();
    return {a_.layout(), queries_, nullptr, nullptr, a_.cache, a_.table, starts, a_.lengths, sums_, count_, a_.S, a_.H, 1,
            a_.H * width(), width(), 0, 0, 0, 0, a_.table_stride, a_.scale, 0, 0, nullptr, 1, 1, ancestors, 0, a_.invariant};
  }
  i64 width() const { return a_.L + a_.R; }
  i64 least_threads() const {
    i64 work = 0;
    for (i64 s = 0; s < a_.S; s++)
      if (a_.queries(s) > 0) work += std::min(expanded(s), absorbed(s)) * a_.H;
    return std::max(i64(1), work / kMinProducts);
  }

  void write(Range rows) const {
    if (!a_.latent) return;  // the cache holds them already
    static thread_local Scratch scratch;
    T* row = scratch.get<T>(width());
    for (i64 s = 0; s < a_.S; s++)
      for (i64 t = std::max(rows.from, i64(a_.starts[s])); t < std::min(rows.to, i64(a_.starts[s + 1])); t++) {
        const i64 position = a_.lengths[s] - (a_.starts[s + 1] - t);
        C* block = a_.cache + a_.table[s * a_.table_stride + position / a_.P] * a_.cache_block;
        std::copy_n(a_.latent + t * a_.latent_token, a_.L, row);
        std::copy_n(a_.k_rope + t * a_.k_rope_token, a_.R, row + a_.L);
        write_row(row, cached_, position % a_.P, 1, block);
      }
  }

  // work(head, first, end) for parts of all heads' [0, size), which begin at multiples of `unit`; as many as threads.
  template <typename Work>
  void each_part(i64 size, i64 unit, const Work& work) const {
    const i64 parts = ceil_div(omp_get_num_threads(), a_.H), some = ceil_div(ceil_div(size, parts), unit) * unit;
    const Range mine = share(a_.H * parts);
    for (i64 i = mine.from; i < mine.to; i++) {
      const i64 first = i % parts * some, end = std::min(size, first + some);
      if (first < end) work(i / parts, first, end);
    }
  }

  void absorb() const {
    static thread_local Scratch scratch;
    const bool few = Products<T>::few({nullptr, 0, a_.N, a_.L}, count_, a_.invariant);
    each_part(a_.L, 32, [&](i64 h, i64 first, i64 end) {
      const T** from = scratch.get<const T*>(2 * count_);
      T** to = const_cast<T**>(from + count_);
      for (i64 m = 0; m < count_; m++) {
        from[m] = a_.nope(row_[m], h), to[m] = queries_ + (m * a_.H + h) * width() + first;
        if (first == 0) std::copy_n(a_.rope(row_[m], h), a_.R, to[m] + a_.L);
      }
      const Matrix<T> matrix{a_.k_up.at + h * a_.k_up.head + first, a_.k_up.row, a_.N, end - first};
      products().combine(matrix, from, count_, to, few);
    });
  }

  void finish() const {
    static thread_local Scratch scratch;
    const bool few = Products<T>::few({nullptr, 0, a_.V, a_.L}, count_, a_.invariant);
    each_part(a_.V, kPiece, [&](i64 h, i64 first, i64 end) {
      const T** from = scratch.get<const T*>(2 * count_);
      T** to = const_cast<T**>(from + count_);
      for (i64 m = 0; m < count_; m++)
        from[m] = sums_ + (m * a_.H + h) * a_.L, to[m] = a_.out + (row_[m] * a_.H + h) * a_.V + first;
      const Matrix<T> matrix{a_.v_up.at + h * a_.v_up.head + first * a_.v_up.row, a_.v_up.row, end - first, a_.L};
      products().dot(matrix, from, count_, to, few);
    });
  }
  static Products<T>& products() {
    static thread_local Products<T> own;
    return own;
  }

  // All blocks of rows for one head after the other; the last block of a sequence, which sees most context, comes first.
  void expand() const {
    Expanded<T, C> worker(a_, cached_, rows_);
#pragma omp for schedule(dynamic, 1) nowait
    for (i64 n = 0; n < a_.H * blocks_; n++) {
      i64 s = 0, block = n % blocks_;
      for (;; s++) {
        const i64 of = expands(s) ? ceil_div(a_.queries(s), rows_) : 0;
        if (block < of) {
          block = of - 1 - block;
          break;
        }
        block -= of;
      }
      const i64 first = block * rows_, count = std::min(rows_, a_.queries(s) - first), row = a_.starts[s] + first;
      const i64 position = a_.lengths[s] - a_.queries(s) + first;
      const bool tree = a_.ancestors && a_.ancestors[row] >= 0;
      worker.run({s, n / blocks_, 1, row, count, position, 0, tree ? i64(a_.lengths[s]) : position + count});
    }
  }

  const LatentArgs<T, C>& a_;
  i64 count_ = 0, rows_, blocks_ = 0;  // absorbed rows; query rows of an expanded block, and such blocks
  std::int32_t* row_;              // of the absorbed rows, which of the step's each is
  T *queries_, *sums_;             // of them [H, L + R] and [H, L]
  const Args<T, C> cached_;
  Batch<T, C> batch_;
};

template <typename T, typename C>
void attend_latents(const LatentArgs<T, C>& a) {
  const i64 used = a.starts[a.S];
  std::memset(a.out + used * a.H * a.V, 0, (a.tokens - used) * a.H * a.V * sizeof(T));
  LatentBatch<T, C> batch(a);
#pragma omp parallel num_threads(batch.threads())
  {
    const TilesOf<T> configured;
    batch.run();
  }
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_LATENT_ATTENTION(name, T, C)                                                                          \
  extern "C" void name(const void* q_nope, const void* q_rope, const void* latent, const void* k_rope,                \
                       const void* k_up, const void* v_up, void* cache, const void* table, const void* starts,        \
                       const void* lengths, void* out, const void* ancestors, std::int64_t tokens, std::int64_t S,     \
                       std::int64_t H, std::int64_t N, std::int64_t R, std::int64_t L, std::int64_t V, std::int64_t P, \
                       std::int64_t nope_token, std::int64_t nope_head, std::int64_t rope_token,                       \
                       std::int64_t rope_head, std::int64_t latent_token, std::int64_t k_rope_token,                   \
                       std::int64_t k_up_head, std::int64_t k_up_row, std::int64_t v_up_head, std::int64_t v_up_row,   \
                       std::int64_t cache_block, std::int64_t cache_slot, std::int64_t table_stride, double scale,     \
                       std::int64_t invariant) {                                                                       \
    using Number = graphllm::T;                                                                                        \
    using Entries = graphllm::C;                                                                                       \
    using Ids = const std::int32_t*;                                                                                   \
    const auto numbers = [](const void* of) { return static_cast<const Number*>(of); };                                \
    graphllm::attend_latents<Number, Entries>(                                                                         \
        {numbers(q_nope), numbers(q_rope), numbers(latent), numbers(k_rope), {numbers(k_up), k_up_head, k_up_row},     \
         {numbers(v_up), v_up_head, v_up_row}, static_cast<Entries*>(cache), static_cast<Ids>(table),                  \
         static_cast<Ids>(starts), static_cast<Ids>(lengths), static_cast<Number*>(out), tokens, S, H, N, R, L, V, P,  \
         nope_token, nope_head, rope_token, rope_head, latent_token, k_rope_token, cache_block, cache_slot,            \
         table_stride, float(scale), static_cast<const std::int64_t*>(ancestors), invariant != 0});                    \
  }                                                                                                                    \
  GRAPHLLM_KERNEL(name)
