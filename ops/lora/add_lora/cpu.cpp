// add_lora: out [T, O] = y + (x A^T) B for the A [n rank, I] and B [rank, O] of each row's adapter; bfloat16, float32 inside.
//
// Rows are put in order of their adapters, in chunks of rows of one. First x A^T: some rows of A against some rows of x, each
// row of A read once a chunk. Then, all threads having met, blocks of columns of B, which a chunk keeps near.
#include <vector>

#include "cpu/calls.h"
#include "cpu/threads.h"
#include "cpu/vectors.h"

namespace graphllm {
namespace {

constexpr i64 kChunk = 32;            // rows of x of one adapter that are computed together
constexpr int kSide = 4;              // rows of x, and of A, in registers at a time
constexpr i64 kColumns = 4 * kRegLanes;  // of B in registers at a time
constexpr i64 kMinBytes = 64 << 10;   // less of the tables is not worth waking another thread
constexpr int kParts = 6;

struct Args {
  const bf16 *y, *x, *a, *b;
  const std::int32_t* ids;
  float* low;
  bf16* out;
  i64 T, I, O, R, rank, y_stride, x_stride;
  i64 widths[kParts];
};

// Rows `order[from, to)` have the adapter `id`.
struct Chunk {
  i64 id, from, to;
};

// Rows in the order of their adapters; those without one, or with one that there is not, come first, with id 0.
struct Grouped {
  std::vector<i64> order, ends;
  std::vector<Chunk> chunks;
  i64 adapters = 0;

