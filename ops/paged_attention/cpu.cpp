// paged_attention: write the step's keys and values into the paged cache, then attend, for one ragged batch.
//
// One work item is a block of query tokens of one sequence for one key/value head: its rows are (token, query head of the
// group), 16 of them side by side as the lanes of a vector. Scores are computed transposed, [tokens][16 lanes], so that
// the running maximum and sum of the online softmax are plain vector operations and keys are used as they lie in the
// cache; values are transposed once a chunk and item (tiles.h). Items of few rows, as in decode, go another way
// (few_rows.h).
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>

#include "cpu_amx.h"
#include "cpu_threads.h"
#include "few_rows.h"
#include "tiles.h"

namespace graphllm {
namespace {

constexpr i64 kMaxRows = 448;  // query rows an item: enough to make the transposition of values cheap
constexpr i64 kMinRows = 64;   // but no fewer, when smaller items would keep all threads busy
constexpr i64 kMinWork = 16 << 10;  // query-key pairs times heads below which a second thread is not worth waking
constexpr i64 kMinBytes = 64 << 10;  // the same in decode, in bytes of the cache
constexpr i64 kAheadBytes = 8 << 10;  // in decode: how far ahead the cache is asked for
constexpr float kLowest = -1e30f;   // "no score yet": finite, so that differences from it are no NaN
constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504088896341f;

// softcap * tanh(x / softcap) elementwise. Near zero a series, because 1 - exp loses the small result's digits.
inline Vec cap_scores(Vec x, float softcap) {
  const Vec y = x / softcap, a = larger(y, -y);
  const Vec t = exp2_vec<true>(a * (-2 * kLog2e));
  const Vec far = (1.0f - t) / (1.0f + t), s = y * y;
  const Vec near = a * (1.0f + s * (-1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315 + s * (62.0f / 2835)))));
  const Vec magnitude = a < 0.3f ? near : far;
  return softcap * (y < 0.0f ? -magnitude : magnitude);
}

// The arithmetic of tiles.h and of few_rows.h that serves a dtype.
template <typename T>
struct Arithmetic {
  using ManyRows = Floats<T>;
  using FewRows = FewFloats<T>;
};
#ifdef GRAPHLLM_AVX512
template <>
struct Arithmetic<bf16> {
  using ManyRows = Pairs;
  using FewRows = FewPairs;
};
#endif

// Where 16 rows stand.
struct Rows {
  Ints position;  // of each lane's query
  i64 first, last;  // the lowest and the highest of them
  int regs;         // registers of lanes that hold rows
};

// One item: `tokens` query tokens of sequence s from its row `row`, key/value heads from `head`, context [from, to).
struct Item {
  i64 s, head, heads, row, tokens, position, from, to;
};

// Attends for one item after the other. What an item leaves are states, head after head, of tiles of 16 rows or, where rows
// are few, of single rows: the largest score so far, the sum of 2^(score - top), scores in units of log2, and the weighted
// sums of values. States of parts of a context merge element by element.
template <typename T>
class Worker {
  using Math = typename Arithmetic<T>::ManyRows;
  using Cell = typename Math::Cell;
  using Few = typename Arithmetic<T>::FewRows;

 public:
  Worker(const Args<T>& a, i64 most_rows, i64 heads) : a_(a), group_(a.H / a.K), height_(Math::height(a.E)) {
    const i64 tiles = ceil_div(most_rows, kLanes), depth = Math::query_depth(a.E);
    static thread_local Scratch cells, states, rows;
    const i64 packed = std::max(tiles * kLanes * depth, heads * few_query(most_rows));
    query_ = cells.get<Cell>(packed + kChunk * (std::max(depth, height_) + height_ + 16) +
                             kLanes * std::max(2 * kChunk, heads * kFewRows));
    keys_ = query_ + packed;
    values_ = keys_ + kChunk * std::max(depth, height_);
    weights_ = values_ + kChunk * (height_ + 16);
    states_ = states.get<Vec>(room(a, most_rows, heads));
    rows_ = rows.get<Rows>(tiles);
  }

