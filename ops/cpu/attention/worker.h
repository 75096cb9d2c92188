// A thread's attention for one item after the other: a block of query tokens of a sequence and some of its key/value heads.
#pragma once

#include <cmath>
#include <limits>

#include "cpu/threads.h"
#include "cpu/attention/few_rows.h"
#include "cpu/attention/tiles.h"

namespace graphllm {
namespace {

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
  Ints position;    // of each lane's query
  Ints newest;      // the last position that it sees
  i64 first, last;  // the lowest and the highest position
  i64 least, most;  // the same of what they see
  int regs;         // registers of lanes that hold rows
  i64 begin;        // of nodes of a tree, the first token of their step; of others the end of everything
  i64 bits[kLanes];  // of nodes, which tokens from there on they see

  // Which lanes of a register see a token from `begin` on.
  RegInts open(i64 token, int reg) const {
    RegInts found{};
    for (i64 i = 0; i < kRegLanes; i++) found[i] = -std::int32_t(bits[reg * kRegLanes + i] >> (token - begin) & 1);
    return found;
  }
};

// One item: `tokens` query tokens of sequence s from its row `row`, key/value heads from `head`, context [from, to).
struct Item {
  i64 s, head, heads, row, tokens, position, from, to;
};

// Attends for one item after the other. What an item leaves are states, head after head, of tiles of 16 rows or, where rows
// are few, of single rows: the largest score so far, the sum of 2^(score - top), scores in units of log2, and the weighted
// sums of values. States of parts of a context merge element by element.
template <typename T, typename C>
class Worker {
  static constexpr bool kPlain = std::is_same_v<T, C>, kPrecise = std::is_same_v<T, float>;
  using Cell = typename Arithmetic<T>::ManyRows::Cell;
  using Number = std::conditional_t<kPlain, T, Cell>;  // of what the arithmetic reads
  using Math = typename Arithmetic<Number>::ManyRows;
  using Few = typename Arithmetic<Number>::FewRows;

 public:
  Worker(const Args<T, C>& a, i64 most_rows, i64 heads)
      : a_(a), near_(a), group_(a.H / a.K), height_(Math::height(a.V)) {
    const i64 tiles = ceil_div(most_rows, kLanes), depth = Math::query_depth(a.E);
    static thread_local Scratch cells, states, rows, numbers;
    if constexpr (!kPlain) {
      near_.P = kChunk, near_.cache_slot = a.E, near_.cache_kind = a.cache_kind ? kChunk * a.E : 0;
      numbers_ = numbers.get<Number>(2 * kChunk * a.E);
    }
    const i64 packed = std::max(tiles * kLanes * depth, heads * few_query(most_rows));
    const i64 width = std::max(depth, Math::height(a.E));
    query_ = cells.get<Cell>(packed + kChunk * (width + height_ + 16) + kLanes * std::max(2 * kChunk, heads * kFewRows));
    keys_ = query_ + packed;
    values_ = keys_ + kChunk * width;
    weights_ = values_ + kChunk * (height_ + 16);
    states_ = states.get<Vec>(room(a, most_rows, heads));
    rows_ = rows.get<Rows>(tiles);
  }

  static constexpr i64 kFewRows = 16;

  // The most rows of a head that go the way of few rows: none where pieces of blocks or rows are not whole, and few where
  // keys and values are the same numbers, which tiles gather once for both.
  static i64 most_few(const Args<T, C>& a) {
    const bool whole = a.P % kPiece == 0 && a.E % Few::kColumns == 0 && a.V % Few::kColumns == 0;
    return !whole ? 0 : a.cache_kind ? kFewRows : kFewGroup;
  }

  // The most that the states of these rows and heads take.
  static i64 room(const Args<T, C>& a, i64 rows, i64 heads) {
    const i64 few = few_padded(std::min(rows, kFewRows)) * few_state_size(a.V);
    return heads * std::max(ceil_div(rows, kLanes) * (2 + Math::height(a.V)), few);
  }

  // Begin an item of one head, and go on with tokens [from, to) of its context, which begin at a multiple of a chunk: the
  // same as to run it, for a context that comes in parts.
  void begin(const Item& item) { begin_tiles(item, states_); }
  void extend(const Item& item) { extend_tiles(item, states_); }

