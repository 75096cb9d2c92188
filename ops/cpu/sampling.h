// What sample and rejection_sample share: a row of logits, what its filters keep, and the race among that.
//
// No row is sorted. All comparisons are made on off = logit / temperature - maximum, in float32 as the reference has it.
// top-k and top-p need only the tokens near the maximum: those within a reach are collected, the reach is widened until
// it suffices, and a radix select on the float's bits finds the last token kept. The draw is an exponential race; a token
// can win only if its uniform number is below exp(off - best so far), so almost none needs logarithms.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/threads.h"
#include "cpu/vectors.h"

namespace graphllm {
namespace {

using Bits = Wide<kRegLanes>::Words;

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLeast = -std::numeric_limits<float>::max();
constexpr float kLog2e = 1.44269504088896341f;
constexpr i64 kMinWork = 64 << 10;  // logits below which a second thread is not worth waking

template <typename T>
inline Reg load_logits(const T* from, i64 count) {
#ifdef GRAPHLLM_AVX512
  if (count >= kRegLanes) return (Reg)load16(from);
  const __mmask16 inside = first16(count);
  return (Reg)_mm512_mask_mov_ps(_mm512_set1_ps(kNothing), inside, load16(from, inside));
#else
  if (count >= kRegLanes) return load8(from);
  Reg out = Reg{} + kNothing;
  for (i64 i = 0; i < count; i++) out[i] = to_float(from[i]);
  return out;
#endif
}

struct Best {
  float value = kNothing;
  i64 index = 0;
  void offer(float v, i64 i) {
    if (v > value || (v == value && i < index)) *this = {v, i};
  }
};

inline unsigned above(Reg x, float bound) {
#ifdef GRAPHLLM_AVX512
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(bound), _CMP_GT_OQ);
#else
  return bits(x > bound);
#endif
}

// The largest logit of [from, to) and the lowest index that has it; NaN never wins. The maximum rises seldom, so four
// vectors at a time are only compared with it.
template <typename T>
Best largest(const T* logits, i64 from, i64 to) {
  Best out{kNothing, from};
  for (i64 i = from; i < to; i += 4 * kRegLanes) {
    Reg x[4];
    unsigned higher = 0;
    for (i64 n = 0; n < 4; n++) {
      const i64 left = to - i - n * kRegLanes;
      x[n] = left > 0 ? load_logits(logits + i + n * kRegLanes, left) : Reg{} + kNothing;
      higher |= above(x[n], out.value);
    }
    if (!higher) continue;
    for (i64 n = 0; n < 4; n++)
      for (i64 lane = 0; lane < kRegLanes; lane++)
        if (x[n][lane] > out.value) out = {x[n][lane], i + n * kRegLanes + lane};
  }
  return out;
}

inline Bits mix(Bits x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}
inline std::uint32_t mix(std::uint32_t x) { return mix(Bits{x})[0]; }

// (bits + 1/2) / 2^32, rounded as float32 arithmetic rounds it, and below 1.
inline Reg uniform(Bits bits) {
#ifdef GRAPHLLM_AVX512
  const Reg x = (Reg)_mm512_cvtepu32_ps((__m512i)bits);
#else
  // AVX2 converts signed integers only; two halves add up to the same number, rounded once, before anything is added.
  const Reg x = kept(__builtin_convertvector((RegInts)(bits >> 16), Reg) * 65536.0f +
                     __builtin_convertvector((RegInts)(bits & 0xFFFF), Reg));
#endif
  const Reg u = (x + 0.5f) * 0x1p-32f, most = Reg{} + (1 - 0x1p-24f);
  return u < most ? u : most;
}

// The random numbers of a row, by token.
class Numbers {
 public:
  Numbers(std::int64_t seed, std::int32_t sample_index) {
    const std::uint32_t low_half = std::uint32_t(seed), high_half = std::uint32_t(seed >> 32);
    key_ = mix(std::uint32_t(sample_index) ^ mix(low_half ^ mix(high_half)));
    for (i64 i = 0; i < kRegLanes; i++) lanes_[i] = std::uint32_t(i);
  }
  Reg operator()(i64 first) const { return uniform(mix((lanes_ + std::uint32_t(first)) * 0x9E3779B9u + key_)); }