  // The most that the states of so many rows and heads take.
  static i64 room(const Args<T>& a, i64 rows, i64 heads) {
    const i64 few = few_padded(std::min(rows, kFewRows)) * few_state_size(a.E);
    return heads * std::max(ceil_div(rows, kLanes) * (2 + Math::height(a.E)), few);
  }

  // Attend; afterwards states() are those of the item. What `next` reads first, if given, is asked for on the way.
  void run(const Item& item, const Item* next) {
    if (few(item)) return run_few(item, next);
    Item one = item;
    one.heads = 1;
    for (i64 head = 0; head < item.heads; head++, one.head++) run_tiles(one, states_ + head * head_size(item));
  }

  Vec* states() { return states_; }
  // Vectors of a state and of all states of a head.
  i64 unit_size(const Item& item) const { return few(item) ? few_state_size(a_.E) : 2 + height_; }
  i64 head_size(const Item& item) const {
    const i64 rows = item.tokens * group_;
    return (few(item) ? few_padded(rows) : ceil_div(rows, kLanes)) * unit_size(item);
  }

  // Write the rows of an item whose states are given.
  void finish(const Item& item, const Vec* states) const {
    Item one = item;
    for (i64 head = 0; head < item.heads; head++, one.head++) {
      const Vec* state = states + head * head_size(item);
      if (few(item)) {
        for (i64 r = 0; r < item.tokens * group_; r++, state += unit_size(item)) Few::store_row(state, a_.E, result(one, r));
        continue;
      }
      for (i64 r = 0; r < item.tokens * group_; r += kLanes, state += unit_size(item))
        store_tile(one, r / kLanes, state[1], state + 2);
    }
  }

 private:
  void run_tiles(const Item& item, Vec* states) {
    const i64 count = item.tokens * group_, tiles = ceil_div(count, kLanes), depth = Math::query_depth(a_.E);
    for (i64 tile = 0; tile < tiles; tile++) {
      const T* from[kLanes];
      Rows& rows = rows_[tile];
      const i64 used = std::min(kLanes, count - tile * kLanes);
      for (i64 i = 0; i < kLanes; i++) {
        const i64 r = tile * kLanes + std::min(i, used - 1);
        from[i] = query(item, r);
        rows.position[i] = std::int32_t(item.position + r / group_);
      }
      rows.first = rows.position[0], rows.last = rows.position[kLanes - 1];
      rows.regs = int(ceil_div(used, kRegLanes));
      Math::pack_query(from, used, a_.E, a_.scale < 0, query_ + tile * kLanes * depth);
      clear(states + tile * (2 + height_), 2 + height_);
    }
    for (i64 j = item.from; j < item.to; j += kChunk) {
      const i64 held = std::min(kChunk, item.to - j);
      T* places[kChunk];
      if (tiles <= 2 && j + kChunk < item.to) prefetch(item, j + kChunk, places);
      a_.locate(item.s, item.head, j, held, places);
      const auto keys = Math::keys(a_, places, held, keys_);
      Math::values(a_, places, held, values_);
      for (i64 tile = 0, together; tile < tiles; tile += together) {
        together = std::min(i64(2), tiles - tile);
        const i64 seen = std::min(held, rows_[tile + together - 1].last + 1 - j);
        if (seen <= 0 || (a_.window > 0 && j + held <= rows_[tile].first - a_.window + 1)) continue;
        step(keys, query_ + tile * kLanes * depth, j, ceil_div(seen, Math::kRound) * Math::kRound, rows_ + tile, together,
             states + tile * (2 + height_));
      }
    }
  }

  static constexpr i64 kFewRows = 16;

  // Whether an item takes the way of few rows, for which pieces of pages and rows must be whole.
  bool few(const Item& item) const {
    return item.tokens * group_ <= kFewRows && a_.P % kPiece == 0 && a_.E % Few::kColumns == 0;
  }
  i64 few_query(i64 rows) const { return few_padded(std::min(rows, kFewRows)) * a_.E; }