  // Attend; afterwards states() are the item's. What `next` reads first, if given, is asked for on the way.
  void run(const Item& item, const Item* next) {
    if (few(item)) return run_few(item, next);
    Item one = item;
    one.heads = 1;
    for (i64 head = 0; head < item.heads; head++, one.head++) {
      Vec* states = states_ + head * head_size(item);
      begin_tiles(one, states);
      extend_tiles(one, states);
    }
  }

  Vec* states() { return states_; }
  // Vectors of a state and of all states of a head.
  i64 unit_size(const Item& item) const { return few(item) ? few_state_size(a_.V) : 2 + height_; }
  i64 head_size(const Item& item) const {
    const i64 rows = item.tokens * group_;
    return (few(item) ? few_padded(rows) : ceil_div(rows, kLanes)) * unit_size(item);
  }

  // Write the rows of an item from its states; sinks are added to them.
  void finish(const Item& item, Vec* states) const {
    Item one = item;
    for (i64 head = 0; head < item.heads; head++, one.head++) {
      Vec* state = states + head * head_size(item);
      if (a_.sinks) add_sinks(one, state);
      if (few(item)) {
        for (i64 r = 0; r < item.tokens * group_; r++, state += unit_size(item)) Few::store_row(state, a_.V, a_.value_scale, result(one, r));
        continue;
      }
      for (i64 r = 0; r < item.tokens * group_; r += kLanes, state += unit_size(item))
        store_tile(one, r / kLanes, state[1], state + 2);
    }
  }

 private:
  // To the sums of weights of one head's rows. Where a sink outweighs all scores by 2^125, nothing is left of them either way.
  void add_sinks(const Item& item, Vec* state) const {
    for (i64 r = 0; r < item.tokens * group_; r++) {
      const float sink = to_float(a_.sinks[item.head * group_ + r % group_]) * kLog2e;
      const i64 lane = few(item) ? 0 : r % kLanes;
      Vec* at = state + (few(item) ? r : r / kLanes) * unit_size(item);
      // As a vector for every row: a loop's remainder would be rounded by other functions than what is before it.
      const Vec above = vec(std::min(sink - at[0][lane], 125.0f)), share = exp2_vec<true>(-larger(above, -above));
      const Vec added = above > 0.0f ? 1.0f / share : share;
      at[1][lane] += added[0];
    }
  }

  bool is_tree(const Item& item) const { return a_.ancestors && a_.ancestors[item.row] >= 0; }
  // Which rows of its step a node sees, of those that lie within its window.
  i64 seen_nodes(const Item& item, i64 row) const {
    i64 found = 0;
    for (i64 other = a_.starts[item.s]; other < a_.starts[item.s + 1]; other++)
      if (a_.sees(row, other, a_.starts[item.s])) found |= i64(1) << (other - a_.starts[item.s]);
    return found;
  }
  // Where an item's first step token stands.
  i64 step_begin(const Item& item) const { return item.position - (item.row - a_.starts[item.s]); }

  void place_nodes(const Item& item, i64 tile, i64 used, Rows& rows) const {
    rows.begin = rows.first = step_begin(item), rows.last = 0, rows.least = rows.begin - 1, rows.most = item.to - 1;
    for (i64 i = 0; i < kLanes; i++) {
      const i64 row = item.row + (tile * kLanes + std::min(i, used - 1)) / group_;
      rows.position[i] = std::int32_t(rows.begin + a_.depth(row, a_.starts[item.s]));
      rows.last = std::max(rows.last, i64(rows.position[i]));
      rows.newest[i] = std::int32_t(item.to - 1);
      rows.bits[i] = seen_nodes(item, row);
    }
  }

  void begin_tiles(const Item& item, Vec* states) {
    const i64 count = item.tokens * group_, depth = Math::query_depth(a_.E);
    for (i64 tile = 0; tile < ceil_div(count, kLanes); tile++) {
      const T* from[kLanes];
      Rows& rows = rows_[tile];
      const i64 used = std::min(kLanes, count - tile * kLanes);
      for (i64 i = 0; i < kLanes; i++) {
        const i64 r = tile * kLanes + std::min(i, used - 1);
        from[i] = query(item, r);
        rows.position[i] = std::int32_t(item.position + r / group_);
        rows.newest[i] = std::int32_t(std::min(rows.position[i] + a_.ahead, item.to - 1));
        rows.bits[i] = -1;
      }
      rows.first = rows.position[0], rows.last = rows.position[kLanes - 1];
      rows.least = rows.newest[0], rows.most = rows.newest[kLanes - 1];
      rows.begin = std::numeric_limits<i64>::max();
      if (is_tree(item)) place_nodes(item, tile, used, rows);
      rows.regs = int(ceil_div(used, kRegLanes));
      Math::pack_query(from, used, a_.E, a_.scale < 0, query_ + tile * kLanes * depth);
      clear(states + tile * (2 + height_), 2 + height_);
    }
  }

