// process_logits: mask, bias and penalties on a row of logits, a chunk of the vocabulary at a time.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "cpu/calls.h"
#include "cpu/threads.h"

namespace graphllm {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr i64 kChunk = 4096;         // tokens; whole words of the mask, and their logits and counts fit the inner cache
constexpr i64 kMinWork = 128 << 10;  // logits below which a second thread is not worth waking
constexpr std::int32_t kInPrompt = 1 << 30;

template <typename T>
struct Args {
  const T* logits;
  const std::int32_t *slot, *mask_row, *mask, *bias_count;
  const float *repetition, *frequency, *presence;
  const std::int32_t *counts, *bias_token;
  const float* bias_value;
  const std::int32_t *drafts, *logits_indices, *place;
  const i64* ancestors;
  float* out;
  i64 S, V, logits_stride, mask_stride, counts_stride, token_stride, value_stride;
};

void ban(float* x, i64 count, const std::int32_t* mask) {
  for (i64 i = 0; i < count; i += 32, mask++) {
    const std::uint32_t word = std::uint32_t(*mask);
    if (word == ~0u) continue;
    const i64 bits = std::min<i64>(32, count - i);
    for (i64 b = 0; b < bits; b++) x[i + b] = (word >> b) & 1 ? x[i + b] : kNothing;
  }
}

float penalized(float x, std::int32_t count, float repetition, float frequency, float presence) {
  const std::int32_t times = count & (kInPrompt - 1);
  const float scaled = x > 0 ? x / repetition : x * repetition;
  const float y = (count ? scaled : x) - frequency * float(times);
  return y - (times > 0 ? presence : 0.0f);
}

void penalize(float* x, i64 count, const std::int32_t* counts, float repetition, float frequency, float presence) {
  constexpr i64 kBlock = 64;
  for (i64 i = 0; i < count; i += kBlock) {
    const i64 to = std::min(count, i + kBlock);
    std::int32_t any = 0;
    for (i64 j = i; j < to; j++) any |= counts[j];
    if (!any) continue;  // a text uses few of the tokens
    for (i64 j = i; j < to; j++) x[j] = penalized(x[j], counts[j], repetition, frequency, presence);
  }
}

template <typename T>
void adjust(const Args<T>& a, i64 s, i64 from, i64 to) {
  const T* logits = a.logits + s * a.logits_stride;
  float* out = a.out + s * a.V;
  for (i64 i = from; i < to; i++) out[i] = to_float(logits[i]);
  const i64 slot = a.slot[s];
  if (a.mask_row[s] >= 0) ban(out + from, to - from, a.mask + a.mask_row[s] * a.mask_stride + from / 32);
  for (i64 n = 0; n < a.bias_count[s]; n++) {
    const i64 token = a.bias_token[slot * a.token_stride + n];
    if (from <= token && token < to) out[token] += a.bias_value[slot * a.value_stride + n];
  }
  const float repetition = a.repetition[s], frequency = a.frequency[s], presence = a.presence[s];
  if (repetition == 1 && frequency == 0 && presence == 0) return;
  const std::int32_t* counts = a.counts + slot * a.counts_stride;
  const i64 place = a.place[s];
  const std::int32_t* drafts = a.drafts + a.logits_indices[s] + 1 - place;
  const i64 bits = a.ancestors ? a.ancestors[a.logits_indices[s]] : -1;
  const auto before = [&](i64 i) { return bits < 0 || bits >> (i + 1) & 1; };
  std::vector<std::pair<std::int32_t, float>> drafted;  // the drafts of this chunk, and their logits so far
  for (i64 i = 0; i < place; i++)
    if (before(i) && from <= drafts[i] && drafts[i] < to) drafted.emplace_back(drafts[i], out[drafts[i]]);
  penalize(out + from, to - from, counts + from, repetition, frequency, presence);
  for (const auto& [token, x] : drafted) {
    std::int32_t more = 0;
    for (i64 i = 0; i < place; i++) more += before(i) && drafts[i] == token;
    out[token] = penalized(x, counts[token] + more, repetition, frequency, presence);
  }
}

template <typename T>
void adjust(const Args<T>& a) {
  const i64 threads = std::min<i64>(omp_get_max_threads(), std::max<i64>(1, a.S * a.V / kMinWork));
  const i64 chunks = ceil_div(a.V, kChunk);
#pragma omp parallel for num_threads(int(threads)) schedule(dynamic, 4)
  for (i64 n = 0; n < a.S * chunks; n++) {
    const i64 from = n % chunks * kChunk;
    adjust(a, n / chunks, from, std::min(a.V, from + kChunk));
  }
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_PROCESS_LOGITS(name, T)                                                                             \
  extern "C" void name(const void* logits, const void* slot, const void* mask_row, const void* mask,               \
                       const void* bias_count, const void* repetition, const void* frequency, const void* presence, \
                       const void* counts, const void* bias_token, const void* bias_value, const void* drafts,       \
                       const void* logits_indices, const void* place, const void* ancestors, void* out,            \
                       std::int64_t S, std::int64_t V, std::int64_t logits_stride, std::int64_t mask_stride,        \
                       std::int64_t counts_stride, std::int64_t token_stride, std::int64_t value_stride) {          \
    using namespace graphllm;                                                                                       \
    using Int = const std::int32_t*;                                                                                \
    using Float = const float*;                                                                                     \
    adjust<T>({static_cast<const T*>(logits), Int(slot), Int(mask_row), Int(mask), Int(bias_count),                 \
               Float(repetition), Float(frequency), Float(presence), Int(counts), Int(bias_token),                  \
               Float(bias_value), Int(drafts), Int(logits_indices), Int(place),                                      \
               static_cast<const i64*>(ancestors), static_cast<float*>(out), S, V,                                  \
               logits_stride, mask_stride, counts_stride, token_stride, value_stride});                             \
  }                                                                                                                 \
  GRAPHLLM_KERNEL(name)

GRAPHLLM_PROCESS_LOGITS(graphllm_process_logits_f32, f32)
GRAPHLLM_PROCESS_LOGITS(graphllm_process_logits_bf16, bf16)