  const T* query(const Item& item, i64 r) const {
    return a_.q + (item.row + r / group_) * a_.q_token + (item.head * group_ + r % group_) * a_.q_head;
  }
  T* result(const Item& item, i64 r) const {
    return a_.out + ((item.row + r / group_) * a_.H + item.head * group_ + r % group_) * a_.E;
  }
  static void clear(Vec* state, i64 size) {
    std::fill(state, state + size, Vec{});
    state[0] = vec(kLowest);
  }

  void run_few(const Item& item, const Item* next) {
    const i64 count = item.tokens * group_, size = few_state_size(a_.E), heads = item.heads;
    const i64 padded = few_padded(count);
    Item one = item;
    for (i64 head = 0; head < heads; head++, one.head++)
      for (i64 r = 0; r < padded; r++) {
        Cell* to = query_ + (head * padded + r) * a_.E;
        if (r >= count) {
          std::fill(to, to + a_.E, Cell{});
        } else {
          Few::put_query(query(one, r), a_.E, to);
        }
        clear(states_ + (head * padded + r) * size, size);
      }
    Span spans[kFewRows];
    for (i64 r = 0; r < padded; r++) {
      spans[r].newest = std::int32_t(item.position + std::min(r, count - 1) / group_);
      spans[r].oldest = a_.window > 0 ? spans[r].newest - std::int32_t(a_.window) : -1;
    }
    const Steps steps = steps_of(std::min(kFewBlock, count));
    const i64 ahead = std::max(i64(1), kAheadBytes / (kPiece * a_.E * i64(sizeof(T))));
    static thread_local Scratch lists;
    const T** order = lists.get<const T*>(4 * heads * (kChunk / kPiece) + ahead);
    i64 listed = list(item, item.from, order);
    for (i64 j = item.from; j < item.to; j += kChunk) {
      const i64 end = std::min(item.to, j + kChunk);
      const T** later = order + listed;
      const i64 upcoming = end < item.to ? list(item, end, later) : next ? list(*next, next->from, later) : 0;
      std::fill(later + upcoming, later + upcoming + ahead, later[upcoming - 1]);
      const T** at = order;
      for (i64 from = j; from < end; from += kPiece, at += 2 * heads) {
        const bool whole = from + kPiece <= spans[0].newest + 1 && spans[padded - 1].oldest < from;
        const i64 used = std::min(kPiece, end - from);
        for (i64 r = 0; r < heads * padded; r += kFewBlock)
          steps.weigh(*this, at[r / padded], at[r / padded + ahead], query_ + r * a_.E, from,
                      whole ? nullptr : spans + r % padded, weights_ + r * kPiece, states_ + r * size);
        for (i64 r = 0; r < heads * padded; r += kFewBlock)
          steps.accumulate(at[heads + r / padded], at[heads + r / padded + ahead], a_.cache_slot, used,
                           weights_ + r * kPiece, a_.E, states_ + r * size);
      }
      std::copy(later, later + upcoming, order);
      listed = upcoming;
    }
  }

  // The pieces of a chunk in the order of their use, which should be that of their addresses: page after page, the keys of
  // all heads, then the values. Returns their count.
  i64 list(const Item& item, i64 from, const T** to) const {
    const std::int32_t* table = a_.table + item.s * a_.table_stride;
    const T** const first = to;
    for (i64 at = from; at < std::min(item.to, from + kChunk); at += kPiece, to += item.heads) {
      const T* keys = a_.cache + table[at / a_.P] * a_.cache_page + item.head * a_.cache_head + at % a_.P * a_.cache_slot;
      for (i64 head = 0; head < item.heads; head++, to++, keys += a_.cache_head)
        to[0] = keys, to[item.heads] = keys + a_.cache_kind;
    }
    return to - first;
  }

