// What bench/probe.py measures the machine with: how fast memory is read, how fast bfloat16 products are, what an
// empty parallel region costs.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/amx.h"
#include "cpu/vectors.h"

namespace {

using Line = std::int64_t __attribute__((vector_size(64)));  // two registers where they have 32 bytes

Line load(const char* from) {
  Line out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

std::int64_t added(Line sum) {
  std::int64_t out = 0;
  for (int i = 0; i < 8; i++) out += sum[i];
  return out;
}

}  // namespace

// Sums `bytes` of memory: each thread reads four streams and asks for each line 1 KB ahead, which reads fastest here.
extern "C" std::int64_t probe_read(const char* from, std::int64_t bytes) {
  std::int64_t total = 0;
#pragma omp parallel reduction(+ : total)
  {
    const std::int64_t share = bytes / omp_get_num_threads() / 4096 * 4096, stream = share / 4;
    const char* mine = from + omp_get_thread_num() * share;
    Line sum{};
    for (std::int64_t i = 0; i < stream; i += 128)
      for (int s = 0; s < 4; s++) {
        const char* at = mine + s * stream + i;
        __builtin_prefetch(at + 1024);
        __builtin_prefetch(at + 1088);
        sum += load(at);
        sum += load(at + 64);
      }
    total += added(sum);
  }
  return total;
}

// Sums `count` pieces of memory of `bytes` each, at multiples of `bytes` in the given order, as a paged cache would be read
// at best: line after line, each line asked for 8 KB ahead.
extern "C" std::int64_t probe_pages(const char* from, const std::int32_t* order, std::int64_t count, std::int64_t bytes) {
  std::int64_t total = 0;
#pragma omp parallel reduction(+ : total)
  {
    const std::int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    const std::int64_t first = count * me / threads, last = count * (me + 1) / threads;
    const std::int64_t pages = 8192 / bytes, rest = 8192 % bytes;  // ahead
    Line sum{};
    for (std::int64_t i = first; i < last; i++) {
      const char* at = from + order[i] * bytes;
      const char* next = from + order[std::min(last - 1, i + pages)] * bytes + rest;
      const char* after = from + order[std::min(last - 1, i + pages + 1)] * bytes + rest - bytes;
      for (std::int64_t o = 0; o < bytes; o += 64) {
        __builtin_prefetch((o + rest < bytes ? next : after) + o);
        sum += load(at + o);
      }
    }
    total += added(sum);
  }
  return total;
}

// Products from the first-level cache, as the inner loop of a product of bfloat16 matrices does them: with AMX of two tiles
// times two, with AVX-512 of pairs, 14 rows of one operand times 32 columns of the other, else of floats, six times 16.
// Returns how many floating-point operations all threads did.
extern "C" double probe_products(std::int64_t rounds) {
  double total = 0;
#ifdef GRAPHLLM_AMX
  using namespace graphllm;
  if (amx_granted()) {
#pragma omp parallel reduction(+ : total)
    {
      constexpr int kSteps = 4;
      alignas(64) static thread_local std::uint16_t operands[4 * kSteps][512];
      for (auto& tile : operands)
        for (int i = 0; i < 512; i++) tile[i] = std::uint16_t(0x3C00 + (i * 2654435761u >> 23));  // zeros cost less power
      Tiles configured;
      tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
      for (std::int64_t round = 0; round < rounds; round++)
        for (int k = 0; k < 4 * kSteps; k += 4) {
          tile_load<4>(operands[k], 64), tile_load<5>(operands[k + 1], 64);
          tile_load<6>(operands[k + 2], 64), tile_load<7>(operands[k + 3], 64);
          tile_product<0, 4, 6>(), tile_product<1, 4, 7>(), tile_product<2, 5, 6>(), tile_product<3, 5, 7>();
        }
      total += double(rounds) * kSteps * 4 * 2 * 16 * 16 * 32;
    }
    return total;
  }
#endif
#pragma omp parallel reduction(+ : total)
  {
    constexpr int kDepth = 64;
#ifdef GRAPHLLM_AVX512
    alignas(64) static thread_local std::int32_t left[14][kDepth];
    alignas(64) static thread_local std::int32_t right[kDepth][2][16];
    __m512 sum[28];
#pragma GCC unroll 28
    for (int i = 0; i < 28; i++) sum[i] = _mm512_setzero_ps();
    for (std::int64_t round = 0; round < rounds; round++) {
      asm volatile("" ::"r"(left), "r"(right) : "memory");  // they are what no compiler knows
      for (int k = 0; k < kDepth; k++) {
        const __m512bh a = (__m512bh)_mm512_load_si512(right[k][0]), b = (__m512bh)_mm512_load_si512(right[k][1]);
#pragma GCC unroll 14
        for (int r = 0; r < 14; r++) {
          const __m512bh x = (__m512bh)_mm512_set1_epi32(left[r][k]);
          sum[2 * r] = _mm512_dpbf16_ps(sum[2 * r], x, a);
          sum[2 * r + 1] = _mm512_dpbf16_ps(sum[2 * r + 1], x, b);
        }
      }
    }
#pragma GCC unroll 28
    for (int i = 0; i < 28; i++) asm volatile("" ::"v"(sum[i]));
    total += double(rounds) * kDepth * 28 * 64;
#else
    using graphllm::Eight;
    static thread_local float left[6][kDepth];
    alignas(64) static thread_local Eight right[kDepth][2];
    Eight sum[12];
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) sum[i] = Eight{};
    for (std::int64_t round = 0; round < rounds; round++) {
      asm volatile("" ::"r"(left), "r"(right) : "memory");
      for (int k = 0; k < kDepth; k++) {
        const Eight a = right[k][0], b = right[k][1];
#pragma GCC unroll 6
        for (int r = 0; r < 6; r++) {
          const Eight x = left[r][k] - Eight{};
          sum[2 * r] += x * a;
          sum[2 * r + 1] += x * b;
        }
      }
    }
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) asm volatile("" ::"x"(sum[i]));
    total += double(rounds) * kDepth * 12 * 16;
#endif
  }
  return total;
}

// The median time in nanoseconds of an empty parallel region, `gap` microseconds of one thread's work after the last.
extern "C" double probe_region(std::int64_t count, std::int64_t gap) {
  std::vector<double> times;
  for (std::int64_t i = 0; i < count; i++) {
    const double start = omp_get_wtime();
#pragma omp parallel
    asm volatile("" ::: "memory");
    const double end = omp_get_wtime();
    times.push_back(end - start);
    while (omp_get_wtime() < end + double(gap) * 1e-6) {
    }
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e9;
}
