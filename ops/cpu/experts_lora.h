// Low-rank adapters of experts: x A^T for every pair of a token and an expert, and what its product with B adds to the
// expert's own. Sums are float32, whatever the tables are.
#pragma once

#include "cpu/experts.h"

namespace graphllm {
namespace {

// Of one of an expert's two products, which has `parts` matrices of `outputs` / parts rows: A [L, N, parts rank, inner] and B
// [L, N, rank, outputs] of L adapters and N experts, ids by token, 0 for none. low: [pairs, parts rank], in the order of
// experts. Without ids there are no adapters.
template <typename T>
struct ExpertsLora {
  const T *a, *b;
  const std::int32_t* ids;
  const Sorted* sorted;
  float* low;
  i64 N, rank, parts, inner, outputs;
  i64 rows = parts * rank;

  i64 entry(i64 pair) const { return ids ? ids[sorted->token[pair]] : 0; }

  // x A^T of the pairs in `mine`, from their rows of x.
  void shrink(const T* x, Range mine) const {
    if (!ids) return;
    for (const Group& g : sorted->groups)
      for (i64 pair = std::max(mine.from, g.from); pair < std::min(mine.to, g.from + g.count); pair++) {
        if (entry(pair) <= 0) continue;
        const T* table = a + (entry(pair) * N + g.expert) * rows * inner;
        for (i64 r = 0; r < rows; r += kSide) dots(x + pair * inner, table + r * inner, std::min(kSide, rows - r), low + pair * rows + r);
      }
  }

  // What is added to outputs [n, n + count) of a pair's expert, at most 16 and of the matrix `part`.
  Vec delta(i64 pair, i64 expert, i64 part, i64 n, i64 count) const {
    const T* table = b + (entry(pair) * N + expert) * rank * outputs + part * (outputs / parts) + n;
    const float* own = low + pair * rows + part * rank;
    Vec sum{};
    for (i64 j = 0; j < rank; j++) sum += own[j] * load_some(table + j * outputs, count);
    return sum;
  }

  // Adds it to rows [.., stride] of an expert's results, from where matrix `part` begins; only outputs `mine`.
  void add(T* out, i64 stride, const Group& g, i64 part, Range mine) const {
    if (!ids) return;
    for (i64 pair = g.from; pair < g.from + g.count; pair++) {
      if (entry(pair) <= 0) continue;
      for (i64 n = mine.from; n < mine.to; n += kLanes) {
        const i64 count = std::min(kLanes, mine.to - n);
        T* to = out + pair * stride + n;
        const Vec sum = load_some(to, count) + delta(pair, g.expert, part, n, count);
        for (i64 i = 0; i < count; i++) store(to + i, sum[i]);
      }
    }
  }

 private:
  static constexpr i64 kSide = 4;  // rows of A at a time

  void dots(const T* x, const T* table, i64 count, float* to) const {
    Vec sums[kSide] = {};
    for (i64 k = 0; k < inner; k += kLanes) {
      const i64 wide = std::min(kLanes, inner - k);
      const Vec own = load_some(x + k, wide);
      for (i64 r = 0; r < count; r++) sums[r] += own * load_some(table + r * inner + k, wide);
    }
    for (i64 r = 0; r < count; r++) {
      float sum = 0.0f;
      for (i64 i = 0; i < kLanes; i++) sum += sums[r][i];
      to[r] = sum;
    }
  }
};

// The tables of both products as a kernel is given them.
struct LoraTables {
  const void *gate_up_a, *gate_up_b, *down_a, *down_b;
  const std::int32_t* ids;
  std::int64_t rank;

  template <typename T>
  ExpertsLora<T> first(const Sorted& sorted, Scratch& scratch, i64 N, i64 D, i64 F, i64 parts) const {
    return made<T>(gate_up_a, gate_up_b, sorted, scratch, N, parts, D, parts * F);
  }
  template <typename T>
  ExpertsLora<T> second(const Sorted& sorted, Scratch& scratch, i64 N, i64 D, i64 F) const {
    return made<T>(down_a, down_b, sorted, scratch, N, 1, F, D);
  }

 private:
  template <typename T>
  ExpertsLora<T> made(const void* a, const void* b, const Sorted& sorted, Scratch& scratch, i64 N, i64 parts, i64 inner,
                      i64 outputs) const {
    float* low = ids ? scratch.get<float>(i64(sorted.token.size()) * parts * rank) : nullptr;
    return {static_cast<const T*>(a), static_cast<const T*>(b), ids, &sorted, low, N, rank, parts, inner, outputs};
  }
};

}  // namespace
}  // namespace graphllm