  // What is done with a piece, for up to eight rows of one head.
  struct Steps {
    void (*weigh)(const Worker&, const T* keys, const T* ask, const Cell* query, i64 from, const Span*, Cell* weights,
                  Vec* states);
    void (*accumulate)(const T* values, const T* ask, i64 slot, i64 count, const Cell* weights, i64 E, Vec* states);
  };
  template <int R>
  static Steps steps() {
    return {weigh<R>, Few::template accumulate<R>};
  }
  static Steps steps_of(i64 rows) {
    return rows == 1 ? steps<1>() : rows == 2 ? steps<2>() : rows <= 4 ? steps<4>() : rows == 7 ? steps<7>() : steps<8>();
  }
  template <int R>
  static void weigh(const Worker& w, const T* keys, const T* ask, const Cell* query, i64 from, const Span* spans,
                    Cell* weights, Vec* states) {
    const Args<T>& a = w.a_;
    Vec scores[R];
    Few::template scores<R>(keys, ask, a.cache_slot, query, a.E, scores);
    const auto soften = [&](auto adjust) {
      soften_rows<R, Math::kPrecise>(from, spans, w.log2_scale(), adjust, scores, weights, a.E, states);
    };
    if (a.softcap > 0) {
      soften([&](Vec x) { return cap_scores(x * std::fabs(a.scale), a.softcap); });
    } else if (a.scale < 0) {
      soften([](Vec x) { return -x; });
    } else {
      soften([](Vec x) { return x; });
    }
  }

  // What scores, after the soft cap if there is one, are multiplied by.
  float log2_scale() const { return a_.softcap > 0 ? kLog2e : std::fabs(a_.scale) * kLog2e; }

  // A tile is given by its weight sums and weighted sums of values.
  void store_tile(const Item& item, i64 tile, Vec sum, const Vec* sums) const {
    const Vec factor = 1.0f / sum;
    const i64 count = std::min(kLanes, item.tokens * group_ - tile * kLanes);
    T* to[kLanes];
    for (i64 i = 0; i < count; i++) to[i] = result(item, tile * kLanes + i);
    for (i64 e = 0; e < a_.E; e += 16) {
#ifdef GRAPHLLM_AVX512
      __m512i r[16];
      for (i64 i = 0; i < 16; i++) r[i] = e + i < height_ ? (__m512i)(sums[e + i] * factor) : __m512i{};
      transpose16(r);
      for (i64 i = 0; i < count; i++) store16(to[i] + e, _mm512_castsi512_ps(r[i]), first16(a_.E - e));
#else
      for (i64 c = e; c < std::min(e + 16, a_.E); c++) {
        const Vec x = sums[c] * factor;
        for (i64 i = 0; i < count; i++) store(to[i] + c, x[i]);
      }
#endif
    }
  }

