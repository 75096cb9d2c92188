// gguf_embedding: out [T, D], rows `ids` of a table in tiles of GGUF blocks.
#include "cpu/calls.h"
#include "cpu/integers/gguf_matrix.h"
#include "cpu/threads.h"

namespace graphllm {
namespace {

constexpr i64 kOwnRows = 16;  // fewer are not worth waking another thread

template <typename F, typename T>
void gguf_embedding(const std::int32_t* ids, const std::uint8_t* tiles, T* out, i64 count, i64 D) {
  const TiledMatrix<F> table{tiles, D};
  const i64 threads = std::min<i64>(omp_get_max_threads(), std::max<i64>(1, count / kOwnRows));
#pragma omp parallel num_threads(int(threads))
  {
    const Range mine = share(count);
    for (i64 t = mine.from; t < mine.to; t++) table.row(ids[t], out + t * D);
  }
}

}  // namespace
}  // namespace graphllm

#define GRAPHLLM_GGUF_EMBEDDING_OF(name, format, T)                                                                  \
  extern "C" void graphllm_gguf_embedding_##name(const void* ids, const void* tiles, void* out, std::int64_t count,   \
                                                 std::int64_t D) {                                                    \
    using namespace graphllm;                                                                                        \
    gguf_embedding<format, T>(static_cast<const std::int32_t*>(ids), static_cast<const std::uint8_t*>(tiles),         \
                              static_cast<T*>(out), count, D);                                                        \
  }                                                                                                                   \
  GRAPHLLM_KERNEL(graphllm_gguf_embedding_##name)
#define GRAPHLLM_GGUF_EMBEDDING(name, format)          \
  GRAPHLLM_GGUF_EMBEDDING_OF(name##_bf16, format, bf16) \
  GRAPHLLM_GGUF_EMBEDDING_OF(name##_f32, format, f32)

GRAPHLLM_GGUF_EMBEDDING(q8_0, Q8_0)
GRAPHLLM_GGUF_EMBEDDING(q4_0, Q4_0)
GRAPHLLM_GGUF_EMBEDDING(q4_1, Q4_1)
GRAPHLLM_GGUF_EMBEDDING(q5_0, Q5_0)
GRAPHLLM_GGUF_EMBEDDING(q5_1, Q5_1)
GRAPHLLM_GGUF_EMBEDDING(q4_k, Q4_K)
GRAPHLLM_GGUF_EMBEDDING(q5_k, Q5_K)
GRAPHLLM_GGUF_EMBEDDING(q6_k, Q6_K)
