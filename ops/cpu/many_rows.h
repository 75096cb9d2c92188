// Many rows of x: weights as they lie, packed on the way into the panels of cpu/panels.h.
#pragma once

#include "cpu/panels.h"

namespace graphllm {
namespace {

#ifdef GRAPHLLM_AVX512

// A panel for k in [k0, k0 + depth), zero where its rows end.
void pack_panel(const Product& a, const Panel& panel, i64 k0, i64 depth, bf16* to) {
  for (i64 k = 0; k < depth; k += 32) {
    const __mmask32 inside = first32(std::max<i64>(0, a.K - k0 - k));
    for (i64 half = 0; half < 2; half++) {
      const bf16* from = a.weight + panel.row[half] * a.weight_stride + k0 + k;
      __m512i r[16];
      for (i64 i = 0; i < 16; i++)
        r[i] = i < panel.valid[half] ? (__m512i)load_pairs(from + i * a.weight_stride, inside) : _mm512_setzero_si512();
      transpose16(r);
      for (i64 p = 0; p < 16; p++) _mm512_store_si512(to + (k / 2 + p) * 2 * kPanel + half * 32, r[p]);
    }
  }
}

#else  // GRAPHLLM_AVX512

// Weights for k in [k0, k0 + depth), eight rows of eight transposed at a time.
void pack_panel(const Product& a, const Panel& panel, i64 k0, i64 depth, float* to) {
  depth = std::min(depth, a.K - k0);
  for (i64 h = 0; h < 2; h++) {
    const bf16* from = a.weight + panel.row[h] * a.weight_stride + k0;
    i64 k = 0;
    if (panel.valid[h] == kRun)
      for (; k + 8 <= depth; k += 8) {
        Eight r[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) r[i] = load8(from + i * a.weight_stride + k);
        transpose8(r);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) store8(to + (k + i) * kPanel + h * kRun, r[i]);
      }
    for (; k < depth; k++)
      for (i64 i = 0; i < kRun; i++)
        to[k * kPanel + h * kRun + i] = i < panel.valid[h] ? to_float(from[i * a.weight_stride + k]) : 0.0f;
  }
}

#endif

// The kind of tile that suits this machine, as a type that a generic lambda takes.
template <typename Tile>
struct TileOf {
  using Kind = Tile;
};

// run(TileOf<...>, pack) with this machine's tile and what packs panels of the product's weight.
template <typename Run>
void with_tile(const Product& a, const Run& run) {
  const auto pack = [&](const Panel& panel, i64 k0, i64 depth, auto* to) { pack_panel(a, panel, k0, depth, to); };
#ifdef GRAPHLLM_AMX
  if (amx_granted()) return run(TileOf<AmxTile>(), pack);
#endif
#ifdef GRAPHLLM_AVX512
  run(TileOf<DotTile>(), pack);
#else
  run(TileOf<FloatTile>(), pack);
#endif
}

}  // namespace
}  // namespace graphllm