  void extend_tiles(const Item& item, Vec* states) {
    const i64 tiles = ceil_div(item.tokens * group_, kLanes), depth = Math::query_depth(a_.E);
    for (i64 j = item.from; j < item.to; j += kChunk) {
      const i64 held = std::min(kChunk, item.to - j);
      C* places[kChunk];
      if (tiles <= 2 && j + kChunk < item.to) prefetch(item, j + kChunk, places);
      a_.locate(item.s, item.head, j, held, places);
      Number* rows[kChunk];
      read(places, j, held, rows);
      const auto keys = Math::keys(near_, rows, held, keys_);
      const auto values = Math::values(near_, rows, held, keys, values_);
      for (i64 tile = 0, together; tile < tiles; tile += together) {
        together = std::min(i64(2), tiles - tile);
        const i64 seen = std::min(held, rows_[tile + together - 1].most + 1 - j);
        if (seen <= 0 || (a_.window > 0 && j + held <= rows_[tile].first - a_.window + 1)) continue;
        step(keys, values, query_ + tile * kLanes * depth, j, ceil_div(seen, Math::kRound) * Math::kRound, rows_ + tile, together,
             states + tile * (2 + height_));
      }
    }
  }

  // Where the keys of a chunk lie as numbers.
  void read(C* const* places, i64 j, i64 count, Number** rows) const {
    if constexpr (kPlain) {
      std::copy(places, places + count, rows);
    } else {
      for (i64 i = 0; i < count; i++) {
        rows[i] = numbers_ + i * a_.E;
        const i64 slot = (j + i) % a_.P;
        read_rows(places[i], a_, slot, 1, rows[i]);
        if (a_.cache_kind) read_rows(places[i] + a_.cache_kind, a_, slot, 1, rows[i] + near_.cache_kind);
      }
    }
  }
  // The same of a piece's keys or values, which asks for what `ask` points to.
  const Number* read_piece(const C* piece, i64 slot, i64 count, const C* ask) const {
    if constexpr (kPlain) {
      return piece;
    } else {
      for (i64 at = 0; at < kPiece * a_.E; at += 64) __builtin_prefetch(ask + at);
      read_rows(piece, a_, slot, count, numbers_);
      return numbers_;
    }
  }
  // What the arithmetic on a piece asks for: numbers are there already.
  const Number* asked(const C* ask) const {
    if constexpr (kPlain) {
      return ask;
    } else {
      return numbers_;
    }
  }

  // Whether an item takes the way of few rows.
  bool few(const Item& item) const { return item.tokens * group_ <= most_few(a_); }
  i64 few_query(i64 rows) const { return few_padded(std::min(rows, kFewRows)) * a_.E; }

  const T* query(const Item& item, i64 r) const {
    return a_.q + (item.row + r / group_) * a_.q_token + (item.head * group_ + r % group_) * a_.q_head;
  }
  T* result(const Item& item, i64 r) const {
    return a_.out + ((item.row + r / group_) * a_.H + item.head * group_ + r % group_) * a_.V;
  }
  static void clear(Vec* state, i64 size) {
    std::fill(state, state + size, Vec{});
    state[0] = vec(kLowest);
  }

