// gguf_linear for one type of blocks: what its source declares.
#pragma once

#include "cpu/calls.h"
#include "cpu/integers/gguf_matrix.h"
#include "cpu/integers/linear.h"
#include "tiles.h"

#define GRAPHLLM_GGUF_LINEAR_OF(name, format, T)                                                                     \
  extern "C" void graphllm_gguf_linear_##name(const void* x, const void* tiles, const void* bias, void* out,          \
                                              std::int64_t M, std::int64_t N, std::int64_t K, std::int64_t x_stride,  \
                                              std::int64_t gated) {                                                   \
    using namespace graphllm;                                                                                        \
    int_linear(IntProduct<T>{static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<T*>(out), M, N, K,    \
                             x_stride, gated != 0},                                                                   \
               TiledMatrix<format>{static_cast<const std::uint8_t*>(tiles), K});                                      \
  }                                                                                                                   \
  GRAPHLLM_KERNEL(graphllm_gguf_linear_##name)
#define GRAPHLLM_GGUF_LINEAR(name, format)          \
  GRAPHLLM_GGUF_LINEAR_OF(name##_bf16, format, bf16) \
  GRAPHLLM_GGUF_LINEAR_OF(name##_f32, format, f32)   \
  extern "C" void graphllm_gguf_tiles_##name(const void* blocks, void* tiles, std::int64_t rows, std::int64_t width,   \
                                             const void* fields, std::int64_t count) {                                 \
    using namespace graphllm;                                                                                        \
    make_tiles(static_cast<const std::uint8_t*>(blocks), static_cast<std::uint8_t*>(tiles), rows, width,              \
               static_cast<const Field*>(fields), count);                                                            \
  }                                                                                                                  \
  GRAPHLLM_KERNEL(graphllm_gguf_tiles_##name)
