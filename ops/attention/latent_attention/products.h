// Rows times a head's matrix with the arithmetic of attention: as few rows, which read the matrix at the speed of memory, or as
// tiles of 16 rows. Sums are float32, and each row is computed independently of how many there are of either kind.
#pragma once

#include "cpu/attention/few_rows.h"
#include "cpu/attention/worker.h"

namespace graphllm {
namespace {

// [count, width], rows `stride` apart.
template <typename T>
struct Matrix {
  const T* at;
  i64 stride, count, width;
};

template <typename T>
class Products {
  using Math = typename Arithmetic<T>::ManyRows;
  using Few = typename Arithmetic<T>::FewRows;
  using Cell = typename Math::Cell;

 public:
  // Whether this many rows are computed as few. invariant: whether all are.
  static bool few(const Matrix<T>& m, i64 rows, bool invariant) {
    return m.width % Few::kColumns == 0 && m.count % kPiece == 0 && (invariant || rows <= kTogether);
  }

  // to[i] [width] = the sum over n of x[i][n] times row n of the matrix.
  void combine(const Matrix<T>& m, const T* const* x, i64 rows, T* const* to, bool as_few) {
    const i64 most = as_few ? kTogether : kHeld;
    for (i64 first = 0; first < rows; first += most) {
      const i64 some = std::min(most, rows - first);
      as_few ? combine_few(m, x + first, some, to + first) : combine_tiles(m, x + first, some, to + first);
    }
  }

  // to[i] [count] = x[i] times each row of the matrix.
  void dot(const Matrix<T>& m, const T* const* x, i64 rows, T* const* to, bool as_few) {
    const i64 most = as_few ? kTogether : kHeld;
    for (i64 first = 0; first < rows; first += most) {
      const i64 some = std::min(most, rows - first);
      as_few ? dot_few(m, x + first, some, to + first) : dot_tiles(m, x + first, some, to + first);
    }
  }

 private:
  static constexpr i64 kTogether = 16;  // rows that go over a piece of the matrix
  static constexpr i64 kHeld = 128;     // the same in tiles, over a chunk of it

  // work(Index<R>) for these rows, at most kFewGroup.
  template <typename Work>
  static void by_rows(i64 rows, const Work& work) {
    rows == 1 ? work(Index<1>()) : rows == 2 ? work(Index<2>()) : rows <= 4 ? work(Index<4>()) : work(Index<8>());
  }
  static const T* next_piece(const Matrix<T>& m, i64 from) { return m.at + (from + kPiece) * m.stride; }

  void combine_few(const Matrix<T>& m, const T* const* x, i64 rows, T* const* to) {
    const i64 size = few_state_size(m.width);
    Vec* states = sums_.get<Vec>(few_padded(rows) * size);
    Cell* weights = cells_.get<Cell>(few_padded(rows) * kPiece);
    std::fill(states, states + few_padded(rows) * size, Vec{});
    for (i64 r = 0; r < rows; r++) states[r * size + 1][0] = 1;  // by which a row is divided in the end
    std::fill(weights, weights + few_padded(rows) * kPiece, Cell{});
    for (i64 from = 0; from < m.count; from += kPiece) {
      for (i64 r = 0; r < rows; r++) Few::put_query(x[r] + from, kPiece, weights + r * kPiece);
      for (i64 r = 0; r < rows; r += kFewGroup)
        by_rows(std::min(kFewGroup, rows - r), [&](auto side) {
          Few::template accumulate<decltype(side)::value>(m.at + from * m.stride, next_piece(m, from), m.stride, kPiece,
                                                         weights + r * kPiece, m.width, states + r * size);
        });
    }
    for (i64 r = 0; r < rows; r++) Few::store_row(states + r * size, m.width, 1, to[r]);
  }

