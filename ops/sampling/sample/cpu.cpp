// sample: one token per row of logits, greedy or drawn after min-p, top-k and top-p, with the random bits of the
// reference.
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
  std::int32_t* out;
  i64 S, V, stride;
};

template <typename T>
void sample(const Args<T>& a) {
  const i64 threads = std::min<i64>(omp_get_max_threads(), std::max<i64>(1, a.S * a.V / kMinWork));
  const i64 parts = a.S >= threads ? 1 : threads;
  static thread_local Scratch memory;
  Best* tops = memory.get<Best>(a.S * parts);
#pragma omp parallel num_threads(int(threads))
  {
    find_tops(a.logits, a.S, a.V, a.stride, parts, tops);
#pragma omp for schedule(dynamic, 1)
    for (i64 s = 0; s < a.S; s++) {
      const Best top = best_of(tops + s * parts, parts);
      i64 token = top.value > kNothing ? top.index : -1;
      if (a.temperature[s] > 0 && std::fabs(top.value) <= std::numeric_limits<float>::max()) {
        const Row<T> row(a.logits + s * a.stride, a.V, a.temperature[s], top);
        token = row.draw(row.lowest(a.top_k[s], a.top_p[s], a.min_p[s]), a.seed[s], a.sample_index[s]);
      }
      a.out[s] = std::int32_t(token);
    }
  }
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_SAMPLE(name, T)                                                                                    \
  extern "C" void name(const void* logits, const void* temperature, const void* top_k, const void* top_p,           \
                       const void* min_p, const void* seed, const void* sample_index, void* out,                    \
                       std::int64_t S, std::int64_t V, std::int64_t stride) {                                       \
    using namespace graphllm;                                                                                       \
    sample<T>({static_cast<const T*>(logits), static_cast<const float*>(temperature),                               \
               static_cast<const std::int32_t*>(top_k), static_cast<const float*>(top_p),                           \
               static_cast<const float*>(min_p), static_cast<const std::int64_t*>(seed),                            \
               static_cast<const std::int32_t*>(sample_index), static_cast<std::int32_t*>(out), S, V, stride});     \
  }                                                                                                                 \
  GRAPHLLM_KERNEL(name)

GRAPHLLM_SAMPLE(graphllm_sample_f32, f32)
GRAPHLLM_SAMPLE(graphllm_sample_bf16, bf16)
