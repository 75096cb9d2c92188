// Blocks as tiles, while weights are loaded: what graphllm/ops/encodings/gguf_blocks.py specifies.
#pragma once

#include <algorithm>

#include "cpu/integers/formats.h"

namespace graphllm {
namespace {

// Of a block. bits: as gguf_blocks.py has them.
struct Field {
  i64 nbytes, unit, bits;
};

inline std::uint32_t bits_in_tile(std::uint32_t entries) {
#ifdef __BMI2__
  std::uint32_t out = 0;
  for (int q = 0; q < 4; q++) out |= _pext_u32(entries, 0x11111111u << q) << (8 * q);
  return out;
#else
  std::uint32_t out = 0;
  for (int e = 0; e < 32; e++) out |= (entries >> e & 1) << (e % 4 * 8 + e / 4);
  return out;
#endif
}

template <typename Unit>
void interleave(const std::uint8_t* from, i64 stride, i64 rows, i64 nbytes, bool bits, std::uint8_t* to) {
  for (i64 at = 0; at < nbytes; at += sizeof(Unit))
    for (i64 r = 0; r < kRows; r++, to += sizeof(Unit)) {
      Unit unit = 0;
      if (r < rows) std::memcpy(&unit, from + r * stride + at, sizeof unit);
      if (bits) unit = Unit(bits_in_tile(std::uint32_t(unit)));
      std::memcpy(to, &unit, sizeof unit);
    }
}

// Rows of `blocks` blocks each into tiles.
void make_tiles(const std::uint8_t* from, std::uint8_t* to, i64 rows, i64 blocks, const Field* fields, i64 count) {
  i64 nbytes = 0;
  for (i64 f = 0; f < count; f++) nbytes += fields[f].nbytes;
  for (i64 row = 0; row < rows; row += kRows)
    for (i64 b = 0; b < blocks; b++) {
      const std::uint8_t* at = from + (row * blocks + b) * nbytes;
      for (i64 f = 0; f < count; at += fields[f].nbytes, to += kRows * fields[f].nbytes, f++) {
        const Field& field = fields[f];
        const auto all = field.unit == 4 ? interleave<std::uint32_t> : field.unit == 2 ? interleave<std::uint16_t> : interleave<std::uint8_t>;
        all(at, blocks * nbytes, std::min(kRows, rows - row), field.nbytes, field.bits, to);
      }
    }
}

}  // namespace
}  // namespace graphllm
