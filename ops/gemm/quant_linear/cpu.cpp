// quant_linear: out [M, N] = x [M, K] times quantized weights [N, K] transposed, plus bias [N]; gated, [M, N / 2].
// op.py has the layout.
//
// The weights are one stream of 64-byte lines, each of four inner entries (int4: two times four) of 16 rows, and one of
// scales; cpu/integers/linear.h has how they are multiplied.
#include "cpu/calls.h"
#include "cpu/integers/linear.h"
#include "pack.h"

namespace graphllm {
namespace {

template <typename F>
struct Packed {
  using Format = F;
  const std::uint8_t* values;
  const bf16* scales;
  i64 inner;
  i64 groups = ceil_div(inner, F::group), block_bytes = groups * F::lines * kLine;

  template <int kM, int kBlocks>
  void multiply(i64 block, i64 apart, const char* x, i64, Vec* totals) const {
    block_rows<F, kM, kBlocks>(values + block * block_bytes, apart * block_bytes, scales + block * groups * kRows,
                               apart * groups * kRows, x, groups, totals);
  }
#ifdef GRAPHLLM_AMX
  void unpack(const Panel& panel, i64 k0, i64 depth, bf16* to) const {
    graphllm::unpack<F>({values, scales, inner}, panel, k0, depth, to);
  }
#endif
};

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_QUANT_LINEAR(name, bytes, T)                                                                       \
  extern "C" void graphllm_quant_linear_##name(                                                                     \
      const void* x, const void* values, const void* scales, const void* bias, void* out, std::int64_t M,           \
      std::int64_t N, std::int64_t K, std::int64_t x_stride, std::int64_t gated) {                                  \
    using namespace graphllm;                                                                                       \
    int_linear(IntProduct<T>{static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<T*>(out), M, N, K,  \
                             x_stride, gated != 0},                                                                 \
               Packed<bytes>{static_cast<const std::uint8_t*>(values), static_cast<const bf16*>(scales), K});       \
  }                                                                                                                 \
  GRAPHLLM_KERNEL(graphllm_quant_linear_##name)

GRAPHLLM_QUANT_LINEAR(int8_bf16, Int8, bf16)
GRAPHLLM_QUANT_LINEAR(int8_f32, Int8, f32)
GRAPHLLM_QUANT_LINEAR(int4_bf16, Int4, bf16)
GRAPHLLM_QUANT_LINEAR(int4_f32, Int4, f32)

// Rounding and packing of weights, see pack.h.
#define GRAPHLLM_PACK(name, format, T)                                                                                \
  extern "C" void graphllm_pack_##name(const void* numbers, void* values, void* scales, std::int64_t rows,            \
                                       std::int64_t inner, std::int64_t stride, std::int64_t groups, std::int64_t row, \
                                       std::int64_t entry) {                                                           \
    using namespace graphllm;                                                                                         \
    pack<format, T>(static_cast<const T*>(numbers), static_cast<std::uint8_t*>(values), static_cast<bf16*>(scales),    \
                    rows, inner, stride, groups, row, entry);                                                         \
  }                                                                                                                   \
  GRAPHLLM_KERNEL(graphllm_pack_##name)

GRAPHLLM_PACK(int8_bf16, Int8, bf16)
GRAPHLLM_PACK(int8_f32, Int8, f32)
GRAPHLLM_PACK(int4_bf16, Int4, bf16)
GRAPHLLM_PACK(int4_f32, Int4, f32)
