// What bench/cpu_kernels.py measures the machine with: how fast memory is read, what an empty parallel region costs.
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <vector>

// Sums `bytes` of memory: each thread reads four streams and asks for each line 1 KB ahead, which reads fastest here.
extern "C" std::int64_t probe_read(const char* from, std::int64_t bytes) {
  std::int64_t total = 0;
#pragma omp parallel reduction(+ : total)
  {
    const std::int64_t share = bytes / omp_get_num_threads() / 4096 * 4096, stream = share / 4;
    const char* mine = from + omp_get_thread_num() * share;
    __m512i sum = _mm512_setzero_si512();
    for (std::int64_t i = 0; i < stream; i += 128)
      for (int s = 0; s < 4; s++) {
        const char* at = mine + s * stream + i;
        _mm_prefetch(at + 1024, _MM_HINT_T0);
        _mm_prefetch(at + 1088, _MM_HINT_T0);
        sum = _mm512_add_epi64(sum, _mm512_loadu_si512(at));
        sum = _mm512_add_epi64(sum, _mm512_loadu_si512(at + 64));
      }
    total += _mm512_reduce_add_epi64(sum);
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
