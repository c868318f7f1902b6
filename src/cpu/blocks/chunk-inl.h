// What the blocks share: the loop over items, chunks between tensors and scratch memory, products with chunk matrices.
// Re-included once per instruction set.
#if defined(FW_CPU_BLOCKS_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_BLOCKS_CHUNK_INL_H_
#undef FW_CPU_BLOCKS_CHUNK_INL_H_
#else
#define FW_CPU_BLOCKS_CHUNK_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "core/blocks_problem.h"
#include "core/workspace.h"
#include "cpu/blocks/chunks.h"
#include "cpu/denormals.h"
#include "cpu/parallel.h"
#include "cpu/partition.h"
#include "cpu/token_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace blocks {

using cpu::blocks::Chunk;
using cpu::blocks::chunks_of;
using cpu::blocks::kRowsPerItem;

HWY_INLINE int64_t padded_width(int64_t width) { return round_up(width, kRowMultiple); }

// body(item, scratch) for every item. `shape` knows its sizes; its lay_out(layout) lays out the scratch memory of a
// thread.
template <class Scratch, class Body>
HWY_INLINE void for_each_item(int64_t items, int64_t multiply_adds, const Context& context, const Scratch& shape,
                              Body body) {
  if (items == 0) return;
  const int threads = useful_threads(num_threads(context), items, multiply_adds);
  ScratchLayout measure;
  Scratch(shape).lay_out(measure);
  const size_t bytes = measure.bytes();
  const Workspace workspace(context, bytes * static_cast<size_t>(threads));
  const FlushDenormals flush;
  parallel_for(items, threads, [&](int64_t item, int thread) HWY_ATTR {
    ScratchLayout layout(static_cast<char*>(workspace.data()) + bytes * static_cast<size_t>(thread));
    Scratch scratch = shape;
    scratch.lay_out(layout);
    body(item, scratch);
  });
}

// ---- Rows of gates ------------------------------------------------------------------------------------------------

// Blocks of heads whose rows of a token are worked on together, for they lie together: head by head, a chunk's rows are
// often one to a page, and the walk over them takes several times as long.
struct HeadBlocks {
  int64_t heads, ld, size;

  HeadBlocks(int64_t heads_, int64_t width, int64_t most_elements)
      : heads(heads_), ld(padded_width(width)), size(std::clamp<int64_t>(most_elements / ld, 1, heads)) {}
  int64_t count() const { return (heads + size - 1) / size; }
  int64_t first(int64_t block) const { return block * size; }
  int64_t end(int64_t block) const { return std::min(heads, (block + 1) * size); }
};

// What follows is not inlined: each carries the conversions of all types, and wy.cc compiled for 32 s instead of 13 s.

// ---- Chunk matrices, [rows][kMatrix] ------------------------------------------------------------------------------

inline constexpr int64_t kMatrix = 64;  // the distance of rows: a constant, whatever C is
inline constexpr int64_t kRowBlock = 16;

// Of row i the columns before i, and column i if asked for; 0 elsewhere, and in the rows beyond the chunk.
HWY_NOINLINE inline void load_lower(const TensorView& x, const Chunk& chunk, int64_t h, bool diagonal, int64_t rows,
                                    float* M) {
  const int64_t C = x.shape[3];
  for (int64_t i = 0; i < chunk.length; ++i) {
    load_row(row_of(x, chunk.batch, chunk.begin + i, h), x.dtype, x.strides[3], diagonal ? i + 1 : i, M + i * kMatrix,
             C);
  }
  std::memset(M + chunk.length * kMatrix, 0, static_cast<size_t>((rows - chunk.length) * kMatrix) * sizeof(float));
}

// ---- One number per token, [rows] -----------------------------------------------------------------------------------

// Absent: `otherwise` for the tokens of the chunk. 0 beyond it.
HWY_NOINLINE inline void load_numbers(const TensorView& x, const Chunk& chunk, int64_t h, float otherwise, int64_t rows,
                                      float* numbers) {
  if (x.present()) {
    load_row(row_of(x, chunk.batch, chunk.begin, h), x.dtype, x.strides[1], chunk.length, numbers, rows);
  } else {
    for (int64_t i = 0; i < rows; ++i) numbers[i] = i < chunk.length ? otherwise : 0.0f;
  }
}

HWY_NOINLINE inline void store_numbers(const float* numbers, const TensorView& x, const Chunk& chunk, int64_t h) {
  if (!x.present()) return;
  store_row(numbers, row_of(x, chunk.batch, chunk.begin, h), x.dtype, x.strides[1], chunk.length);
}

// ---- Rows of a chunk, [rows][ld] ------------------------------------------------------------------------------------

// Absent: 0.
HWY_NOINLINE inline void load_chunk(const TensorView& x, const Chunk& chunk, int64_t h, int64_t width, int64_t rows,
                                    int64_t ld, float* dst) {
  if (x.present()) {
    load_rows(x, chunk.batch, chunk.begin, h, chunk.length, 0, width, dst, ld, rows);
  } else {
    std::memset(dst, 0, static_cast<size_t>(rows * ld) * sizeof(float));
  }
}

HWY_NOINLINE inline void store_chunk(const float* src, int64_t ld, const TensorView& x, const Chunk& chunk, int64_t h,
                                     int64_t width) {
  if (x.present()) store_rows(src, ld, x, chunk.batch, chunk.begin, h, chunk.length, 0, width);
}

HWY_INLINE float row_dot(const float* x, const float* y, int64_t ld) {
  Vec sum = zero();
  for (int64_t d = 0; d < ld; d += kLanes) sum = fma(load(x + d), load(y + d), sum);
  return sum_of_lanes(sum);
}

}  // namespace blocks
}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
