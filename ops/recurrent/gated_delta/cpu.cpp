// gated_delta: an item is a block of rows of a head's state, which no other item reads or writes.
//
// Prompts: the block lies in scratch, turned so that the rows fill vectors, and is read and written once for four tokens.
// With decays E_t (a diagonal), deltas d_t and the state S before the four tokens, by which E_a..b is a product,
//
//   S k_t after the tokens before t = S (E_1..t k_t) + sum over j < t of d_j (E_j+1..t k_j) . k_t
//
// and likewise with q_t, so that all that depends on the state is eight products, and the rest are numbers which all
// rows share. What four tokens add to the state is added when it is next read.
//
// Few tokens, and all in deterministic mode: each token by itself, rows in the state's own order.
#include "cpu/recurrent.h"

#include <cmath>

#include "cpu/calls.h"
#include "cpu/threads.h"
#include "cpu/vectors.h"

namespace graphllm {
namespace {

constexpr int kTokens = 4;
constexpr i64 kRows = 32;           // of an item
constexpr i64 kMostKeys = 256;      // entries of a key
constexpr i64 kMinWork = 32 << 10;  // products below which a second thread is not worth waking
#ifdef GRAPHLLM_AVX512
constexpr int kWide = 2;  // registers of rows that are computed side by side
#else
constexpr int kWide = 1;
#endif
constexpr i64 kSide = kWide * kRegLanes;

// Lane i of what comes out is the sum of all lanes of v[i], of 16.
inline void add_all(const Reg v[16], float* out) {
#ifdef GRAPHLLM_AVX512
  __m512 given[16];
  for (int i = 0; i < 16; i++) given[i] = (__m512)v[i];
  _mm512_storeu_ps(out, add_lanes(given));
#else
  for (int h = 0; h < 2; h++) store8(out + 8 * h, add_lanes(v + 8 * h));
#endif
}

inline Reg load_reg(const float* from) {
  Reg out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
inline Reg load_reg(const float* from, i64 count) {
  if (count >= kRegLanes) return load_reg(from);
  Reg out{};
  std::memcpy(&out, from, std::max<i64>(count, 0) * sizeof(float));
  return out;
}
inline void store_reg(float* to, Reg x) { std::memcpy(to, &x, sizeof x); }
inline void store_reg(float* to, Reg x, i64 count) {
  if (count >= kRegLanes) return store_reg(to, x);
  std::memcpy(to, &x, std::max<i64>(count, 0) * sizeof(float));
}

// to[c][r] = from[r][c].
inline void turn(const float* from, i64 from_stride, i64 rows, i64 columns, float* to, i64 to_stride) {
  i64 r = 0;
  for (; r + 8 <= rows; r += 8) {
    i64 c = 0;
    for (; c + 8 <= columns; c += 8) {
      Eight block[8];
      for (int i = 0; i < 8; i++) block[i] = load8(from + (r + i) * from_stride + c);
      transpose8(block);
      for (int i = 0; i < 8; i++) store8(to + (c + i) * to_stride + r, block[i]);
    }
    for (; c < columns; c++)
      for (i64 i = r; i < r + 8; i++) to[c * to_stride + i] = from[i * from_stride + c];
  }
  for (; r < rows; r++)
    for (i64 c = 0; c < columns; c++) to[c * to_stride + r] = from[r * from_stride + c];
}

using Row = float[kMostKeys];

// What all rows of a head share at some tokens in a row. Entries of rows after the last key are zeros.
struct Shared {
  Row seen_k[kTokens], seen_q[kTokens];  // by which the state before the tokens is multiplied
  Row added[kTokens];                    // what a delta adds to the state after the tokens
  Row kept;                              // what the state before the tokens is multiplied by
  float k_k[kTokens][kTokens], q_k[kTokens][kTokens];  // of token t and an earlier one, whose key has decayed until t
  float beta[kTokens];
};

struct Work {
  Shared shared[2];  // of these tokens and of those before
  Row k[kTokens], q[kTokens], decay[kTokens];
  float state[kRows * kMostKeys];
  float values[kTokens][kRows], deltas[kTokens][kRows], outs[kTokens][kRows];
};

template <typename T>
struct Delta {
  const T *q, *k, *v;
  const void *g, *beta;
  float* state;
  T* out;
  Slots at;
  i64 S, G, H, K, V, q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head;
  bool channels, wide_g, wide_beta;
  float scale, norm_eps;
  bool invariant;

  static float number(const void* of, bool wide, i64 index) {
    return wide ? static_cast<const float*>(of)[index] : to_float(static_cast<const T*>(of)[index]);
  }
  i64 padded() const { return ceil_div(K, kLanes) * kLanes; }

  // The row of floats, and zeros up to a full vector.
  void widen(const T* from, float* to) const {
    widen_row(from, K, to);
    std::fill(to + K, to + padded(), 0.0f);
  }

  void decays(i64 t, i64 h, float* to) const {
    if (!channels) {
      std::fill(to, to + padded(), std::exp(number(g, wide_g, t * g_token + h * g_head)));
      return;
    }
    const i64 from = t * g_token + h * g_head;
    if (wide_g)
      std::copy_n(static_cast<const float*>(g) + from, K, to);
    else
      widen_row(static_cast<const T*>(g) + from, K, to);
    std::fill(to + K, to + padded(), 0.0f);
    for (i64 i = 0; i < padded(); i += kLanes) store_vec(to + i, exp2_vec<true>(1.442695041f * load_vec(to + i)));
  }

  // `count` tokens from t on, at most kMost; the others change nothing.
  template <int kMost>
  void share_out(i64 t, i64 count, i64 h, Work& work, Shared& shared) const {
    const i64 key_head = h / (H / G), width = padded();
    Reg sums[16] = {};
    for (int i = 0; i < kMost; i++) {
      if (i >= count) {
        std::fill_n(work.k[i], width, 0.0f);
        std::fill_n(work.q[i], width, 0.0f);
        std::fill_n(work.decay[i], width, 1.0f);
        shared.beta[i] = 0;
        continue;
      }
      widen(k + (t + i) * k_token + key_head * k_head, work.k[i]);
      widen(q + (t + i) * q_token + key_head * q_head, work.q[i]);
      decays(t + i, h, work.decay[i]);
      shared.beta[i] = number(beta, wide_beta, (t + i) * beta_token + h * beta_head);
      if (norm_eps > 0)
        for (i64 j = 0; j < width; j += kRegLanes) {
          const Reg a = load_reg(work.k[i] + j), b = load_reg(work.q[i] + j);
          sums[i] += a * a;
          sums[kTokens + i] += b * b;
        }
    }
    float by[16];
    if (norm_eps > 0) {
      add_all(sums, by);
      for (int i = 0; i < 2 * kTokens; i++) by[i] = 1.0f / std::sqrt(by[i] + norm_eps);
    } else {
      std::fill_n(by, 2 * kTokens, 1.0f);
    }
    for (int i = 0; i < kMost; i++) by[kTokens + i] *= scale;

    std::fill_n(sums, 16, Reg{});
    for (i64 j = 0; j < width; j += kRegLanes) {
      Reg passed = Reg{} + 1.0f, before[kTokens];
      int pair = 0;
#pragma GCC unroll 4
      for (int i = 0; i < kMost; i++) {
        const Reg decay = load_reg(work.decay[i] + j);
        const Reg key = load_reg(work.k[i] + j) * by[i], query = load_reg(work.q[i] + j) * by[kTokens + i];
        passed *= decay;
        store_reg(shared.seen_k[i] + j, key * passed);
        store_reg(shared.seen_q[i] + j, query * passed);
#pragma GCC unroll 4
        for (int e = 0; e < i; e++) {
          before[e] *= decay;
          sums[pair++] += key * before[e];
          sums[pair++] += query * before[e];
        }
        before[i] = key;
        sums[pair++] += query * key;
      }
#pragma GCC unroll 4
      for (int i = 0; i < kMost; i++) store_reg(shared.added[i] + j, before[i]);
      store_reg(shared.kept + j, passed);
    }
    float products[16];
    add_all(sums, products);
    int pair = 0;
    for (int i = 0; i < kMost; i++) {
      for (int e = 0; e < i; e++) {
        shared.k_k[i][e] = products[pair++];
        shared.q_k[i][e] = products[pair++];
      }
      shared.q_k[i][i] = products[pair++];
    }
  }

  // What was added by the tokens before goes into the state; `now`, if any, multiplies it. rows: of the scratch, [K][kSide].
  template <bool kNow>
  void pass(float* rows, const Shared& then, const Shared& now, const float* deltas, Reg k_sums[kTokens][kWide],
            Reg q_sums[kTokens][kWide]) const {
    Reg delta[kTokens][kWide], by_k[kTokens][kWide] = {}, by_q[kTokens][kWide] = {};
    for (int i = 0; i < kTokens; i++)
      for (int n = 0; n < kWide; n++) delta[i][n] = load_reg(deltas + i * kRows + n * kRegLanes);
    for (i64 j = 0; j < K; j++) {
#pragma GCC unroll 2
      for (int n = 0; n < kWide; n++) {
        float* at = rows + j * kSide + n * kRegLanes;
        Reg s = load_reg(at) * then.kept[j];
#pragma GCC unroll 4
        for (int i = 0; i < kTokens; i++) s += delta[i][n] * then.added[i][j];
        store_reg(at, s);
        if constexpr (kNow) {
#pragma GCC unroll 4
          for (int i = 0; i < kTokens; i++) {
            by_k[i][n] += s * now.seen_k[i][j];
            by_q[i][n] += s * now.seen_q[i][j];
          }
        }
      }
    }
    if constexpr (kNow)
      for (int i = 0; i < kTokens; i++)
        for (int n = 0; n < kWide; n++) {
          k_sums[i][n] = by_k[i][n];
          q_sums[i][n] = by_q[i][n];
        }
  }

  void prompt(i64 s, i64 h, i64 first, i64 rows, Work& work) const {
    const i64 begin = at.first(s), n = at.count(s), place = (h * V + first) * K;
    std::fill_n(work.state, ceil_div(rows, kSide) * kSide * K, 0.0f);
    for (i64 r = 0; r < rows; r += kSide)
      turn(state + at.read(s) + place + r * K, K, std::min(kSide, rows - r), K, work.state + r * K, kSide);
    std::memset(work.deltas, 0, sizeof work.deltas);
    std::memset(work.values, 0, sizeof work.values);
    Shared* then = &work.shared[1];
    std::memset(then->added, 0, sizeof then->added);
    std::fill_n(then->kept, K, 1.0f);
    for (i64 from = 0; from < n; from += kTokens) {
      const i64 count = std::min<i64>(kTokens, n - from);
      Shared& now = work.shared[from / kTokens % 2];
      share_out<kTokens>(begin + from, count, h, work, now);
      for (i64 i = 0; i < count; i++)
        widen_row(v + (begin + from + i) * v_token + h * v_head + first, rows, work.values[i]);
      for (i64 r = 0; r < rows; r += kSide) {
        Reg k_sums[kTokens][kWide], q_sums[kTokens][kWide];
        pass<true>(work.state + r * K, *then, now, work.deltas[0] + r, k_sums, q_sums);
        for (int w = 0; w < kWide; w++) {
          const i64 lane = r + w * kRegLanes;
          Reg delta[kTokens];
#pragma GCC unroll 4
          for (int i = 0; i < kTokens; i++) {
            Reg old = k_sums[i][w], answer = q_sums[i][w];
#pragma GCC unroll 4
            for (int e = 0; e < i; e++) {
              old += delta[e] * now.k_k[i][e];
              answer += delta[e] * now.q_k[i][e];
            }
            delta[i] = (load_reg(work.values[i] + lane) - old) * now.beta[i];
            store_reg(work.outs[i] + lane, answer + delta[i] * now.q_k[i][i]);
          }
          for (int i = 0; i < kTokens; i++) store_reg(work.deltas[i] + lane, delta[i]);
        }
      }
      if (from > 0 && from == at.border(s))  // the state has all tokens before these
        for (i64 r = 0; r < rows; r += kSide)
          turn(work.state + r * K, kSide, K, std::min(kSide, rows - r), state + at.exported(s) + place + r * K, K);
      for (i64 i = 0; i < count; i++) put(begin + from + i, h, first, rows, work.outs[i]);
      then = &now;
    }
    float* to = state + at.written(s, n - 1) + place;
    for (i64 r = 0; r < rows; r += kSide) {
      pass<false>(work.state + r * K, *then, *then, work.deltas[0] + r, nullptr, nullptr);
      turn(work.state + r * K, kSide, K, std::min(kSide, rows - r), to + r * K, K);
    }
  }

  void steps(i64 s, i64 h, i64 first, i64 rows, Work& work) const {
    const i64 begin = at.first(s), n = at.count(s), place = (h * V + first) * K;
    const float* from = state + at.read(s) + place;
    Shared& now = work.shared[0];
    for (i64 i = 0; i < n; i++) {
      const i64 entry = at.written(s, i);
      float* to = entry >= 0 ? state + entry + place : work.state;
      share_out<1>(begin + i, 1, h, work, now);
      widen_row(v + (begin + i) * v_token + h * v_head + first, rows, work.values[0]);
      for (i64 r = 0; r < rows; r += 8) {
        const i64 few = std::min<i64>(8, rows - r);
        Reg sums[16] = {};
        for (i64 row = 0; row < few; row++) {
          const float* numbers = from + (r + row) * K;
          Reg by_k{}, by_q{};
          for (i64 j = 0; j < K; j += kRegLanes) {
            const Reg x = load_reg(numbers + j, K - j);
            by_k += x * load_reg(now.seen_k[0] + j);
            by_q += x * load_reg(now.seen_q[0] + j);
          }
          sums[row] = by_k;
          sums[8 + row] = by_q;
        }
        float products[16];
        add_all(sums, products);
        for (i64 row = 0; row < few; row++) {
          const float* numbers = from + (r + row) * K;
          const float delta = (work.values[0][r + row] - products[row]) * now.beta[0];
          work.outs[0][r + row] = products[8 + row] + delta * now.q_k[0][0];
          for (i64 j = 0; j < K; j += kRegLanes) {
            const Reg x = load_reg(numbers + j, K - j) * load_reg(now.kept + j) + delta * load_reg(now.added[0] + j);
            store_reg(to + (r + row) * K + j, x, K - j);
          }
        }
      }
      put(begin + i, h, first, rows, work.outs[0]);
      from = to;
    }
  }

  void put(i64 t, i64 h, i64 first, i64 rows, const float* from) const {
    T* to = out + (t * H + h) * V + first;
    i64 r = 0;
    for (; r + 8 <= rows; r += 8) store8(to + r, load8(from + r));
    for (; r < rows; r++) store(to + r, from[r]);
  }

  void run() const {
    const i64 blocks = ceil_div(V, kRows), items = S * H * blocks;
#pragma omp parallel if (i64(at.query_start_loc[S]) * H * V * K > kMinWork)
    {
      static thread_local Scratch scratch;
      Work& work = *scratch.get<Work>(1);
#pragma omp for schedule(dynamic, 1)
      for (i64 item = 0; item < items; item++) {
        const i64 s = item / (H * blocks), h = item / blocks % H, first = item % blocks * kRows;
        const i64 n = at.count(s), rows = std::min(kRows, V - first);
        if (n == 0) continue;
        if (invariant || n <= at.versions)
          steps(s, h, first, rows, work);
        else
          prompt(s, h, first, rows, work);
      }
    }
  }
};

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_GATED_DELTA(name, T)                                                                             \
  extern "C" void name(                                                                                           \
      const void* q, const void* k, const void* v, const void* g, const void* beta, void* state, void* out,       \
      const void* query_start_loc, const void* slots, const void* state_versions, const void* exports,            \
      std::int64_t S, std::int64_t G,                                                                             \
      std::int64_t H, std::int64_t K, std::int64_t V, std::int64_t q_token, std::int64_t q_head,                  \
      std::int64_t k_token, std::int64_t k_head, std::int64_t v_token, std::int64_t v_head, std::int64_t g_token, \
      std::int64_t g_head, std::int64_t beta_token, std::int64_t beta_head, std::int64_t versions,                \
      std::int64_t slot_stride, std::int64_t version_stride, std::int64_t channels, std::int64_t wide_g,          \
      std::int64_t wide_beta, double scale, double norm_eps, std::int64_t invariant) {                            \
    using Number = graphllm::T;                                                                                   \
    using Ids = const std::int32_t*;                                                                              \
    graphllm::Delta<Number>{static_cast<const Number*>(q), static_cast<const Number*>(k),                         \
                            static_cast<const Number*>(v), g, beta, static_cast<float*>(state),                   \
                            static_cast<Number*>(out),                                                            \
                            {static_cast<Ids>(query_start_loc), static_cast<Ids>(slots),                          \
                             static_cast<Ids>(state_versions), versions, slot_stride, version_stride,             \
                             static_cast<Ids>(exports)},                                                          \
                            S, G, H, K, V, q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head,    \
                            beta_token, beta_head, channels != 0, wide_g != 0, wide_beta != 0, float(scale),      \
                            float(norm_eps), invariant != 0}                                                      \
        .run();                                                                                                   \
  }                                                                                                               \
  GRAPHLLM_KERNEL(name)

GRAPHLLM_GATED_DELTA(graphllm_gated_delta_f32, f32)
GRAPHLLM_GATED_DELTA(graphllm_gated_delta_bf16, bf16)
