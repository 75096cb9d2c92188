// linear: out [M, N] = x [M, K] times weight [N, K] transposed, plus bias [N]; all bfloat16, float32 inside.
//
// Weights stay in PyTorch's row-major layout, one copy for everything, and threads take contiguous ranges of weight
// rows. Few rows of x: the time is that of reading the weights once, so everything serves the memory stream: dot products,
// some weight rows at a time, or AMX with 16 weight rows as the left operand, loaded straight from memory, and x, which is
// small, packed once per thread as the right operand. Many rows: weights packed on the way, a panel at a time.
#include "cpu/calls.h"
#include "cpu/few_rows.h"
#include "cpu/many_rows.h"
#include "cpu/tiles.h"

namespace graphllm {
namespace {

constexpr i64 kBlockRows = 128;        // rows of x that AMX multiplies without packing weights
constexpr i64 kPartBytes = 256 << 10;  // of weights that a thread takes at least at a time for few rows of x
constexpr i64 kMinBytes = 128 << 10;   // less weight than this is not worth waking another thread

// The outputs `mine`, with a gate, from the outputs of both halves of the weight, [M, N].
void gate(const Product& a, Range mine, const bf16* halves) {
  const i64 half = a.N / 2;
  for (i64 m = 0; m < a.M; m++)
    for (i64 n = mine.from; n < mine.to; n += kRun) {
      const bf16* from = halves + m * a.N + n;
      bf16* to = a.out + m * a.out_stride + n;
#ifdef GRAPHLLM_AVX512
      const __mmask16 valid = first16(mine.to - n);
      store16(to, _mm512_mul_ps(silu(load16(from, valid)), load16(from + half, valid)), valid);
#else
      store_first(to, silu(load8(from)) * load8(from + half), mine.to - n);
#endif
    }
}

void many(const Product& a) {
  with_tile(a, [&](auto tile, const auto& pack) { panels_by_thread<typename decltype(tile)::Kind>(a, pack); });
}

// Each row of x computed independently of the others, by all threads. blocks: of kDotBlock weight rows.
void invariant_rows(const Product& a, Shares& blocks) {
#ifdef GRAPHLLM_AMX
  if (amx_granted()) return a.M <= kBlockRows ? amx<1>(a, share(ceil_div(a.N, kRows))) : many(a);
#endif
  const FewRows few(a, true);
  blocks.each([&](Range part) { few({part.from * kDotBlock, std::min(a.N, part.to * kDotBlock)}); });
}

// Few rows of x, with a gate, by all threads. both: the product without it. blocks: of kDotBlock weight rows of a half.
void gated_few(const Product& a, const Product& both, Shares& blocks, bf16* halves) {
  const i64 half = a.N / 2;
#ifdef GRAPHLLM_AMX
  if (a.M > 1 && amx_granted()) {
    amx(both, share(ceil_div(a.N, kRows)));
#pragma omp barrier
    return gate(a, share(half), halves);
  }
#endif
  const FewRows few(both);
  blocks.each([&](Range part) {
    const Range mine{part.from * kDotBlock, std::min(half, part.to * kDotBlock)};
    for (i64 start : {i64(0), half}) few({start + mine.from, start + mine.to});
    gate(a, mine, halves);
  });
}

// Threads that this much weight is worth waking.
int threads_for(const Product& a) {
  return int(std::min<i64>(omp_get_max_threads(), std::max<i64>(1, a.N * a.K * 2 / kMinBytes)));
}

// How many items of these weight rows a thread takes at least at a time.
i64 part(const Product& a, i64 rows) { return std::max<i64>(1, kPartBytes / (rows * a.K * 2)); }

}  // namespace
}  // namespace graphllm

extern "C" void graphllm_linear(const void* x, const void* weight, const void* bias, void* out, std::int64_t M,
                                std::int64_t N, std::int64_t K, std::int64_t x_stride, std::int64_t weight_stride,
                                std::int64_t invariant) {
  using namespace graphllm;
  if (M <= 0 || N <= 0) return;
  const Product a{static_cast<const bf16*>(x), static_cast<const bf16*>(weight), static_cast<const bf16*>(bias),
               static_cast<bf16*>(out), M, N, K, x_stride, weight_stride, N, false};
  Shares blocks(ceil_div(N, kDotBlock), part(a, kDotBlock), threads_for(a));
#pragma omp parallel num_threads(threads_for(a))
  {
    if (invariant)
      invariant_rows(a, blocks);
    else
#if defined(GRAPHLLM_AMX)
    if (M > 1 && M <= kBlockRows && amx_granted())
      amx(a, share(ceil_div(N, kRows)));
    else
#endif
    if (M <= kDotRows) {
      const FewRows few(a);
      blocks.each([&](Range part) { few({part.from * kDotBlock, std::min(N, part.to * kDotBlock)}); });
    } else {
      many(a);
    }
  }
}
GRAPHLLM_KERNEL(graphllm_linear)

// The same with a weight [2 N, K] that holds a gate and a value half: out [M, N] = silu(gate) * value.
extern "C" void graphllm_linear_gated(const void* x, const void* weight, const void* bias, void* out, std::int64_t M,
                                      std::int64_t N, std::int64_t K, std::int64_t x_stride,
                                      std::int64_t weight_stride, std::int64_t invariant) {
  using namespace graphllm;
  if (M <= 0 || N <= 0) return;
  static thread_local Scratch scratch;
  const Product a{static_cast<const bf16*>(x), static_cast<const bf16*>(weight), static_cast<const bf16*>(bias),
               static_cast<bf16*>(out), M, 2 * N, K, x_stride, weight_stride, N, true};
  const bool few = M <= kDotRows;
  bf16* halves = few || invariant ? scratch.get<bf16>(M * a.N) : nullptr;
  Product both = a;
  both.out = halves, both.out_stride = a.N, both.gated = false;
  Shares blocks(ceil_div(invariant ? a.N : N, kDotBlock), part(a, (invariant ? 1 : 2) * kDotBlock), threads_for(a));
#pragma omp parallel num_threads(threads_for(a))
  {
    if (invariant) {
      invariant_rows(both, blocks);
#pragma omp barrier
      gate(a, share(N), halves);
    } else {
      few ? gated_few(a, both, blocks, halves) : many(a);
    }
  }
}
GRAPHLLM_KERNEL(graphllm_linear_gated)
