// Of the kernel in gradients_per_channel.cuh: its tiles and what a block has in shared memory.
#pragma once

#include <type_traits>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/adjoints.cuh"
#include "cuda/delta_rule/chunk_16bit/gradient_items.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

constexpr int kRows = 16;  // of a tile
constexpr int kTiles = kChunkRows / kRows;

template <int kK>
struct Shape {
  static constexpr int kColumns = kK == 64 ? 64 : 128;  // of values
  static constexpr int kWarps = kK / 16;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kBlocksOfSM = kK == 256 ? 1 : kK == 128 ? 2 : 3;
};

enum PairKind { kPairsOfP, kPairsOfA };

// [64 tokens x kK channels] in fp32. Eight neighbouring channels stay together; the eights change places so that the C
// tiles of a transposed product, and rows, go to different banks.
template <int kK>
struct SumTile {
  float* data;

  __device__ __forceinline__ float& at(int row, int channel) const {
    return data[row * kK + (channel ^ (row / 2 % 4 * 8))];
  }
};

// Columns [16 m, 16 m + 16) of a SharedTile, as its first. For an m that is known at run time and rows that are known
// before: their addresses differ by constants.
template <int kColumns>
struct TileColumns : TileFragments<TileColumns<kColumns>> {
  uint32_t start;
  int m;

  __device__ __forceinline__ TileColumns(const uint16_t* tile, int block) : start(shared_address(tile)), m(block) {}
  __device__ __forceinline__ uint32_t address(int row, int, int h) const {
    return start + 2 * static_cast<uint32_t>(SharedTile<kColumns>::offset(row, 2 * m + h));
  }
};

// A block of 16 x 16 elements, by LowerBlocks' rules. Blocks of a matrix differ by constants.
struct PairBlock : TileFragments<PairBlock> {
  static constexpr int kElements = 256;

  uint32_t start;

  __device__ __forceinline__ explicit PairBlock(const uint16_t* memory) : start(shared_address(memory)) {}
  __device__ __forceinline__ uint32_t address(int row, int, int h) const {
    return start + static_cast<uint32_t>(32 * row + ((h ^ row >> 2) & 1) * 16);
  }
};

// The blocks on and below the diagonal of a strictly lower triangular matrix [64 x 64].
struct PairBlocks {
  uint16_t data[kTiles * (kTiles + 1) / 2][PairBlock::kElements];

  __device__ __forceinline__ PairBlock block(int row, int column) const {
    return PairBlock(data[row * (row + 1) / 2 + column]);
  }
  // The first `count` elements of row i of the tile's block on the diagonal, and what fills the last eight.
  template <DType kType>
  __device__ __forceinline__ void load_row(int tile, int i, int count, float (&x)[kRows]) const {
    const uint16_t* row = data[tile * (tile + 3) / 2] + kRows * i;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (8 * h >= count) continue;
      const uint4 words = *reinterpret_cast<const uint4*>(row + ((h ^ i >> 2) & 1) * 8);
      const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 values = unpack<kType>(pairs[e]);
        x[8 * h + 2 * e] = values.x, x[8 * h + 2 * e + 1] = values.y;
      }
    }
  }
};

template <int kK>
struct Shared {
  static constexpr int kColumns = Shape<kK>::kColumns;
  using Sums = float[kChunkRows * kK];
  using Keys = uint16_t[kChunkRows * kK];
  using Values = uint16_t[kChunkRows * kColumns];
  using State = uint16_t[kColumns * kK];

  union {
    alignas(128) State S;      // steps 1 to 3
    alignas(128) Sums writer;  // R G^T from step 3 on, then F, then dk
  };
  union {
    struct {
      alignas(128) Keys reader;
      alignas(128) Values v;
    } first;                  // step 1
    alignas(128) Values d_o;  // steps 2 and 3
    alignas(128) State G;     // step 3
    struct {
      alignas(128) Keys falling;
      float first[4][4][Shape<kK>::kThreads];  // sums of the first tile, which add_tiles leaves alone, out of registers
    } tiles;                                   // steps 4 and 5
    alignas(128) Sums query;                   // step 6: X of q, then dq
  };
  union {
    struct {
      alignas(128) Values R, Y;  // transposed: steps 1 to 3
    } columns;
    struct {
      alignas(128) Keys q, k;  // rising: steps 4 and 5
    } rising;
    alignas(128) Sums reader;  // step 6: X of the reader, then the terms of -dbeta
  };
  union {
    struct {
      alignas(128) uint16_t J[LowerBlocks::kElements];
      float yv[kColumns / 16][kChunkRows];  // Y . v of the warps' columns
    } value_side;                           // step 1
    struct {
      alignas(128) PairBlocks blocks[2];       // by PairKind
      alignas(16) float diagonal[kChunkRows];  // of P
    } pairs;                                   // from step 2 on
  };
  alignas(16) float total[kTiles][kK];
  union {
    alignas(16) float over[kTiles][kK];  // steps 5 and 6; of a mild tile with what the tile reads from before it
    alignas(16) float bias[kTiles][kK];  // from step 6 on: the tile's share of ddt_bias
  };
  float a_log[kTiles * kK / kWarpSize];  // the share of dA_log of the warps' tiles and channels
  alignas(16) float beta[kChunkRows], rstd_q[kChunkRows], rstd_k[kChunkRows];
  float dbeta[kChunkRows];  // over the ranges of columns
  // Whether a tile is strong by the warps that have its channels: together a word, not 0 if any says so.
  using StrongPart = std::conditional_t<kK == 64, uint32_t, std::conditional_t<kK == 128, uint16_t, uint8_t>>;
  alignas(16) StrongPart strong[kTiles][kK / 64];
  Item items[2];  // the one at hand and the next; here they take no registers