 private:
  std::uint32_t key_;
  Bits lanes_;
};

// Scratch of one thread for one row: distances below the maximum, their weights, and room to select among them.
struct Candidates {
  float *distance, *weight, *part, *part_weight;
  i64 count;
};

// The distance at which the summed weights, going up from distance 0, first reach `target`. Three digits of the float's
// bits, which order like the number; weights null counts. One select leaves the candidates as they are.
float select(const Candidates& c, const float* weights, double target) {
  const float *distance = c.distance, *weight = weights;
  i64 count = c.count;
  std::uint32_t found = 0;
  double before = 0;
  for (int shift : {20, 9, 0}) {
    const std::uint32_t digits = shift == 0 ? 0x1FF : 0x7FF;
    double sums[2048] = {};
    auto digit = [&](i64 i) {
      std::uint32_t bits;
      std::memcpy(&bits, distance + i, 4);
      return (bits >> shift) & digits;
    };
    for (i64 i = 0; i < count; i++) sums[digit(i)] += weight ? weight[i] : 1.0f;
    // Where rounding keeps the sum below the target to the end, the last weight that is not zero counts as reaching it.
    std::uint32_t chosen = 0;
    double chosen_before = before, total = before;
    for (std::uint32_t d = 0; d <= digits; d++) {
      if (sums[d] <= 0) continue;
      chosen = d, chosen_before = total, total += sums[d];
      if (total >= target) break;
    }
    before = chosen_before;
    found |= chosen << shift;
    i64 kept = 0;
    for (i64 i = 0; i < count; i++)
      if (digit(i) == chosen) {
        const float w = weight ? weight[i] : 1.0f;
        c.part[kept] = distance[i], c.part_weight[kept] = w;
        kept++;
      }
    distance = c.part, count = kept;
    if (weight) weight = c.part_weight;
  }
  float out;
  std::memcpy(&out, &found, 4);
  return out;
}

template <typename T>
class Row {
 public:
  Row(const T* logits, i64 V, float temperature, Best top)
      : logits_(logits), V_(V), temperature_(temperature), top_(top), scaled_top_(top.value / temperature) {}

  // The lowest `off` that min-p, top-k and top-p keep; above that of banned tokens, which have a logit of -inf.
  float lowest(i64 k, float p, float min_p) const {
    const float low = min_p > 0 ? std::min(0.0f, std::log(min_p)) : kLeast;
    const bool by_count = k > 0 && k < V_, by_mass = p < 1;
    if (!by_count && !by_mass) return low;
    Candidates c = scratch();
    double whole = 0;  // the mass of all that min-p keeps
    for (float reach = 8;; reach = reach < 30 ? reach * 2 : -kNothing) {
      const float floor = std::max(low, -reach);
      const bool all = floor == low;
      collect(floor, low, c, by_mass && !by_count && whole == 0 ? &whole : nullptr);
      if (by_count && c.count < k && !all) continue;
      float kept = by_count && c.count > k ? select(c, nullptr, double(k)) : -floor;
      if (!by_mass) return std::max(low, by_count && c.count <= k ? low : -kept);
      double mass = 0, tied = 0;
      i64 closer = 0;
      for (i64 i = 0; i < c.count; i++) {
        mass += c.distance[i] < kept ? c.weight[i] : 0.0f;
        closer += c.distance[i] < kept;
        if (c.distance[i] == kept) tied = c.weight[i];
      }
      if (by_count) {
        // Of tokens tied with the k-th only as many count as make k.
        mass += tied * double(std::min(k, c.count) - closer);
      } else {
        for (i64 i = 0; i < c.count; i++) mass += c.distance[i] == kept ? c.weight[i] : 0.0f;
        if (mass < p * whole * (1 + 1e-6) && !all) continue;
        mass = whole;
      }
      const float cut = -select(c, c.weight, p * mass);
      return std::max(cut, by_count && c.count <= k ? low : by_count ? -kept : low);
    }
  }

  float off(i64 token) const { return to_float(logits_[token]) / temperature_ - scaled_top_; }

  // The sum of exp(off) over tokens with off >= low, and that of off exp(off) in `spread`, where it is given.
  double mass(float low, double* spread) const {
    double whole = 0;
    const float floor = coarse(low);
    for (i64 i = 0; i < V_; i += kRegLanes) {
      const Reg x = load_logits(logits_ + i, V_ - i);
      if (!bits(x >= floor)) continue;
      const Reg off = offset(x), weight = off >= low ? exp2_vec<true>(off * kLog2e) : Reg{};
      for (i64 lane = 0; lane < kRegLanes; lane++) {
        whole += weight[lane];
        if (spread && weight[lane] > 0) *spread += double(off[lane]) * weight[lane];
      }
    }
    return whole;
  }

  // The winner of the race by max(0, exp(off) / mass - q) among tokens with off >= low; -1 where that is nowhere above 0.
  i64 draw_residual(float low, double mass, const float* q, std::int64_t seed, std::int32_t sample_index) const {
    const Numbers numbers(seed, sample_index);
    Best best{kNothing, -1};
    const float floor = coarse(low), share = float(1 / mass);
    for (i64 i = 0; i < V_; i += kRegLanes) {
      const Reg x = load_logits(logits_ + i, V_ - i);
      if (!bits(x >= floor)) continue;
      const Reg off = offset(x), p = exp2_vec<true>(off * kLog2e) * share, u = numbers(i);
      Reg drafted{};
      std::memcpy(&drafted, q + i, sizeof(float) * std::min<i64>(kRegLanes, V_ - i));
      const Reg left = p - drafted;
      const float room = best.index < 0 ? std::numeric_limits<float>::max() : std::exp(-best.value) * 1.01f;
      unsigned runners = bits((off >= low) & (left > 0.0f) & (u < left * room));
      for (; runners; runners &= runners - 1) {
        const i64 lane = __builtin_ctz(runners);
        const float value = std::log(left[lane]) - std::log(-std::log1p(-u[lane]));
        if (best.index < 0) best = {value, i + lane};
        best.offer(value, i + lane);
      }
    }
    return best.index;
  }