  void run_few(const Item& item, const Item* next) {
    const i64 count = item.tokens * group_, size = few_state_size(a_.V), heads = item.heads;
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
    const bool tree = is_tree(item);
    i64 known = item.position + 1, oldest = -1;  // tokens that every row sees, but for those up to `oldest`
    for (i64 r = 0; r < padded; r++) {
      const i64 token = std::min(r, count - 1) / group_, begin = step_begin(item);
      const i64 position = tree ? begin + a_.depth(item.row + token, a_.starts[item.s]) : item.position + token;
      spans[r].newest = std::int32_t(tree ? item.to - 1 : item.position + token);
      spans[r].oldest = std::int32_t(a_.window > 0 ? position - a_.window : -1);
      spans[r].begin = std::int32_t(begin), spans[r].bits = tree ? seen_nodes(item, item.row + token) : -1;
      oldest = std::max(oldest, i64(spans[r].oldest));
      if (tree) known = begin;
    }
    const Steps steps = steps_of(std::min(kFewGroup, count));
    const i64 ahead = std::max(i64(1), kAheadBytes / (kPiece * a_.E * i64(sizeof(C))));
    static thread_local Scratch lists;
    const C** order = lists.get<const C*>(4 * heads * (kChunk / kPiece) + ahead);
    i64 listed = list(item, item.from, order);
    for (i64 j = item.from; j < item.to; j += kChunk) {
      const i64 end = std::min(item.to, j + kChunk);
      const C** later = order + listed;
      const i64 upcoming = end < item.to ? list(item, end, later) : next ? list(*next, next->from, later) : 0;
      std::fill(later + upcoming, later + upcoming + ahead, later[upcoming - 1]);
      const C** at = order;
      const Number* numbers = nullptr;
      for (i64 from = j; from < end; from += kPiece, at += 2 * heads) {
        const bool whole = from + kPiece <= known && oldest < from;
        const i64 used = std::min(kPiece, end - from);
        for (i64 r = 0; r < heads * padded; r += kFewGroup) {
          const i64 head = r / padded;
          if (r % padded == 0) numbers = read_piece(at[head], from % a_.P, kPiece, at[head + ahead]);
          steps.weigh(*this, numbers, asked(at[head + ahead]), query_ + r * a_.E, from,
                      whole ? nullptr : spans + r % padded, weights_ + r * kPiece, states_ + r * size);
        }
        for (i64 r = 0; r < heads * padded; r += kFewGroup) {
          const i64 head = heads + r / padded;
          if (r % padded == 0 && a_.cache_kind) numbers = read_piece(at[head], from % a_.P, used, at[head + ahead]);
          steps.accumulate(numbers, asked(at[head + ahead]), near_.cache_slot, used, weights_ + r * kPiece, a_.V,
                           states_ + r * size);
        }
      }
      std::copy(later, later + upcoming, order);
      listed = upcoming;
    }
  }

  // The pieces of a chunk in the order of their use, which should be that of their addresses: block after block, the keys of
  // all heads, then the values. Returns their count.
  i64 list(const Item& item, i64 from, const C** to) const {
    const std::int32_t* table = a_.table + item.s * a_.table_stride;
    const C** const first = to;
    for (i64 at = from; at < std::min(item.to, from + kChunk); at += kPiece, to += item.heads) {
      const C* keys = a_.cache + table[at / a_.P] * a_.cache_block + item.head * a_.cache_head + at % a_.P * a_.cache_slot;
      for (i64 head = 0; head < item.heads; head++, to++, keys += a_.cache_head)
        to[0] = keys, to[item.heads] = keys + a_.cache_kind;
    }
    return to - first;
  }

  // What is done with a piece, for up to eight rows of one head.
  struct Steps {
    void (*weigh)(const Worker&, const Number* keys, const Number* ask, const Cell* query, i64 from, const Span*, Cell* weights,
                  Vec* states);
    void (*accumulate)(const Number* values, const Number* ask, i64 slot, i64 count, const Cell* weights, i64 V, Vec* states);
  };
  template <int R>
  static Steps steps() {
    return {weigh<R>, Few::template accumulate<R>};
  }
  static Steps steps_of(i64 rows) {
    return rows == 1 ? steps<1>() : rows == 2 ? steps<2>() : rows <= 4 ? steps<4>() : rows == 7 ? steps<7>() : steps<8>();
  }
  template <int R>
  static void weigh(const Worker& w, const Number* keys, const Number* ask, const Cell* query, i64 from, const Span* spans,
                    Cell* weights, Vec* states) {
    const Args<T, C>& a = w.a_;
    Vec scores[R];
    Few::template scores<R>(keys, ask, w.near_.cache_slot, query, a.E, scores);
    const auto soften = [&](auto adjust) {
      soften_rows<R, kPrecise>(from, spans, w.log2_scale(), adjust, scores, weights, a.V, states);
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
    const i64 count = std::min(kLanes, item.tokens * group_ - tile * kLanes);
    T* to[kLanes];
    for (i64 i = 0; i < count; i++) to[i] = result(item, tile * kLanes + i);
    store_lanes(sums, a_.value_scale / sum, a_.V, to, count);
  }

  // Ask for a chunk's blocks of the cache: they lie anywhere, so the hardware does not see them coming. Always inlined: gcc takes
  // a function that only prefetches for one without effect and drops the call.
  __attribute__((always_inline)) void prefetch(const Item& item, i64 from, C** places) const {
    const i64 count = std::min(kChunk, item.to - from), bytes = a_.E * i64(sizeof(C));
    a_.locate(item.s, item.head, from, count, places);
    for (i64 j = 0; j < count; j++)
      for (i64 at = 0; at < bytes; at += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(places[j]) + at);
        __builtin_prefetch(reinterpret_cast<const char*>(places[j] + a_.cache_kind) + at);
      }
  }

