// rejection_sample: sample, with the row's draft as often as that changes no distribution.
#include "cpu/calls.h"
#include "cpu/sampling.h"

namespace graphllm {
namespace {

template <typename T>
struct Args {
  const T* logits;
  const float* temperature;
  const std::int32_t* top_k;
  const float *top_p, *min_p;
  const std::int64_t* seed;
  const std::int32_t* sample_index;
  const std::int32_t *drafts, *slots, *place;
  const float* probs;  // [N, K, V], null without
  std::int32_t* out;
  i64 S, V, K, stride, slot_stride, place_stride;
  double threshold, alpha, synthetic;
};

template <typename T>
std::int32_t choose(const Args<T>& a, i64 r, Best top) {
  constexpr float kMost = std::numeric_limits<float>::max();
  const std::int32_t x = a.drafts[r] < a.V ? a.drafts[r] : -1;
  if (top.value == kNothing) return -1;
  const std::int64_t seed = a.seed[r];
  const std::int32_t index = a.sample_index[r];
  const float coin = Numbers(seed, index)(a.V)[0];
  if (x >= 0 && a.synthetic > 0 && coin < a.synthetic) return x;
  if (a.temperature[r] <= 0 || std::fabs(top.value) > kMost) return std::int32_t(top.index);
  const Row<T> row(a.logits + r * a.stride, a.V, a.temperature[r], top);
  const float low = row.lowest(a.top_k[r], a.top_p[r], a.min_p[r]);
  if (x >= 0 && (a.probs || a.threshold > 0)) {
    double spread = 0;
    const double mass = row.mass(low, a.probs ? nullptr : &spread);
    const float off = row.off(x), p = off >= low ? float(std::exp(double(off)) / mass) : 0.0f;
    if (a.probs) {
      const i64 place = std::min<i64>(std::max(a.place[r], 0), a.K - 1);
      const float* q = a.probs + a.slots[r] * a.slot_stride + place * a.place_stride;
      if (coin * q[x] < p) return x;
      const i64 token = row.draw_residual(low, mass, q, seed, index);
      if (token >= 0) return std::int32_t(token);
    } else {
      const double entropy = std::log(mass) - spread / mass;
      if (p > 0 && p >= std::min(a.threshold, a.alpha * std::exp(-entropy))) return x;
    }
  }
  return std::int32_t(row.draw(low, seed, index));
}

template <typename T>
void rejection_sample(const Args<T>& a) {
  const i64 threads = std::min<i64>(omp_get_max_threads(), std::max<i64>(1, a.S * a.V / kMinWork));
  const i64 parts = a.S >= threads ? 1 : threads;
  static thread_local Scratch memory;
  Best* tops = memory.get<Best>(a.S * parts);
#pragma omp parallel num_threads(int(threads))
  {
    find_tops(a.logits, a.S, a.V, a.stride, parts, tops);
#pragma omp for schedule(dynamic, 1)
    for (i64 r = 0; r < a.S; r++) a.out[r] = choose(a, r, best_of(tops + r * parts, parts));
  }
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_REJECTION_SAMPLE(name, T)                                                                          \
  extern "C" void name(const void* logits, const void* temperature, const void* top_k, const void* top_p,           \
                       const void* min_p, const void* seed, const void* sample_index, const void* drafts,           \
                       const void* slots, const void* place, const void* probs, void* out, std::int64_t S,          \
                       std::int64_t V, std::int64_t K, std::int64_t stride, std::int64_t slot_stride,               \
                       std::int64_t place_stride, double threshold, double alpha, double synthetic) {               \
    using namespace graphllm;                                                                                       \
    using Int = const std::int32_t*;                                                                                \
    using Float = const float*;                                                                                     \
    rejection_sample<T>({static_cast<const T*>(logits), Float(temperature), Int(top_k), Float(top_p), Float(min_p), \
                         static_cast<const std::int64_t*>(seed), Int(sample_index), Int(drafts), Int(slots),        \
                         Int(place), Float(probs), static_cast<std::int32_t*>(out), S, V, K, stride, slot_stride,   \
                         place_stride, threshold, alpha, synthetic});                                               \
  }                                                                                                                 \
  GRAPHLLM_KERNEL(name)

GRAPHLLM_REJECTION_SAMPLE(graphllm_rejection_sample_f32, f32)
GRAPHLLM_REJECTION_SAMPLE(graphllm_rejection_sample_bf16, bf16)