  void fill(const std::int32_t* ids, i64 T, i64 L) {
    ends.assign(L + 1, 0), order.resize(T), chunks.clear(), adapters = 0;
    const auto id = [&](i64 t) { return ids[t] > 0 && ids[t] < L ? i64(ids[t]) : i64(0); };
    for (i64 t = 0; t < T; t++) ends[id(t) + 1]++;
    for (i64 l = 0; l < L; l++) {
      const i64 from = ends[l], to = ends[l] + ends[l + 1];
      for (i64 c = from; c < to; c += kChunk) chunks.push_back({l, c, std::min(to, c + kChunk)});
      adapters += l > 0 && to > from;
      ends[l + 1] = to;
    }
    for (i64 t = 0; t < T; t++) order[ends[id(t)]++] = t;
  }
};

#ifdef GRAPHLLM_AVX512

// Products of kM rows of x and kR rows of A: low[m][r].
template <int kM, int kR>
void dots(const bf16* const* x, const bf16* a, i64 I, float* const* low) {
  __m512 sums[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_ps();
  const auto add = [&](i64 k, __mmask32 inside) __attribute__((always_inline)) {
    __m512bh rows[kR];
#pragma GCC unroll 4
    for (int r = 0; r < kR; r++) rows[r] = load_pairs(a + r * I + k, inside);
#pragma GCC unroll 4
    for (int m = 0; m < kM; m++) {
      const __m512bh row = load_pairs(x[m] + k, inside);
#pragma GCC unroll 4
      for (int r = 0; r < kR; r++) sums[m * kR + r] = _mm512_dpbf16_ps(sums[m * kR + r], rows[r], row);
    }
  };
  i64 k = 0;
  for (; k + 32 <= I; k += 32) add(k, ~0u);
  if (k < I) add(k, first32(I - k));
  alignas(64) float out[16];
  _mm512_store_ps(out, add_lanes(sums));
  for (int m = 0; m < kM; m++) std::memcpy(low[m], out + m * kR, 4 * kR);
}

#else

template <int kM, int kR>
void dots(const bf16* const* x, const bf16* a, i64 I, float* const* low) {
  for (int m = 0; m < kM; m++) {
    Eight sums[4] = {};
    i64 k = 0;
    for (; k + 8 <= I; k += 8) {
      const Eight row = load8(x[m] + k);
#pragma GCC unroll 4
      for (int r = 0; r < kR; r++) sums[r] += row * load8(a + r * I + k);
    }
    for (int r = 0; r < kR; r++) {
      float sum = 0;
      for (int i = 0; i < 8; i++) sum += sums[r][i];
      for (i64 j = k; j < I; j++) sum += to_float(x[m][j]) * to_float(a[r * I + j]);
      low[m][r] = sum;
    }
  }
}

#endif

template <int kM>
void dots_of(int rows, const bf16* const* x, const bf16* a, i64 I, float* const* low) {
  if (rows == 4) return dots<kM, 4>(x, a, I, low);
  if (rows == 3) return dots<kM, 3>(x, a, I, low);
  rows == 2 ? dots<kM, 2>(x, a, I, low) : dots<kM, 1>(x, a, I, low);
}

// x A^T of a chunk for rows [from, from + count) of A, at most kSide.
void shrink(const Args& a, const Grouped& rows, const Chunk& chunk, i64 from, int count) {
  const bf16* table = a.a + (chunk.id * a.R + from) * a.I;
  for (i64 i = chunk.from; i < chunk.to; i += kSide) {
    const bf16* x[kSide];
    float* low[kSide];
    const int n = int(std::min<i64>(kSide, chunk.to - i));
    for (int m = 0; m < n; m++) {
      const i64 t = rows.order[i + m];
      x[m] = a.x + t * a.x_stride, low[m] = a.low + t * a.R + from;
    }
    if (n == 4) dots_of<4>(count, x, table, a.I, low);
    else if (n == 3) dots_of<3>(count, x, table, a.I, low);
    else if (n == 2) dots_of<2>(count, x, table, a.I, low);
    else dots_of<1>(count, x, table, a.I, low);
  }
}

inline Reg load_reg(const bf16* from) {
#ifdef GRAPHLLM_AVX512
  return (Reg)load16(from);
#else
  return load8(from);
#endif
}
inline void store_reg(bf16* to, Reg x) {
#ifdef GRAPHLLM_AVX512
  store16(to, (__m512)x, __mmask16(0xFFFF));
#else
  store8(to, x);
#endif
}

// kM rows plus their products with kColumns columns of B.
template <int kM>
void add_columns(const Args& a, const i64* t, const bf16* const* y, const bf16* b, i64 b_stride, i64 low_from,
                 bf16* const* out) {
  constexpr int kVectors = kColumns / kRegLanes;
  Reg sums[kM][kVectors];
  const float* low[kM];
#pragma GCC unroll 4
  for (int m = 0; m < kM; m++) {
    low[m] = a.low + t[m] * a.R + low_from;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) sums[m][v] = load_reg(y[m] + v * kRegLanes);
  }
  for (i64 j = 0; j < a.rank; j++, b += b_stride) {
    Reg values[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) values[v] = load_reg(b + v * kRegLanes);
#pragma GCC unroll 4
    for (int m = 0; m < kM; m++) {
      const float factor = low[m][j];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) sums[m][v] += factor * values[v];
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < kM; m++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) store_reg(out[m] + v * kRegLanes, sums[m][v]);
}

// The same for `count` columns from `column` on, fewer ones by way of copies.
template <int kM>
void some_columns(const Args& a, const i64* t, const bf16* b, i64 column, i64 count, i64 low_from) {
  const bf16* y[kM];
  bf16* out[kM];
  for (int m = 0; m < kM; m++) y[m] = a.y + t[m] * a.y_stride + column, out[m] = a.out + t[m] * a.O + column;
  if (count == kColumns) return add_columns<kM>(a, t, y, b, a.O, low_from, out);
  static thread_local Scratch scratch;
  bf16* copies = scratch.get<bf16>((a.rank + 2 * kM) * kColumns);
  std::memset(copies, 0, (a.rank + 2 * kM) * kColumns * sizeof(bf16));
  bf16* results[kM];
  for (i64 j = 0; j < a.rank; j++) std::memcpy(copies + j * kColumns, b + j * a.O, count * sizeof(bf16));
  for (int m = 0; m < kM; m++) {
    bf16* copy = copies + (a.rank + 2 * m) * kColumns;
    std::memcpy(copy, y[m], count * sizeof(bf16));
    y[m] = copy, results[m] = copy + kColumns;
  }
  add_columns<kM>(a, t, y, copies, kColumns, low_from, results);
  for (int m = 0; m < kM; m++) std::memcpy(out[m], results[m], count * sizeof(bf16));
}

// `count` columns from `column` on, at most kColumns and in the layer's matrix `part`, of a chunk.
void expand(const Args& a, const Grouped& rows, const Chunk& chunk, i64 part, i64 column, i64 count) {
  const bf16* b = a.b + chunk.id * a.rank * a.O + column;
  for (i64 i = chunk.from; i < chunk.to; i += kSide) {
    const i64* t = rows.order.data() + i;
    switch (std::min<i64>(kSide, chunk.to - i)) {
      case 4: some_columns<4>(a, t, b, column, count, part * a.rank); break;
      case 3: some_columns<3>(a, t, b, column, count, part * a.rank); break;
      case 2: some_columns<2>(a, t, b, column, count, part * a.rank); break;
      default: some_columns<1>(a, t, b, column, count, part * a.rank);
    }
  }
}

// Blocks of columns; none lies in two matrices.
struct Block {
  i64 part, column, count;
};

std::vector<Block> blocks_of(const Args& a) {
  std::vector<Block> found;
  i64 start = 0;
  for (i64 part = 0; part < kParts; start += a.widths[part++])
    for (i64 c = 0; c < a.widths[part]; c += kColumns)
      found.push_back({part, start + c, std::min(kColumns, a.widths[part] - c)});
  return found;
}

void copy_rows(const Args& a, const Grouped& rows, const Chunk& chunk) {
  for (i64 i = chunk.from; i < chunk.to; i++) {
    const i64 t = rows.order[i];
    std::memcpy(a.out + t * a.O, a.y + t * a.y_stride, a.O * sizeof(bf16));
  }
}

}  // namespace
}  // namespace graphllm

