// What kernels of experts share: rows of x by expert, shares of the experts' weights for threads, activations, and the
// weighted sum in the end.
#pragma once

#include <vector>

#include "cpu/threads.h"
#include "cpu/vectors.h"

namespace graphllm {
namespace {

constexpr i64 kBlock = 32;  // weight rows that a thread's share is made of

enum Activation : i64 { kSilu, kGeluTanh, kClamped, kRelu2 };

// Matrices of F rows in an expert's first product: a gate and up, or up alone.
inline i64 parts_of(Activation kind) { return kind == kRelu2 ? 1 : 2; }

// An expert that was chosen, and its rows among those sorted by expert.
struct Group {
  i64 expert, from, count;
};

// Pairs of a token and an expert, in the order of experts. place: of each pair among them, -1 for no expert.
struct Sorted {
  std::vector<Group> groups;
  std::vector<i64> token, place;

  Sorted(const std::int32_t* experts, i64 T, i64 A, i64 N) : place(T * A, -1) {
    std::vector<i64> begin(N + 1);
    for (i64 i = 0; i < T * A; i++)
      if (experts[i] >= 0) begin[experts[i] + 1]++;
    for (i64 n = 0; n < N; n++) {
      if (begin[n + 1] > 0) groups.push_back({n, begin[n], begin[n + 1]});
      begin[n + 1] += begin[n];
    }
    token.resize(begin[N]);
    for (i64 i = 0; i < T * A; i++)
      if (experts[i] >= 0) token[place[i] = begin[experts[i]]++] = i / A;
  }
};

// up is not read where there is no gate, and stands in the gate's place.
inline Vec activate(Vec gate, Vec up, Activation kind, float limit) {
  if (kind == kRelu2) return gate = larger(gate, vec(0.0f)), gate * gate;
  if (kind == kGeluTanh) return gate * sigmoid(1.5957691216f * (gate + 0.044715f * gate * gate * gate)) * up;
  if (kind == kSilu) return gate * sigmoid(gate) * up;
  gate = -larger(-gate, vec(-limit)), up = larger(-larger(-up, vec(-limit)), vec(-limit));
  return (up + 1.0f) * gate * sigmoid(1.702f * gate);
}

// Entries [from, to) of rows of h, from rows of [2 F] with gate and up, or of [F].
template <typename T>
void activate(const T* halves, T* h, const Group& g, i64 F, Range mine, Activation kind, float limit) {
  const i64 parts = parts_of(kind);
  for (i64 m = g.from; m < g.from + g.count; m++)
    for (i64 n = mine.from; n < mine.to; n += 16) {
      const i64 count = std::min<i64>(16, mine.to - n);
      alignas(64) float gate[16] = {}, up[16] = {}, out[16];
      widen_row(halves + m * parts * F + n, count, gate);
      if (parts == 2) widen_row(halves + m * parts * F + F + n, count, up);
      Vec a, b;
      std::memcpy(&a, gate, 64), std::memcpy(&b, up, 64);
      a = activate(a, b, kind, limit);
      std::memcpy(out, &a, 64);
      for (i64 i = 0; i < count; i++) store(h + m * F + n + i, out[i]);
    }
}

// Every block of every group's weight rows, N of them each, by all threads: work(group, rows).
template <typename Work>
void each_block(Shares& shares, const std::vector<Group>& groups, i64 N, const Work& work) {
  const i64 blocks = ceil_div(N, kBlock);
  shares.each([&](Range part) {
    while (part.from < part.to) {
      const i64 g = part.from / blocks, first = g * blocks, end = std::min(part.to, first + blocks);
      work(groups[g], Range{(part.from - first) * kBlock, std::min(N, (end - first) * kBlock)});
      part.from = end;
    }
  });
}

// out [tokens, D] from what the experts gave for each pair, y [pairs, D]; by all threads.
template <typename T>
void combine(const Sorted& sorted, const T* y, const float* weights, T* out, i64 tokens, i64 A, i64 D) {
  const Range own = share(tokens * ceil_div(D, kBlock));
  for (i64 i = own.from; i < own.to; i++) {
    const i64 t = i / ceil_div(D, kBlock), from = i % ceil_div(D, kBlock) * kBlock, wide = std::min(kBlock, D - from);
    float sums[kBlock] = {}, one[kBlock];
    for (i64 a = 0; a < A; a++) {
      const i64 place = sorted.place[t * A + a];
      if (place < 0) continue;
      widen_row(y + place * D + from, wide, one);
      for (i64 d = 0; d < wide; d++) sums[d] += weights[t * A + a] * one[d];
    }
    for (i64 d = 0; d < wide; d++) store(out + t * D + from + d, sums[d]);
  }
}

}  // namespace
}  // namespace graphllm
