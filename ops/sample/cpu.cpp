// sample on the CPU: one pass for greedy rows; thresholds by histogram selection instead of a sort for the others.
//
// The random bits and the meaning of every parameter are those of op.py. Rows go to threads one by one; a few rows of a
// large vocabulary would leave threads idle, but at 150 k tokens a row takes well under a millisecond.
#include <vector>

#include "cpu_common.h"

namespace graphllm {
namespace {

using u32 = std::uint32_t;
constexpr float kDropped = -std::numeric_limits<float>::infinity();
constexpr int kBins = 4096;  // sign, exponent and three mantissa bits of a non-positive float
constexpr int kShift = 20;

inline u32 mix32(u32 x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// Logits below or at 0 after the maximum is taken off: a larger value has a smaller key.
inline u32 key(float off) {
  float positive = 0.0f - off;
  u32 bits;
  std::memcpy(&bits, &positive, 4);
  return bits & 0x7FFFFFFF;
}

struct Row {
  float* off;  // [V] (logit - largest) / temperature, kDropped where a token is out
  i64 V;
  u32 counts[kBins];
  double mass[kBins];
  std::vector<float> bin;

  void histogram() {
    std::fill(counts, counts + kBins, 0u);
    std::fill(mass, mass + kBins, 0.0);
    for (i64 v = 0; v < V; v++) {
      if (off[v] == kDropped) continue;
      const u32 b = key(off[v]) >> kShift;
      counts[b]++;
      mass[b] += exp_fast(off[v]);
    }
  }

  // The tokens of one bin, largest first.
  const std::vector<float>& sorted_bin(u32 b) {
    bin.clear();
    for (i64 v = 0; v < V; v++)
      if (off[v] != kDropped && key(off[v]) >> kShift == b) bin.push_back(off[v]);
    std::sort(bin.begin(), bin.end(), std::greater<float>());
    return bin;
  }

  void drop_below(float threshold) {
    for (i64 v = 0; v < V; v++)
      if (off[v] < threshold) off[v] = kDropped;
  }

  // The k-th largest value, or kDropped when fewer are left.
  float kth_largest(i64 k) {
    i64 above = 0;
    for (u32 b = 0; b < kBins; b++) {
      if (above + i64(counts[b]) >= k) return sorted_bin(b)[k - above - 1];
      above += counts[b];
    }
    return kDropped;
  }

  // The smallest value that the most likely tokens of mass ``p`` include, out of the ``limit`` largest.
  float nucleus(double p, i64 limit) {
    double total = 0.0, before = 0.0;
    i64 left = limit;
    for (u32 b = 0; b < kBins && left > 0; b++) {
      if (i64(counts[b]) <= left) {
        total += mass[b];
      } else {
        const auto& values = sorted_bin(b);
        for (i64 i = 0; i < left; i++) total += exp_fast(values[i]);
      }
      left -= counts[b];
    }
    const double wanted = p * total;
    left = limit;
    float last = 0.0f;
    for (u32 b = 0; b < kBins && left > 0; b++) {
      if (!counts[b]) continue;
      if (before + mass[b] < wanted && i64(counts[b]) < left) {  // all of this bin is inside, and more is wanted
        before += mass[b];
        left -= counts[b];
        last = kDropped;  // replaced by a value of a later bin
        continue;
      }
      for (float value : sorted_bin(b)) {
        if (before >= wanted || left == 0) return last == kDropped ? smallest_above(b) : last;
        last = value;
        before += exp_fast(value);
        left--;
      }
    }
    return last == kDropped ? smallest_above(kBins) : last;
  }

  // The smallest value in the bins before ``end``.
  float smallest_above(u32 end) {
    for (u32 b = end; b-- > 0;)
      if (counts[b]) return sorted_bin(b).back();
    return 0.0f;
  }
};

template <typename T>
int greedy(const T* logits, i64 V) {
  float best = kDropped;
  int at = 0;
  for (i64 v = 0; v < V; v++) {
    const float x = to_float(logits[v]);
    if (x > best) best = x, at = int(v);  // NaN compares false
  }
  return at;
}

// Exponential race: the token with the largest off - log(-log1p(-u)).
int race(const float* off, i64 V, u32 key) {
  float best = kDropped;
  int at = 0;
  float cut = 2.0f;  // a token needs u below this to win, because off is at most 0 and -log1p(-u) at least u
  for (i64 v = 0; v < V; v++) {
    const float u = (float(mix32(u32(v) * 0x9E3779B9u + key)) + 0.5f) * 2.3283064365386963e-10f;
    if (u > cut || off[v] == kDropped) continue;
    const float score = off[v] - std::log(-std::log1p(-u));
    if (score > best) {
      best = score, at = int(v);
      cut = std::exp(-best) * 1.0001f;
    }
  }
  return at;
}

template <typename T>
int draw(const T* logits, i64 V, float temperature, i64 k, float p, float min_p, u32 key) {
  thread_local Scratch scratch;
  static thread_local Row row;
  row.off = scratch.get<float>(V);
  row.V = V;
  float largest = kDropped;
  for (i64 v = 0; v < V; v++) {
    const float x = to_float(logits[v]);
    row.off[v] = x == x ? x / temperature : kDropped;
    largest = std::max(largest, row.off[v]);
  }
  if (largest == kDropped) return 0;
  const float least = std::log(min_p);
  for (i64 v = 0; v < V; v++) {
    const float off = row.off[v] - largest;
    row.off[v] = off < least ? kDropped : off;
  }
  const bool top_k = k > 0 && k < V;
  if (top_k || p < 1.0f) row.histogram();
  if (top_k) {
    // Ties with the k-th stay, but the nucleus is taken of exactly k values: so counts are not made anew.
    const float threshold = row.kth_largest(k);
    if (p < 1.0f) row.drop_below(std::max(threshold, row.nucleus(p, k)));
    else row.drop_below(threshold);
  } else if (p < 1.0f) {
    row.drop_below(row.nucleus(p, V));
  }
  return race(row.off, V, key);
}

template <typename T>
void sample(const T* logits, i64 stride, const float* temperature, const std::int32_t* k, const float* p,
            const float* min_p, const std::int64_t* seed, const std::int32_t* draws, std::int32_t* out, i64 S, i64 V) {
#pragma omp parallel for schedule(dynamic) if (S > 1)
  for (i64 s = 0; s < S; s++) {
    const T* row = logits + s * stride;
    if (!(temperature[s] > 0)) {
      out[s] = greedy(row, V);
      continue;
    }
    const u32 low = u32(seed[s]), high = u32(std::uint64_t(seed[s]) >> 32);
    const u32 key = mix32(u32(draws[s]) ^ mix32(low ^ mix32(high)));
    out[s] = draw(row, V, temperature[s], k[s], p[s], min_p[s], key);
  }
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_SAMPLE(name, type)                                                                                   \
  extern "C" void name(const void* logits, const float* temperature, const std::int32_t* k, const float* p,          \
                       const float* min_p, const std::int64_t* seed, const std::int32_t* draws, std::int32_t* out,   \
                       std::int64_t S, std::int64_t V, std::int64_t stride) {                                        \
    graphllm::sample((const graphllm::type*)logits, stride, temperature, k, p, min_p, seed, draws, out, S, V);       \
  }

namespace graphllm {
using f32 = float;
}
GRAPHLLM_SAMPLE(graphllm_sample_f32, f32)
GRAPHLLM_SAMPLE(graphllm_sample_bf16, bf16)
