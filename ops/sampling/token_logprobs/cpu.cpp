// token_logprobs: the softmax's sum, a token's rank and the k largest logits of each wanted row.
//
// Rows are cut into parts, so that few of them keep all threads busy; a part gives its maximum, its sum relative to that, how
// many logits beat the scored token's, and its k largest in order. Then the parts of a row are merged. Parts are always as long,
// so that a row's sum does not depend on how many others, or threads, there are.
#include <cmath>
#include <limits>

#include "cpu/calls.h"
#include "cpu/threads.h"
#include "cpu/vectors.h"

namespace graphllm {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504088896341f;
constexpr i64 kMinWork = 64 << 10;  // logits below which a second thread is not worth waking
constexpr i64 kPart = 16 << 10;     // logits of a part

// Sixteen logits: -inf for NaN and beyond the count.
template <typename T>
inline Vec load_logits(const T* from, i64 count) {
#ifdef GRAPHLLM_AVX512
  const __mmask16 inside = first16(count);
  const Vec x = (Vec)_mm512_mask_mov_ps(_mm512_set1_ps(kNothing), inside, load16(from, inside));
#else
  Vec x = vec(kNothing);
  if (count >= kLanes)
    for (i64 i = 0; i < kLanes; i++) x[i] = to_float(from[i]);
  else
    for (i64 i = 0; i < count; i++) x[i] = to_float(from[i]);
#endif
  return x == x ? x : vec(kNothing);
}

template <typename T>
inline float number(T logit) {
  const float x = to_float(logit);
  return x == x ? x : kNothing;
}

struct Token {
  float value;
  std::int32_t id;
};

// The k largest of the tokens offered, largest first. Offered by rising id, so ties stay in order.
struct Largest {
  Token* tokens;
  i64 k, count;
  bool open() const { return count < k; }
  float bound() const { return k ? tokens[count - 1].value : std::numeric_limits<float>::infinity(); }
  void offer(Token t) {
    if (!open() && !(t.value > bound())) return;
    i64 at = open() ? count++ : count - 1;
    for (; at > 0 && tokens[at - 1].value < t.value; at--) tokens[at] = tokens[at - 1];
    tokens[at] = t;
  }
};

struct Part {
  float top;
  double sum;  // of exp(logit - top)
  i64 larger, count;
};

template <typename T>
Part look_at(const T* logits, i64 from, i64 to, float scored, Largest best) {
  Vec tops = vec(kNothing);
  for (i64 i = from; i < to; i += kLanes) tops = larger(tops, load_logits(logits + i, to - i));
  Part out{kNothing, 0, 0, 0};
  for (i64 lane = 0; lane < kLanes; lane++) out.top = std::max(out.top, tops[lane]);

  const float shift = out.top > kNothing ? out.top : 0.0f;
  Vec sum{};
  Ints above{};
  auto add_up = [&] {
    for (i64 lane = 0; lane < kLanes; lane++) out.sum += sum[lane], out.larger -= above[lane];
    sum = Vec{}, above = Ints{};
  };
  constexpr i64 kStep = 4 * kLanes;  // logits among which a new one of the largest is rare
  for (i64 i = from, step = 1; i < to; i += kStep, step++) {
    const i64 end = std::min(to, i + kStep);
    Vec most = vec(kNothing);
    for (i64 j = i; j < end; j += kLanes) {
      const Vec x = load_logits(logits + j, to - j);
      sum += exp2_vec<true>((x - shift) * kLog2e);
      above += x > scored;
      most = larger(most, x);
    }
    if (best.open() || bits(most > best.bound()))
      for (i64 j = i; j < end; j++) best.offer({number(logits[j]), std::int32_t(j)});
    if (step % 16 == 0) add_up();
  }
  add_up();
  out.count = best.count;
  return out;
}

template <typename T>
struct Args {
  const T* logits;
  const std::int32_t *tokens, *target, *wanted;
  float* out;
  i64 S, V, stride, k;