  // Ask for a chunk's pages: they lie anywhere, so the hardware does not see them coming. Always inlined: gcc takes a
  // function that only prefetches for one without effect and drops the call.
  __attribute__((always_inline)) void prefetch(const Item& item, i64 from, T** places) const {
    const i64 count = std::min(kChunk, item.to - from), bytes = a_.E * i64(sizeof(T));
    a_.locate(item.s, item.head, from, count, places);
    for (i64 j = 0; j < count; j++)
      for (i64 at = 0; at < bytes; at += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(places[j]) + at);
        __builtin_prefetch(reinterpret_cast<const char*>(places[j] + a_.cache_kind) + at);
      }
  }

  // One chunk of `count` tokens from position j for one or two tiles of rows.
  void step(const typename Math::Keys& keys, const Cell* query, i64 j, i64 count, const Rows* rows, i64 tiles, Vec* states) {
    alignas(64) Vec scores[2 * kChunk];
    const int regs = rows[0].regs;  // only the last tile of an item has less than all
    Math::scores(keys, query, a_.E, count, scores, tiles, regs);
    for (i64 tile = 0; tile < tiles; tile++)
      soften(j, count, rows[tile], scores + tile * kChunk, weights_ + tile * kChunk * kLanes, states + tile * (2 + height_));
    Math::accumulate(values_, weights_, a_.E, count, states + 2, tiles, regs);
  }

  // Turn a tile's scores into weights; fade the sums where a score is the largest so far.
  void soften(i64 j, i64 count, const Rows& rows, Vec* scores, Cell* weights, Vec* state) {
    const float scale = log2_scale();
    if (a_.softcap > 0) {
      const float before = std::fabs(a_.scale);
      for (i64 t = 0; t < count; t++) scores[t] = cap_scores(scores[t] * before, a_.softcap);
    }
    for (int reg = 0; reg < rows.regs; reg++) soften_reg(j, count, rows, scale, reg, scores, weights, state);
  }

  void soften_reg(i64 j, i64 count, const Rows& rows, float scale, int reg, Vec* scores, Cell* weights, Vec* state) {
    const auto score = [&](i64 t) { return reg_of<Reg>(scores[t], reg); };
    const bool whole = j + count - 1 <= rows.first && (a_.window == 0 || j > rows.last - a_.window);
    if (!whole) {
      const Reg hidden = Reg{} + kHidden;
      const RegInts newest = reg_of<RegInts>(rows.position, reg);
      const RegInts oldest = a_.window > 0 ? newest - std::int32_t(a_.window) : RegInts{} - 1;
      const i64 seen = a_.window > 0 ? 0 : std::max(i64(0), rows.first + 1 - j);  // by every row
      for (i64 t = seen; t < count; t++) {
        const RegInts at = RegInts{} + std::int32_t(j + t);
        put_reg(scores[t], reg, ((at <= newest) & (at > oldest)) ? score(t) : hidden);
      }
    }
    Reg most[4] = {score(0), score(1), score(2), score(3)};
    for (i64 t = 4; t < count; t += 4)
#pragma GCC unroll 4
      for (i64 i = 0; i < 4; i++) most[i] = larger(most[i], score(t + i));
    const Reg found = larger(larger(most[0], most[1]), larger(most[2], most[3])) * scale;
    Reg top = reg_of<Reg>(state[0], reg);
    if (bits(found > top + Math::kSlack)) {
      const Reg before = top;
      top = larger(top, found);
      const Reg fade = exp2_vec<Math::kPrecise>(before - top);
      for (i64 i = 1; i < 2 + height_; i++) put_reg(state[i], reg, reg_of<Reg>(state[i], reg) * fade);
      put_reg(state[0], reg, top);
    }
    Reg sum0{}, sum1{};
    for (i64 t = 0; t < count; t += 2) {
      const Reg p0 = exp2_vec<Math::kPrecise>(score(t) * scale - top);
      const Reg p1 = exp2_vec<Math::kPrecise>(score(t + 1) * scale - top);
      Math::put_weights(weights, t, reg, p0, p1);
      sum0 += p0, sum1 += p1;
    }
    put_reg(state[1], reg, reg_of<Reg>(state[1], reg) + (sum0 + sum1));
  }

  const Args<T>& a_;
  i64 group_, height_;
  Cell *query_, *keys_, *values_, *weights_;
  Vec* states_;
  Rows* rows_;
};

// The items of a batch. In pure decode every thread takes the same share of the tokens of all contexts, one stretch of them,
// so that it knows what comes next; where a share ends inside of an item the parts are merged at the end. Otherwise whole
// items are handed out as threads get free.
template <typename T>
class Batch {
 public:
  explicit Batch(const Args<T>& a) : a_(a), group_(a.H / a.K) {
    i64 work = 0, read = 0, rows = kMaxRows;
    for (i64 s = 0; s < a.S; s++) {
      const i64 n = queries(s);
      most_ = std::max(most_, n);
      work += n * a.lengths[s] * a.H;
      if (n > 0) read += (a.lengths[s] - first_seen(a.lengths[s] - n)) * a.K * 2 * a.E * i64(sizeof(T));
    }
    const i64 wanted = decode() ? read / kMinBytes : work / kMinWork;
    threads_ = std::min(i64(omp_get_max_threads()), std::max(i64(1), wanted));
    static thread_local Scratch first, parts;
    first_ = first.get<i64>(a.S + 1);
    first_[0] = 0;
    for (; decode() || rows >= kMinRows; rows /= 2) {
      block_ = decode() ? 1 : std::min(std::max(i64(1), rows / group_), most_);
      for (i64 s = 0; s < a.S; s++) first_[s + 1] = first_[s] + (decode() ? units(s) : a.K * ceil_div(queries(s), block_));
      if (decode() || first_[a.S] >= 4 * threads_) break;
    }
    part_size_ = Worker<T>::room(a, block_ * group_, heads());
    if (decode() && threads_ > 1) parts_ = parts.get<Vec>(2 * threads_ * part_size_);
  }

