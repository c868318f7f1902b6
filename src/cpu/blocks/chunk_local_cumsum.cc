// Chunk-local sums of rows:  y_i = y_{i-1} + x_i, from the first token of a chunk, or from the last in reverse.
#include "cpu/blocks/kernels.h"
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/blocks/chunk_local_cumsum.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/blocks/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace blocks {
namespace {

struct CumsumScratch {
  int64_t ld, heads;
  float* row = nullptr;  // [ld]
  float* sum = nullptr;  // [heads][ld]

  void lay_out(ScratchLayout& layout) {
    row = layout.take<float>(ld);
    sum = layout.take<float>(heads * ld);
  }
};

inline constexpr int64_t kElementsPerItem = 4096;  // of a token

}  // namespace

void chunk_local_cumsum(const BlockProblem<ChunkLocalCumsum>& problem, const Context& context) {
  const ChunkLocalCumsum& args = problem.args;
  const TensorView &x = args.x, &y = args.y;
  const BlockSizes& sizes = problem.sizes;
  const int64_t width = x.shape[3];
  const HeadBlocks heads(x.shape[2], width, kElementsPerItem);
  const auto chunks = chunks_of(problem);
  for_each_item(static_cast<int64_t>(chunks.size()) * heads.count(), sizes.batch * sizes.tokens * heads.heads * width,
                context, CumsumScratch{heads.ld, heads.size}, [&](int64_t item, const CumsumScratch& s) HWY_ATTR {
                  const Chunk& chunk = chunks[static_cast<size_t>(item / heads.count())];
                  const int64_t block = item % heads.count(), first = heads.first(block), end = heads.end(block);
                  std::memset(s.sum, 0, static_cast<size_t>(s.heads * s.ld) * sizeof(float));
                  for (int64_t n = 0; n < chunk.length; ++n) {
                    const int64_t t = chunk.begin + (args.reverse ? chunk.length - 1 - n : n);
                    for (int64_t h = first; h < end; ++h) {
                      float* sum = s.sum + (h - first) * s.ld;
                      load_row(row_of(x, chunk.batch, t, h), x.dtype, x.strides[3], width, s.row, s.ld);
                      for (int64_t d = 0; d < s.ld; d += kLanes) {
                        store(hn::Add(load(sum + d), load(s.row + d)), sum + d);
                      }
                      store_row(sum, row_of(y, chunk.batch, t, h), y.dtype, y.strides[3], width);
                    }
                  }
                });
}

}  // namespace blocks

void block_chunk_local_cumsum(const BlockProblem<ChunkLocalCumsum>& problem, const Context& context) {
  blocks::chunk_local_cumsum(problem, context);
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {
namespace {

HWY_EXPORT(block_chunk_local_cumsum);

}  // namespace

void blocks::simd(const BlockProblem<ChunkLocalCumsum>& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(block_chunk_local_cumsum)(problem, context);
}

}  // namespace fastweight::cpu
#endif