  i64 token(i64 s) const { return target[s] >= 0 ? target[s] : tokens[s]; }
  float scored(i64 s) const {
    return token(s) < 0 ? kNothing : number(logits[s * stride + token(s)]);
  }
};

template <typename T>
void merge(const Args<T>& a, i64 s, const Part* parts, const Token* tokens, i64* heads, i64 count) {
  float top = kNothing;
  double sum = 0;
  i64 above = 0;
  for (i64 p = 0; p < count; p++) top = std::max(top, parts[p].top);
  for (i64 p = 0; p < count; p++) {
    if (parts[p].top > kNothing) sum += parts[p].sum * std::exp(double(parts[p].top) - double(top));
    above += parts[p].larger;
    heads[p] = 0;
  }
  const float log_sum = float(std::log(sum));
  auto logprob = [&](float x) { return x > kNothing ? (x - top) - log_sum : kNothing; };
  float* out = a.out + s * (2 + 2 * a.k);
  out[0] = logprob(a.scored(s));
  out[1] = float(a.token(s) < 0 ? a.V : 1 + above);
  for (i64 n = 0; n < a.k; n++) {
    const Token* best = nullptr;
    i64 from = 0;
    for (i64 p = 0; p < count; p++) {
      const Token* t = tokens + p * a.k + heads[p];
      if (heads[p] < parts[p].count && (!best || t->value > best->value)) best = t, from = p;
    }
    out[2 + n] = best ? logprob(best->value) : kNothing;
    out[2 + a.k + n] = best ? float(best->id) : 0.0f;
    if (best) heads[from]++;
  }
}

template <typename T>
void token_logprobs(const Args<T>& a) {
  const i64 threads = std::min<i64>(omp_get_max_threads(), std::max<i64>(1, a.S * a.V / kMinWork));
  const i64 count = ceil_div(a.V, kPart);
  static thread_local Scratch part_memory, token_memory, head_memory;
  Part* parts = part_memory.get<Part>(a.S * count);
  Token* tokens = token_memory.get<Token>(a.S * count * a.k);
  i64* heads = head_memory.get<i64>(a.S * count);
#pragma omp parallel num_threads(int(threads))
  {
#pragma omp for schedule(dynamic, 1)
    for (i64 n = 0; n < a.S * count; n++) {
      const i64 s = n / count, from = n % count * kPart;
      if (a.wanted[s] < 0) continue;
      parts[n] = look_at(a.logits + s * a.stride, from, std::min(a.V, from + kPart), a.scored(s),
                         Largest{tokens + n * a.k, a.k, 0});
    }
#pragma omp for schedule(dynamic, 1)
    for (i64 s = 0; s < a.S; s++) {
      if (a.wanted[s] < 0)
        std::fill_n(a.out + s * (2 + 2 * a.k), 2 + 2 * a.k, 0.0f);
      else
        merge(a, s, parts + s * count, tokens + s * count * a.k, heads + s * count, count);
    }
  }
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_TOKEN_LOGPROBS(name, T)                                                                            \
  extern "C" void name(const void* logits, const void* tokens, const void* target, const void* wanted, void* out,  \
                       std::int64_t S, std::int64_t V, std::int64_t stride, std::int64_t k) {                       \
    using namespace graphllm;                                                                                       \
    token_logprobs<T>({static_cast<const T*>(logits), static_cast<const std::int32_t*>(tokens),                     \
                       static_cast<const std::int32_t*>(target), static_cast<const std::int32_t*>(wanted),          \
                       static_cast<float*>(out), S, V, stride, k});                                                 \
  }                                                                                                                 \
  GRAPHLLM_KERNEL(name)

GRAPHLLM_TOKEN_LOGPROBS(graphllm_token_logprobs_f32, f32)
GRAPHLLM_TOKEN_LOGPROBS(graphllm_token_logprobs_bf16, bf16)