  // The winner of the race among tokens with off >= low.
  i64 draw(float low, std::int64_t seed, std::int32_t sample_index) const {
    const Numbers numbers(seed, sample_index);
    auto race = [](float off, float u) { return off - std::log(-std::log1p(-u)); };

    const i64 first = top_.index / kRegLanes * kRegLanes;
    Best best{race(0.0f, numbers(first)[top_.index - first]), top_.index};
    const float floor = coarse(low);
    for (i64 i = 0; i < V_; i += kRegLanes) {
      const Reg x = load_logits(logits_ + i, V_ - i);
      if (!bits(x >= floor)) continue;
      const Reg off = offset(x), u = numbers(i);
      const Reg ahead = off - best.value, limit = exp2_vec<false>((ahead < 0.0f ? ahead : Reg{}) * kLog2e) * 1.01f;
      unsigned runners = bits((off >= low) & (u < limit));
      for (; runners; runners &= runners - 1) {
        const i64 lane = __builtin_ctz(runners);
        best.offer(race(off[lane], u[lane]), i + lane);
      }
    }
    return best.index;
  }

 private:
  Reg offset(Reg logits) const {
#ifdef GRAPHLLM_AVX512
    return (Reg)_mm512_sub_ps(_mm512_div_ps((__m512)logits, _mm512_set1_ps(temperature_)), _mm512_set1_ps(scaled_top_));
#else
    return logits / temperature_ - scaled_top_;
#endif
  }
  // A logit below which `offset` is certainly below `off`: spares the division for most tokens.
  float coarse(float off) const {
    const float slack = 1e-5f * temperature_ * (std::fabs(scaled_top_) + std::fabs(off));
    return std::max(kLeast, (scaled_top_ + off) * temperature_ - slack);
  }

  Candidates scratch() const {
    static thread_local Scratch memory;
    const i64 room = V_ + kRegLanes;
    float* at = memory.get<float>(4 * room);
    return {at, at + room, at + 2 * room, at + 3 * room, 0};
  }

  // All tokens with off >= floor as distances -off with weights exp(off); in `whole` the weights of those >= low.
  void collect(float floor, float low, Candidates& c, double* whole) const {
    const float coarse_floor = coarse(floor), coarse_low = coarse(low);
    c.count = 0;
    Reg sum{};
    for (i64 i = 0; i < V_; i += kRegLanes) {
      const Reg x = load_logits(logits_ + i, V_ - i);
      const bool near = bits(x >= coarse_floor);
      if (!near && !(whole && bits(x >= coarse_low))) continue;
      const Reg off = offset(x), weight = exp2_vec<true>(off * kLog2e);
      if (whole) sum += off >= low ? weight : Reg{};
      if (near) append(off, weight, bits(off >= floor), c);
      if (whole && i / kRegLanes % 64 == 63) add_up(sum, whole);
    }
    if (whole) add_up(sum, whole);
  }
  static void add_up(Reg& sum, double* whole) {
    for (i64 i = 0; i < kRegLanes; i++) *whole += sum[i];
    sum = Reg{};
  }
  static void append(Reg off, Reg weight, unsigned kept, Candidates& c) {
#ifdef GRAPHLLM_AVX512
    _mm512_storeu_ps(c.distance + c.count, _mm512_maskz_compress_ps(__mmask16(kept), (__m512)(0.0f - off)));
    _mm512_storeu_ps(c.weight + c.count, _mm512_maskz_compress_ps(__mmask16(kept), (__m512)weight));
    c.count += __builtin_popcount(kept);
#else
    for (; kept; kept &= kept - 1, c.count++) {
      c.distance[c.count] = 0.0f - off[__builtin_ctz(kept)];
      c.weight[c.count] = weight[__builtin_ctz(kept)];
    }
#endif
  }

  const T* logits_;
  i64 V_;
  float temperature_;
  Best top_;
  float scaled_top_;
};

// The largest logit of every row, in as many parts as keep all threads busy: tops [S, parts]. To be called by all threads
// of a team.
template <typename T>
void find_tops(const T* logits, i64 S, i64 V, i64 stride, i64 parts, Best* tops) {
  const i64 size = ceil_div(ceil_div(V, parts), kRegLanes) * kRegLanes;
#pragma omp for schedule(dynamic, 1)
  for (i64 n = 0; n < S * parts; n++) {
    const i64 from = std::min(V, n % parts * size);
    tops[n] = largest(logits + n / parts * stride, from, std::min(V, from + size));
  }
}

inline Best best_of(const Best* tops, i64 parts) {
  Best top{kNothing, 0};
  for (i64 part = 0; part < parts; part++)
    if (tops[part].value > top.value) top = tops[part];
  return top;
}

}  // namespace
}  // namespace graphllm