  __device__ __forceinline__ bool is_strong(int tile) const {
    return *reinterpret_cast<const uint32_t*>(strong[tile]) != 0;
  }
};

// [16 channels x 64 tokens] as C tiles.
using Channels = float[kChunkRows / 8][4];
// The same in tiles of tokens.
using ChannelTile = float[2][4];
using TileSums = ChannelTile[kTiles];

// Loads ---------------------------------------------------------------------------------------------------------------

// What step 1 needs, and Y, in three parts: as their places become free. The caller commits the copies.
template <int kK>
__device__ __forceinline__ void load_state(const GradientArgs& args, const Item& item, Shared<kK>& s, int thread) {
  using X = Shape<kK>;
  copy_rows<X::kColumns, X::kThreads>(SharedTile<kK>(s.S), state_before(args, item), args.S.v_stride,
                                      args.chunk.problem.head_dim_v - item.column, args.S_width, thread);
}

template <int kK>
__device__ __forceinline__ void load_values(const GradientArgs& args, const Item& item, Shared<kK>& s, int thread) {
  using X = Shape<kK>;
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const ChunkFactors& factors = args.chunk.factors;
  copy_rows<kChunkRows, X::kThreads>(
      SharedTile<kK>(s.first.reader),
      factors.keys + (copies_of(args.chunk, item) * kKeyCopies + kReader) * kChunkRows * kK, kK, kChunkRows, kK,
      thread);
  load_value_rows<X::kThreads>(SharedTile<X::kColumns>(s.first.v), p.v, args.chunk.vector_values, item, p.head_dim_v,
                               thread);
  copy_lower_blocks<X::kThreads>(s.value_side.J, factors.J(item.factors), thread);
}

template <int kK>
__device__ __forceinline__ void load_columns(const GradientArgs& args, const Item& item, Shared<kK>& s, int thread) {
  using X = Shape<kK>;
  copy_rows<X::kColumns, X::kThreads>(SharedTile<kChunkRows>(s.columns.Y),
                                      args.Y + (item.slot * args.padded_v + item.column) * kChunkRows, kChunkRows,
                                      args.padded_v - item.column, kChunkRows, thread);
  if (thread >= kChunkRows) return;
  const ChunkFactors& factors = args.chunk.factors;
  const float* row = factors.row + item.factors * kRowNumbers * kChunkRows + thread;
  s.rstd_q[thread] = row[kRstdOfQ * kChunkRows];
  s.rstd_k[thread] = row[kRstdOfK * kChunkRows];
  s.beta[thread] = factors.token[item.factors * kChunkRows + thread];
  if (item.opens) s.dbeta[thread] = 0;
}

// Columns [first, end) of the tokens' rows at `head`, to the L2 cache.
template <int kThreads>
__device__ __forceinline__ void prefetch_rows(const DeviceTensor& x, const Item& item, int head, int first, int end,
                                              int thread) {
  if (!x.present()) return;
  const int line = 128 / static_cast<int>(byte_offset(x.dtype, 1));
#pragma unroll 1
  for (int row = thread; row < item.span.length; row += kThreads) {
    const int64_t start = row_offset(x, item.span.batch, item.span.begin + row, head);
#pragma unroll 1
    for (int at = first; at < end; at += line) {
      prefetch(element_at(static_cast<const char*>(x.data), x.dtype, start + at * x.strides[3]));
    }
  }
}

// What is loaded in the midst of an item: a quarter of the warps each has a tensor, and all have G.
template <int kK>
__device__ __forceinline__ void prefetch_operands(const GradientArgs& args, const Item& item, int thread) {
  constexpr int kThreads = Shape<kK>::kThreads, kQuarter = kThreads / 4, kColumns = Shape<kK>::kColumns;
  const DeltaRuleDeviceProblem& p = args.chunk.problem;
  const int quarter = uniform_warp() / (Shape<kK>::kWarps / 4), own = thread % kQuarter;
  if (quarter == 0) {
    prefetch_rows<kQuarter>(args.d_o, item, item.head, item.column, min(p.head_dim_v, item.column + kColumns), own);
  } else if (quarter == 1) {
    prefetch_rows<kQuarter>(p.g, item, item.head, 0, p.head_dim_k, own);
  } else if (quarter == 2) {
    prefetch_rows<kQuarter>(p.q, item, item.key_head, 0, p.head_dim_k, own);
  } else {
    prefetch_rows<kQuarter>(p.k, item, item.key_head, 0, p.head_dim_k, own);
  }
  const uint16_t* G = args.G + (item.slot * args.padded_v + item.column) * kK;
  const int lines = min(kColumns, args.padded_v - item.column) * (kK / 64);
#pragma unroll 1
  for (int at = thread; at < lines; at += kThreads) prefetch(G + 64 * at);
}

}  // namespace
}  // namespace fastweight::cuda::chunk_16bit
