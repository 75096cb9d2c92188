// keep_path: copies rows of the cache, and the scales after all rows of a block's head where there are some.
#include <cstdint>
#include <cstring>

#include "cpu/calls.h"

extern "C" void graphllm_keep_path(void* cache, const void* table, const void* starts, const void* lengths,
                                   const void* path, const void* kept, std::int64_t S, std::int64_t heads,
                                   std::int64_t P, std::int64_t nodes, std::int64_t table_stride, std::int64_t block,
                                   std::int64_t head, std::int64_t row, std::int64_t scale) {
  using Ints = const std::int32_t*;
  for (std::int64_t s = 0; s < S; s++) {
    const std::int64_t count = Ints(starts)[s + 1] - Ints(starts)[s], start = Ints(lengths)[s] - count;
    const Ints blocks = Ints(table) + s * table_stride, nodes_kept = Ints(path) + s * nodes;
    for (std::int64_t d = 1; count > 0 && d < Ints(kept)[s]; d++) {
      const std::int64_t from = start + nodes_kept[d], to = start + d;
      if (from == to) continue;
      const char* source = static_cast<const char*>(cache) + blocks[from / P] * block;
      char* target = static_cast<char*>(cache) + blocks[to / P] * block;
      for (std::int64_t h = 0; h < heads; h++, source += head, target += head) {
        std::memcpy(target + to % P * row, source + from % P * row, row);
        if (scale) std::memcpy(target + P * row + to % P * scale, source + P * row + from % P * scale, scale);
      }
    }
  }
}
GRAPHLLM_KERNEL(graphllm_keep_path)
