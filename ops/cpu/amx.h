// AMX: leave to use it, the configuration of its tiles, and its instructions. Empty below that level.
#pragma once

#include "cpu/target.h"

#ifdef GRAPHLLM_AMX
#include <sys/syscall.h>
#include <unistd.h>

#include <array>

namespace graphllm {
namespace {

// The kernel grants AMX state to a process that asks once; containers may refuse it.
inline bool amx_granted() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return granted;
}

// Tile t has ``rows[t]`` rows of ``columns[t]`` 32-bit columns. The configuration is per thread and is released at the end of a
// kernel, so that context switches need not save 8 KB and oneDNN finds the state it expects.
class Tiles {
 public:
  using Sizes = std::array<int, 8>;
  static constexpr Sizes kWhole = {16, 16, 16, 16, 16, 16, 16, 16};

  explicit Tiles(const Sizes& columns = kWhole, const Sizes& rows = kWhole) {
    struct alignas(64) {
      std::uint8_t palette, start, reserved[14];
      std::uint16_t bytes_per_row[16];
      std::uint8_t rows[16];
    } config{};
    config.palette = 1;
    for (int t = 0; t < 8; t++) {
      config.rows[t] = std::uint8_t(rows[t]);
      config.bytes_per_row[t] = std::uint16_t(columns[t] * 4);
    }
    // gcc's own macro says that it reads eight bytes of it: the rest may not have been written then.
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
};

// The tile instructions by constant tile number. Unlike gcc's own macros they clobber memory, so that what is written to
// a buffer is there when a tile is loaded from it.
template <int kTile>
inline void tile_load(const void* from, i64 stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(kTile) : "memory");
}
template <int kTile>
inline void tile_store(void* to, i64 stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride_bytes), "i"(kTile) : "memory");
}
template <int kTile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
// kSum += kLeft (16 rows of 32 bf16) times kRight (16 rows of `columns` pairs of bf16).
template <int kSum, int kLeft, int kRight>
inline void tile_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}

}  // namespace
}  // namespace graphllm

#endif  // GRAPHLLM_AMX