  // One chunk of `count` tokens from position j for one or two tiles of rows.
  void step(const typename Math::Keys& keys, const typename Math::Values& values, const Cell* query, i64 j, i64 count, const Rows* rows, i64 tiles, Vec* states) {
    alignas(64) Vec scores[2 * kChunk];
    const int regs = rows[0].regs;  // only the last tile of an item has less than all
    Math::scores(keys, query, a_.E, count, scores, tiles, regs);
    for (i64 tile = 0; tile < tiles; tile++)
      soften(j, count, rows[tile], scores + tile * kChunk, weights_ + tile * kChunk * kLanes, states + tile * (2 + height_));
    Math::accumulate(values, weights_, a_.V, count, states + 2, tiles, regs);
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
    const bool whole = j + count - 1 <= rows.least && (a_.window == 0 || j > rows.last - a_.window);
    if (!whole) {
      const Reg hidden = Reg{} + kHidden;
      const RegInts newest = reg_of<RegInts>(rows.newest, reg);
      const RegInts oldest = a_.window > 0 ? reg_of<RegInts>(rows.position, reg) - std::int32_t(a_.window) : RegInts{} - 1;
      const i64 seen = a_.window > 0 ? 0 : std::max(i64(0), rows.least + 1 - j);  // by every row
      for (i64 t = seen; t < count; t++) {
        const RegInts at = RegInts{} + std::int32_t(j + t);
        RegInts open = (at <= newest) & (at > oldest);
        if (j + t >= rows.begin) open &= rows.open(j + t, reg);
        put_reg(scores[t], reg, open ? score(t) : hidden);
      }
    }
    Reg most[4] = {score(0), score(1), score(2), score(3)};
    for (i64 t = 4; t < count; t += 4)
#pragma GCC unroll 4
      for (i64 i = 0; i < 4; i++) most[i] = larger(most[i], score(t + i));
    const Reg found = larger(larger(most[0], most[1]), larger(most[2], most[3])) * scale;
    Reg top = reg_of<Reg>(state[0], reg);
    if (bits(found > top + (a_.invariant ? 0 : Math::kSlack))) {
      const Reg before = top;
      top = larger(top, found);
      const Reg fade = top > before ? exp2_vec<kPrecise>(before - top) : Reg{} + 1.0f;  // of others' sake none fades
      for (i64 i = 1; i < 2 + height_; i++) put_reg(state[i], reg, reg_of<Reg>(state[i], reg) * fade);
      put_reg(state[0], reg, top);
    }
    Reg sum0{}, sum1{};
    for (i64 t = 0; t < count; t += 2) {
      const Reg p0 = exp2_vec<kPrecise>(score(t) * scale - top);
      const Reg p1 = exp2_vec<kPrecise>(score(t + 1) * scale - top);
      Math::put_weights(weights, t, reg, p0, p1);
      sum0 += p0, sum1 += p1;
    }
    put_reg(state[1], reg, reg_of<Reg>(state[1], reg) + (sum0 + sum1));
  }

  const Args<T, C>& a_;
  Layout near_;  // of what the arithmetic reads: the cache, or a chunk's keys and values as numbers
  Number* numbers_ = nullptr;
  i64 group_, height_;
  Cell *query_, *keys_, *values_, *weights_;
  Vec* states_;
  Rows* rows_;
};

}  // namespace
}  // namespace graphllm