  int threads() const { return int(threads_); }

  // Called by every thread of the team.
  void run() {
    if (!decode()) {
      write(share(a_.starts[a_.S]));
#pragma omp barrier
    }
    Worker<T> worker(a_, block_ * group_, heads());
#ifdef GRAPHLLM_AMX
    std::optional<Tiles> configured;
    if (std::is_same_v<T, bf16> && amx_granted()) configured.emplace();
#endif
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
  bool decode() const { return most_ <= 1; }
  i64 heads() const { return decode() ? a_.K : 1; }  // of an item: all of them are in a page

  // Where the context of a token at `position` begins: at a multiple of 16, so that 16 tokens never straddle two pages of
  // such a size.
  i64 first_seen(i64 position) const {
    return a_.window > 0 ? std::max(i64(0), position - a_.window + 1) / 16 * 16 : 0;
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
    item.from = first_seen(item.position), item.to = item.position + item.tokens;
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

  void run_share(Worker<T>& worker) {
    const i64 threads = omp_get_num_threads(), me = omp_get_thread_num(), end = begin(me + 1, threads);
    for (i64 unit = begin(me, threads); unit < end;) {
      const Part now = part(unit, end);
      unit = now.next;
      const Item& item = now.item;
      if (now.ends)
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
  void merge(const Worker<T>& worker, i64 me, i64 threads) const {
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

  const Args<T>& a_;
  i64 group_, most_ = 0, threads_, block_ = 1, part_size_;
  i64* first_;
  Vec* parts_ = nullptr;
};

template <typename T>
void attend(const Args<T>& a) {
  for (i64 t = a.starts[a.S]; t < a.T_; t++) std::memset(a.out + t * a.H * a.E, 0, a.H * a.E * sizeof(T));
  Batch<T> batch(a);
#pragma omp parallel num_threads(batch.threads())
  batch.run();
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_PAGED_ATTENTION(name, T)                                                                            \
  extern "C" void name(const void* q, const void* k, const void* v, void* cache, const void* table,                 \
                       const void* starts, const void* lengths, void* out, std::int64_t tokens, std::int64_t S,      \
                       std::int64_t H, std::int64_t K, std::int64_t E, std::int64_t P, std::int64_t q_token,         \
                       std::int64_t q_head, std::int64_t k_token, std::int64_t k_head, std::int64_t v_token,         \
                       std::int64_t v_head, std::int64_t cache_page, std::int64_t cache_kind,                        \
                       std::int64_t cache_head, std::int64_t cache_slot, std::int64_t table_stride, double scale,    \
                       std::int64_t window, double softcap) {                                                        \
    using graphllm::T;                                                                                               \
    graphllm::attend<T>({static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v),               \
                         static_cast<T*>(cache), static_cast<const std::int32_t*>(table),                            \
                         static_cast<const std::int32_t*>(starts), static_cast<const std::int32_t*>(lengths),        \
                         static_cast<T*>(out), tokens, S, H, K, E, P, q_token, q_head, k_token, k_head, v_token,     \
                         v_head, cache_page, cache_kind, cache_head, cache_slot, table_stride, float(scale), window, \
                         float(softcap)});                                                                           \
  }

GRAPHLLM_PAGED_ATTENTION(graphllm_paged_attention_f32, f32)
GRAPHLLM_PAGED_ATTENTION(graphllm_paged_attention_bf16, bf16)