  void dot_few(const Matrix<T>& m, const T* const* x, i64 rows, T* const* to) {
    Cell* query = cells_.get<Cell>(few_padded(rows) * m.width);
    std::fill(query + rows * m.width, query + few_padded(rows) * m.width, Cell{});
    for (i64 r = 0; r < rows; r++) Few::put_query(x[r], m.width, query + r * m.width);
    for (i64 from = 0; from < m.count; from += kPiece)
      for (i64 r = 0; r < rows; r += kFewGroup) {
        const i64 some = std::min(kFewGroup, rows - r);
        by_rows(some, [&](auto side) {
          Vec found[kFewGroup];
          Few::template scores<decltype(side)::value>(m.at + from * m.stride, next_piece(m, from), m.stride,
                                                     query + r * m.width, m.width, found);
          for (i64 i = 0; i < some; i++) store_vec(to[r + i] + from, found[i]);
        });
      }
  }

  // Where `count` rows of the matrix lie, for keys and values of the arithmetic.
  struct Held {
    Layout at;
    T* row[kChunk];

    Held(const Matrix<T>& m, i64 from, i64 count)
        : at{m.width, m.width, m.count % 16 == 0 ? 16 : 1, 0, 0, 0, m.stride} {
      for (i64 i = 0; i < count; i++) row[i] = const_cast<T*>(m.at) + (from + i) * m.stride;
    }
  };
  static i64 row_size(const Matrix<T>& m) { return std::max(Math::query_depth(m.width), Math::height(m.width)) + 16; }

  // Rows of x as tiles, one after the other.
  Cell* packed(const T* const* x, i64 rows, i64 depth) {
    const i64 size = Math::query_depth(depth) * kLanes;
    Cell* to = cells_.get<Cell>(ceil_div(rows, kLanes) * size);
    for (i64 r = 0; r < rows; r += kLanes)
      Math::pack_query(x + r, std::min(kLanes, rows - r), depth, false, to + r / kLanes * size);
    return to;
  }

  void combine_tiles(const Matrix<T>& m, const T* const* x, i64 rows, T* const* to) {
    const i64 depth = Math::query_depth(m.count), height = Math::height(m.width);
    Cell *weights = packed(x, rows, m.count), *keys = matrix_.get<Cell>(2 * kChunk * row_size(m));
    Vec* sums = sums_.get<Vec>(ceil_div(rows, kLanes) * height);
    std::fill(sums, sums + ceil_div(rows, kLanes) * height, Vec{});
    for (i64 from = 0; from < m.count; from += kChunk) {
      const i64 count = std::min(kChunk, m.count - from);
      Held held(m, from, count);
      const auto made = Math::keys(held.at, held.row, count, keys);
      const auto values = Math::values(held.at, held.row, count, made, keys + kChunk * row_size(m));
      for (i64 tile = 0; tile < ceil_div(rows, kLanes); tile++)
        Math::accumulate(values, weights + tile * depth * kLanes + from * kLanes, m.width, std::min(kChunk, depth - from),
                         sums + tile * height, 1, kRegs);
    }
    for (i64 r = 0; r < rows; r += kLanes)
      store_lanes(sums + r / kLanes * height, vec(1), m.width, to + r, std::min(kLanes, rows - r));
  }

  void dot_tiles(const Matrix<T>& m, const T* const* x, i64 rows, T* const* to) {
    Cell *query = packed(x, rows, m.width), *keys = matrix_.get<Cell>(kChunk * row_size(m));
    alignas(64) Vec found[kChunk];
    for (i64 from = 0; from < m.count; from += kChunk) {
      const i64 count = std::min(kChunk, m.count - from);
      Held held(m, from, count);
      const auto made = Math::keys(held.at, held.row, count, keys);
      for (i64 r = 0; r < rows; r += kLanes) {
        Math::scores(made, query + r * Math::query_depth(m.width), m.width, ceil_div(count, Math::kRound) * Math::kRound, found,
                     1, kRegs);
        T* at[kLanes];
        const i64 some = std::min(kLanes, rows - r);
        for (i64 i = 0; i < some; i++) at[i] = to[r + i] + from;
        store_lanes(found, vec(1), count, at, some);
      }
    }
  }

  Scratch cells_, sums_, matrix_;
};

}  // namespace
}  // namespace graphllm