extern "C" void graphllm_add_lora(const void* y, const void* x, const void* a, const void* b, const void* ids, void* low,
                                  void* out, std::int64_t T, std::int64_t I, std::int64_t O, std::int64_t L,
                                  std::int64_t rank, std::int64_t y_stride, std::int64_t x_stride, std::int64_t w0,
                                  std::int64_t w1, std::int64_t w2, std::int64_t w3, std::int64_t w4, std::int64_t w5) {
  using namespace graphllm;
  if (T <= 0) return;
  i64 parts = 0;
  for (i64 w : {w0, w1, w2, w3, w4, w5}) parts += w > 0;
  const Args args{static_cast<const bf16*>(y), static_cast<const bf16*>(x), static_cast<const bf16*>(a),
                  static_cast<const bf16*>(b), static_cast<const std::int32_t*>(ids), static_cast<float*>(low),
                  static_cast<bf16*>(out), T, I, O, parts * rank, rank, y_stride, x_stride, {w0, w1, w2, w3, w4, w5}};
  static thread_local Grouped rows_of_thread;
  Grouped& rows = rows_of_thread;
  rows.fill(args.ids, T, L);
  static thread_local std::vector<Block> blocks_of_thread;
  const std::vector<Block>& blocks = blocks_of_thread = blocks_of(args);
  const i64 chunks = i64(rows.chunks.size()), sides = ceil_div(args.R, kSide), columns = i64(blocks.size());
  const i64 bytes = rows.adapters * (args.R * I + rank * O) * 2 + T * O * 2;
  const int threads = int(std::min<i64>(omp_get_max_threads(), std::max<i64>(1, bytes / kMinBytes)));
#pragma omp parallel num_threads(threads)
  {
    // Chunks of one adapter follow each other, so a thread's share of all items is a run of tables.
    Range mine = share(chunks * sides);
    for (i64 i = mine.from; i < mine.to; i++) {
      const Chunk& chunk = rows.chunks[i / sides];
      const i64 from = i % sides * kSide;
      if (chunk.id) shrink(args, rows, chunk, from, int(std::min<i64>(kSide, args.R - from)));
    }
#pragma omp barrier
    mine = share(chunks * columns);
    for (i64 i = mine.from; i < mine.to; i++) {
      const Chunk& chunk = rows.chunks[i / columns];
      const Block& block = blocks[i % columns];
      if (chunk.id) expand(args, rows, chunk, block.part, block.column, block.count);
      else if (i % columns == 0) copy_rows(args, rows, chunk);
    }
  }
}
GRAPHLLM_KERNEL(graphllm_add_lora)
