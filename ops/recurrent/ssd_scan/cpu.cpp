// ssd_scan: the state of each head decays by a number for each token, takes up x B^T and is read by C.
//
// An item is 16 rows (of P) of a head of a sequence. It goes through blocks of tokens; in each, a row's numbers stay in
// registers, as many at a time as there are registers for. What a token reads from a row is left as a vector of partial
// sums, so that the sums over lanes are made for 16 rows at once.
#include <cmath>
#include <cstring>

#include "cpu/calls.h"
#include "cpu/recurrent.h"
#include "cpu/threads.h"
#include "cpu/vectors.h"

namespace graphllm {
namespace {

constexpr i64 kRows = 16, kTokens = 32;
constexpr i64 kMinWork = 16 << 10;  // numbers of states times tokens below which a second thread is not worth waking
#ifdef GRAPHLLM_AVX512
constexpr int kMost = 8;  // registers of a row at a time
#else
constexpr int kMost = 4;
#endif

inline Reg load_reg(const float* from) {
  Reg out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
inline void store_reg(float* to, Reg x) { std::memcpy(to, &x, sizeof x); }

// What an item needs of a block of tokens, as float32. taken: dt x, by token and row. b, c: rows of `padded` numbers.
struct Block {
  const float *decay, *taken, *b, *c;
  float* sums;  // [tokens, kRows, kRegLanes]
  i64 tokens, padded, decay_stride;
};

// kCount registers of a row from number `n` on. from, to: of the row's state, which may be the same.
template <int kCount>
void walk(const Block& block, i64 row, i64 n, bool more, const float* from, float* to) {
  Reg state[kCount];
#pragma GCC unroll 8
  for (int k = 0; k < kCount; k++) state[k] = load_reg(from + k * kRegLanes);
  for (i64 t = 0; t < block.tokens; t++) {
    const float decay = block.decay[t * block.decay_stride], taken = block.taken[t * kRows + row];
    const float *b = block.b + t * block.padded + n, *c = block.c + t * block.padded + n;
    float* sums = block.sums + (t * kRows + row) * kRegLanes;
    Reg sum = more ? load_reg(sums) : Reg{};
#pragma GCC unroll 8
    for (int k = 0; k < kCount; k++) {
      state[k] = state[k] * decay + load_reg(b + k * kRegLanes) * taken;
      sum += state[k] * load_reg(c + k * kRegLanes);
    }
    store_reg(sums, sum);
  }
#pragma GCC unroll 8
  for (int k = 0; k < kCount; k++) store_reg(to + k * kRegLanes, state[k]);
}

template <typename T>
struct Scan {
  const T *x, *dt;
  const float* A;
  const T *B, *C;
  const float *D, *dt_bias;
  float* state;
  T* out;
  Slots at;
  i64 S, H, P, G, N, x_stride, dt_stride, B_stride, C_stride;
  float dt_min, dt_max;

  // A row's numbers through a block of tokens.
  void row(const Block& block, i64 place, const float* from, float* to) const {
    i64 n = 0;
    const auto some = [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      for (; n + kCount * kRegLanes <= N; n += kCount * kRegLanes)
        walk<kCount>(block, place, n, n > 0, from + n, to + n);
    };
    some(Index<kMost>{});
    some(Index<kMost / 2>{});
    some(Index<1>{});
    if (n < N) {
      float last[kRegLanes] = {};
      std::memcpy(last, from + n, (N - n) * sizeof(float));
      walk<1>(block, place, n, n > 0, last, last);
      std::memcpy(to + n, last, (N - n) * sizeof(float));
    }
  }

  // Rows [p, p + count) of head h of sequence s. steps, decays: dt and exp(dt A), [rows, H].
  void item(i64 s, i64 h, i64 p, const float* steps, const float* decays, float* work) const {
    const i64 first = at.first(s), n = at.count(s), count = std::min(kRows, P - p), padded = ceil_div(N, 16) * 16;
    const i64 most = n <= at.versions ? 1 : kTokens, g = h / (H / G);
    float *b = work, *c = b + kTokens * padded, *taken = c + kTokens * padded, *sums = taken + kTokens * kRows;
    const float* from = state + at.read(s);
    float* to = state + at.written(s, n - 1);
    for (i64 i = 0; i < n; i += most) {
      const i64 tokens = std::min(most, n - i), t = first + i;
      if (most == 1) to = state + at.written(s, i);
      if (i > 0 && i == at.border(s))
        for (i64 r = 0; r < count; r++) {
          const i64 place = (h * P + p + r) * N;
          std::memcpy(state + at.exported(s) + place, from + place, N * sizeof(float));
        }
      for (i64 k = 0; k < tokens; k++) {
        float *own_b = b + k * padded, *own_c = c + k * padded;
        widen_row(B + (t + k) * B_stride + g * N, N, own_b);
        widen_row(C + (t + k) * C_stride + g * N, N, own_c);
        std::fill(own_b + N, own_b + padded, 0.0f);
        std::fill(own_c + N, own_c + padded, 0.0f);
        const Vec rows = load_some(x + (t + k) * x_stride + h * P + p, count) * steps[(t + k) * H + h];
        store_vec(taken + k * kRows, rows);
      }
      const Block block{decays + t * H + h, taken, b, c, sums, tokens, padded, H};
      for (i64 r = 0; r < count; r++) {
        const i64 place = (h * P + p + r) * N;
        row(block, r, from + place, to + place);
      }
      from = to;
      const float skip = D ? D[h] : 0.0f;
      for (i64 k = 0; k < tokens; k++) {
        Reg all[kRows] = {};
        for (i64 r = 0; r < count; r++) all[r] = load_reg(sums + (k * kRows + r) * kRegLanes);
        Vec read;
#ifdef GRAPHLLM_AVX512
        put_reg(read, 0, (Reg)add_lanes(reinterpret_cast<const __m512*>(all)));
#else
        for (int half = 0; half < 2; half++) put_reg(read, half, add_lanes(all + 8 * half));
#endif
        if (D) read += skip * load_some(x + (t + k) * x_stride + h * P + p, count);
        store_some(out + ((t + k) * H + h) * P + p, read, count);
      }
    }
  }

  void run() const {
    const i64 tokens = at.query_start_loc[S], groups = ceil_div(P, kRows);
    static thread_local Scratch shared;
    float *steps = shared.get<float>(2 * tokens * H), *decays = steps + tokens * H;
#pragma omp parallel if (tokens * H * P * N > kMinWork)
    {
      static thread_local Scratch scratch;
      float* work = scratch.get<float>(kTokens * (2 * ceil_div(N, 16) * 16 + kRows + kRows * kRegLanes));
#pragma omp for
      for (i64 t = 0; t < tokens; t++)
        for (i64 h = 0; h < H; h++) {
          const float given = to_float(dt[t * dt_stride + h]) + (dt_bias ? dt_bias[h] : 0.0f);
          float step = std::max(given, 0.0f) + std::log1p(std::exp(-std::abs(given)));
          step = std::max(step, dt_min);
          if (dt_max > 0) step = std::min(step, dt_max);
          steps[t * H + h] = step;
          decays[t * H + h] = std::exp(step * A[h]);
        }
      const Range mine = share(S * H * groups);
      for (i64 i = mine.from; i < mine.to; i++) {
        const i64 s = i / (H * groups), h = i / groups % H;
        if (at.count(s) > 0) item(s, h, i % groups * kRows, steps, decays, work);
      }
    }
  }
};

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_SSD_SCAN(name, T)                                                                                  \
  extern "C" void name(const void* x, const void* dt, const void* A, const void* B, const void* C, const void* D,   \
                       const void* dt_bias, void* state, void* out, const void* query_start_loc, const void* slots, \
                       const void* state_versions, const void* exports, std::int64_t S, std::int64_t H,             \
                       std::int64_t P, std::int64_t G,                                                              \
                       std::int64_t N, std::int64_t x_stride, std::int64_t dt_stride, std::int64_t B_stride,        \
                       std::int64_t C_stride, std::int64_t versions, std::int64_t slot_stride,                      \
                       std::int64_t version_stride, double dt_min, double dt_max) {                                 \
    using Number = graphllm::T;                                                                                     \
    using Numbers = const Number*;                                                                                  \
    using Ids = const std::int32_t*;                                                                                \
    graphllm::Scan<Number>{static_cast<Numbers>(x), static_cast<Numbers>(dt), static_cast<const float*>(A),         \
                           static_cast<Numbers>(B), static_cast<Numbers>(C), static_cast<const float*>(D),          \
                           static_cast<const float*>(dt_bias), static_cast<float*>(state),                          \
                           static_cast<Number*>(out),                                                               \
                           {static_cast<Ids>(query_start_loc), static_cast<Ids>(slots),                             \
                            static_cast<Ids>(state_versions), versions, slot_stride, version_stride,                \
                            static_cast<Ids>(exports)},                                                             \
                           S, H, P, G, N, x_stride, dt_stride, B_stride, C_stride, float(dt_min), float(dt_max)}    \
        .run();                                                                                                     \
  }                                                                                                                 \
  GRAPHLLM_KERNEL(name)

GRAPHLLM_SSD_SCAN(graphllm_ssd_scan_f32, f32)
GRAPHLLM_SSD_SCAN(graphllm_ssd_scan_bf16, bf16)
