// Forward in the chunk form with the accuracy of fp32: the scan over the tiles of a sequence. See chunk.cuh for the
// equations, chunk_fp32.cuh for the tiles and factors, chunk_fwd.cu for the same scan with 16-bit operands.
//
// A block has one (sequence, value head) and up to 64 value columns, a warp 16 of them. Everything on the value side is
// transposed: the state, S^T [16 x K], stays in the warp's registers, and every result is the next product's left
// operand as it lies. q, k (with one decay per channel: their three copies), T and P of a tile come from shared memory,
// where those of the next tile arrive meanwhile; v, beta per value channel and o move between memory and registers, in
// whole sectors of 32 bytes. One barrier per tile.
#include <algorithm>
#include <string>

#include "core/workspace.h"
#include "cuda/common/first_chunks.h"
#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_fp32/chunk.cuh"
#include "cuda/delta_rule/kernels.h"
#include "cuda/delta_rule/scan_part.cuh"

namespace fastweight::cuda {
namespace {

constexpr int kMostWarps = 4;
constexpr int kSquare = kTileRows * kTileRows;
constexpr int kTokenTiles = kTileRows / 8;  // C tiles along the tokens

// X^T, O^T, .. of a tile: element e of C tile n belongs to token 8 n + 2 t + e % 2 and column g + 8 (e / 2).
using Values = float[kTokenTiles][4];

// T or P in shared memory, in rows that four lanes along a row read without conflicts.
struct LowerTile {
  static constexpr int kPitch = kTileRows + 8;
  alignas(16) float data[kTileRows * kPitch];

  // B of the transposed matrix, as FloatTile::pair_along.
  __device__ __forceinline__ float2 pair_along(int n, int m, int lane) const {
    return *reinterpret_cast<const float2*>(data + (8 * n + lane / 4) * kPitch + 8 * m + 2 * (lane % 4));
  }
};

// One tile's operands. Per channel, reads and writes have keys of their own.
template <int kK, bool kPerChannel>
struct Stage {
  alignas(128) float keys[(kPerChannel ? 3 : 2) * kTileRows * kK];
  LowerTile T, P;
  alignas(16) float token[4 * kTileRows];
  alignas(16) float total[kPerChannel ? kK : 4];

  __device__ FloatTile<kK> tile(int copy) { return {keys + copy * kTileRows * kK}; }
  __device__ FloatTile<kK> read_keys() { return tile(0); }
  __device__ FloatTile<kK> queries() { return tile(1); }
  __device__ FloatTile<kK> write_keys() { return tile(kPerChannel ? 2 : 0); }
};

__device__ __forceinline__ void copy_lower(LowerTile& tile, const float* source) {
  for (int at = threadIdx.x; at < kSquare / 4; at += blockDim.x) {
    const int row = at / (kTileRows / 4), column = at % (kTileRows / 4) * 4;
    copy_async(shared_address(tile.data + row * LowerTile::kPitch + column), source + at * 4, true);
  }
}

template <int kK, bool kPerChannel>
__device__ __forceinline__ void load_stage(const TileArgs& args, const ScanPart& part, const SequenceSpan& span,
                                           int64_t position, Stage<kK, kPerChannel>& stage) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int64_t item = (part.first_chunk + position) * p.num_value_heads + part.head;
  if constexpr (kPerChannel) {
    const float* keys = args.factors.keys + item * 3 * kTileRows * kK;
    for (int at = threadIdx.x; at < 3 * kTileRows * kK / 4; at += blockDim.x) {
      const FloatTile<kK> tile = stage.tile(at / (kTileRows * kK / 4));
      const int row = at / (kK / 4) % kTileRows, column = at % (kK / 4) * 4;
      copy_async(shared_address(&tile.at(row, column)), keys + at * 4, true);
    }
  } else {
    const int64_t first = position * kTileRows, token = span.begin + first;
    const int rows = static_cast<int>(min(span.length - first, int64_t{kTileRows}));
    load_rows(stage.read_keys(), p.k, row_offset(p.k, span.batch, token, part.key_head), rows, p.head_dim_k);
    load_rows(stage.queries(), p.q, row_offset(p.q, span.batch, token, part.key_head), rows, p.head_dim_k);
  }
  copy_lower(stage.T, args.factors.T + item * kSquare);
  copy_lower(stage.P, args.factors.P + item * kSquare);
  copy_floats(stage.token, args.factors.token + item * 4 * kTileRows, 4 * kTileRows, threadIdx.x, blockDim.x);
  copy_floats(stage.total, args.factors.total + item * args.factors.total_width, args.factors.total_width, threadIdx.x,
              blockDim.x);
}

// The warp's columns of the rows of a tile, in a [B, T, HV, V] tensor.
struct ValueRows {
  int64_t offset;  // of the first token
  int rows;
  int column, width;  // the warp's first column; V
};

// access(offset, n, e) for the lane's elements that exist.
template <class Access>
__device__ __forceinline__ void for_each_value(const DeviceTensor& x, const ValueRows& at, int lane,
                                               const Access& access) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = 8 * n + 2 * (lane % 4) + e % 2, column = at.column + lane / 4 + e / 2 * 8;
      if (row < at.rows && column < at.width) {
        access(at.offset + row * x.strides[1] + column * x.strides[3], n, e);
      }
    }
  }
}

using RawValues = uint32_t[kTokenTiles][4];

// Only loads, so that nobody waits before the values are used.
__device__ __forceinline__ void load_values(const DeviceTensor& x, const ValueRows& at, int lane, RawValues& bits) {
  with_type(x.dtype, [&](auto type) {
    for_each_value(x, at, lane, [&](int64_t offset, int n, int e) {
      bits[n][e] = load_bits(element_at(x.data, type.value, offset), type.value);
    });
  });
}

__device__ __forceinline__ void store_values(const DeviceTensor& x, const ValueRows& at, int lane,
                                             const Values& values) {
  with_type(x.dtype, [&](auto type) {
    for_each_value(x, at, lane,
                   [&](int64_t offset, int n, int e) { store_float(x.data, type.value, offset, values[n][e]); });
  });
}

// X = S^T k^T and O = S^T q^T, interrupted after 128 channels.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void read_state(Stage<kK, kPerChannel>& stage, int lane, const float (&S)[kK / 8][4],
                                           Values& X, Values& O) {
  constexpr int kPiece = kK < 128 ? kK / 8 : 16;  // C tiles of S
  const FloatTile<kK> keys = stage.read_keys(), queries = stage.queries();
#pragma unroll
  for (int first = 0; first < kK / 8; first += kPiece) {
    SplitSum x[kTokenTiles], o[kTokenTiles];
#pragma unroll
    for (int m = first; m < first + kPiece; ++m) {
      const SplitTile s = split_tile(S[m]);
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        multiply(x[n], s, keys.pair_along(n, m, lane));
        multiply(o[n], s, queries.pair_along(n, m, lane));
      }
    }
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        X[n][e] = first == 0 ? x[n].total(e) : X[n][e] + x[n].total(e);
        O[n][e] = first == 0 ? o[n].total(e) : O[n][e] + o[n].total(e);
      }
    }
  }
}

// The factors of the two tokens of a C tile that a lane has.
__device__ __forceinline__ float2 token_pair(const float* token, int factor, int n, int lane) {
  return *reinterpret_cast<const float2*>(token + factor * kTileRows + 8 * n + 2 * (lane % 4));
}

// left right^T, where right is lower triangular.
__device__ __forceinline__ void multiply_lower(const SplitTile (&left)[kTokenTiles], const LowerTile& right, int lane,
                                               SplitSum (&sum)[kTokenTiles]) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
    for (int m = 0; m <= n; ++m) multiply(sum[n], left[m], right.pair_along(n, m, lane));
  }
}

// N of W with one beta per token: W T^T.
__device__ __forceinline__ void apply_inverse(const LowerTile& T, int lane, Values& W) {
  SplitTile left[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) left[n] = split_tile(W[n]);
  SplitSum sum[kTokenTiles];
  multiply_lower(left, T, lane, sum);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) W[n][e] = sum[n].total(e);
  }
}

// N of v - (..) with a beta per value channel, where every column has an A of its own: token by token,
// N_j = beta_j (W_j - sum_{i < j} A_ji N_i). A is without beta, and 0 on and above its diagonal.
__device__ __forceinline__ void substitute(const LowerTile& A, const Values& beta, int lane, Values& W) {
#pragma unroll 1
  for (int j = 0; j < kTileRows; ++j) {
    const int owner = lane / 4 * 4 + j % 8 / 2;  // of the lanes with the same columns
    float own[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float even = j < 8 ? beta[0][2 * h] * W[0][2 * h] : beta[1][2 * h] * W[1][2 * h];
      const float odd = j < 8 ? beta[0][2 * h + 1] * W[0][2 * h + 1] : beta[1][2 * h + 1] * W[1][2 * h + 1];
      own[h] = __shfl_sync(kAllLanes, j % 2 == 0 ? even : odd, owner);
    }
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float a = A.data[(8 * n + 2 * (lane % 4) + e % 2) * LowerTile::kPitch + j];
        W[n][e] = fmaf(-a, own[e / 2], W[n][e]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) W[n][e] *= beta[n][e];
  }
}

// S^T = E(gamma_L) S^T + (E(gamma_L - gamma) N) k
template <int kK, bool kPerChannel>
__device__ __forceinline__ void write_state(Stage<kK, kPerChannel>& stage, const SplitTile (&left)[kTokenTiles],
                                            int lane, float (&S)[kK / 8][4]) {
  const FloatTile<kK> keys = stage.write_keys();
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
    SplitSum sum;
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) multiply(sum, left[m], keys.pair_across(m, n, lane));
    const float2 total = kPerChannel ? *reinterpret_cast<const float2*>(stage.total + 8 * n + 2 * (lane % 4))
                                     : make_float2(stage.total[0], stage.total[0]);
#pragma unroll
    for (int e = 0; e < 4; ++e) S[n][e] = fmaf(e % 2 == 0 ? total.x : total.y, S[n][e], sum.total(e));
  }
}

// One tile: advances S^T and leaves o^T in O.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void advance(const TileArgs& args, const SequenceSpan& span, const ScanPart& part,
                                        int64_t position, int column, Stage<kK, kPerChannel>& stage, int lane,
                                        float (&S)[kK / 8][4]) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int64_t first = position * kTileRows;
  const int rows = static_cast<int>(min(span.length - first, int64_t{kTileRows}));
  const auto rows_of = [&](const DeviceTensor& x) {
    return ValueRows{row_offset(x, span.batch, span.begin + first, part.head), rows, column, p.head_dim_v};
  };
  RawValues v = {};
  load_values(p.v, rows_of(p.v), lane, v);

  Values X, O;
  read_state(stage, lane, S, X, O);

  // W = beta v - (beta E(gamma)) X
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const float2 on_v = token_pair(stage.token, kOnValue, n, lane);
    const float2 on_x = token_pair(stage.token, kOnKeyRead, n, lane);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float factor = e % 2 == 0 ? on_x.x : on_x.y;
      X[n][e] = fmaf(e % 2 == 0 ? on_v.x : on_v.y, decode(v[n][e], p.v.dtype), -factor * X[n][e]);
    }
  }

  // N in place of W
  if (p.beta_per_value) {
    Values beta = {};
    for_each_value(p.beta, rows_of(p.beta), lane, [&](int64_t offset, int n, int e) {
      beta[n][e] = beta_of(p, load_float(p.beta.data, p.beta.dtype, offset));
    });
    substitute(stage.T, beta, lane, X);
  } else {
    apply_inverse(stage.T, lane, X);
  }

  // O = (..) O + N P^T
  SplitTile left[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) left[n] = split_tile(X[n]);
  SplitSum sum[kTokenTiles];
  multiply_lower(left, stage.P, lane, sum);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const float2 on_o = token_pair(stage.token, kOnQueryRead, n, lane);
#pragma unroll
    for (int e = 0; e < 4; ++e) O[n][e] = fmaf(e % 2 == 0 ? on_o.x : on_o.y, O[n][e], sum[n].total(e));
  }
  store_values(args.o, rows_of(args.o), lane, O);

  if constexpr (!kPerChannel) {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const float2 on_n = token_pair(stage.token, kOnWrite, n, lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) X[n][e] *= e % 2 == 0 ? on_n.x : on_n.y;
      left[n] = split_tile(X[n]);
    }
  }
  write_state(stage, left, lane, S);
}

// The state is written in one place of the code, which its compile time asks for.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void run_part(const TileArgs& args, const ScanPart& part, Stage<kK, kPerChannel>* stage) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int K = p.head_dim_k, V = p.head_dim_v, column = part.column + kTileColumns * warp;
  const SequenceSpan span = sequence_at(p.sequences, part.sequence);
  // Offsets out of order may claim more tiles than there is scratch memory for.
  const int64_t tiles = max(min(chunks_of(span.length, kTileRows), args.num_tiles - part.first_chunk), int64_t{0});
  if (tiles > 0) load_stage(args, part, span, 0, stage[0]);
  commit_copies();

  float S[kK / 8][4] = {};
  if (args.initial_state.present()) {
    load_state<kK>(args.initial_state, state_offset(args.initial_state, part), column, K, V, lane, S);
  }
  for (int64_t c = 0;; ++c) {
    const bool last = c == tiles;
    if (last || (args.chunk_states.present() && c * kTileRows % args.chunked.chunk_size == 0)) {
      const StateAddress place =
          last ? final_state_address(args, part)
               : chunk_state_address(args, part, span.batch, c * kTileRows / args.chunked.chunk_size);
      if (place.exists) store_state<kK>(place.states, place.offset, column, K, V, lane, S);
    }
    if (last) return;
    // After the barrier everybody's part of this tile is there, and nobody reads the last tile's stage any more.
    wait_copies<0>();
    __syncthreads();
    if (c + 1 < tiles) load_stage(args, part, span, c + 1, stage[(c + 1) % 2]);
    commit_copies();
    if (column < V) advance(args, span, part, c, column, stage[c % 2], lane, S);
  }
}

// A block per part; a smaller grid goes round.
template <int kK, bool kPerChannel>
__global__ void __launch_bounds__(kMostWarps* kWarpSize, kK == 64    ? 4
                                                         : kK == 128 ? 3
                                                                     : 2)
    tile_scan_kernel(const __grid_constant__ TileArgs args, int columns, int64_t parts) {
  auto* stage = &dynamic_shared<Stage<kK, kPerChannel>>();
  for (int64_t at = blockIdx.x; at < parts; at += gridDim.x) {
    run_part<kK, kPerChannel>(args, scan_part_at(args.problem, args.tiles, at, columns), stage);
    __syncthreads();  // before the next part's first copies
  }
}

// Warps of a block: as many as share their operands, or half of them where the busiest multiprocessor then has less.
int warps_of_block(int64_t rows, int64_t head_dim_v, int multiprocessors) {
  const auto warps_of_busiest = [&](int warps) {
    const int64_t columns = warps * kTileColumns, blocks = rows * ((head_dim_v + columns - 1) / columns);
    return (blocks + multiprocessors - 1) / multiprocessors * warps;
  };
  return warps_of_busiest(kMostWarps / 2) < warps_of_busiest(kMostWarps) ? kMostWarps / 2 : kMostWarps;
}

template <int kK, bool kPerChannel>
void launch_scan(const TileArgs& args, const Context& context) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int64_t rows = p.sequences.count * p.num_value_heads;
  const int warps =
      warps_of_block(rows, p.head_dim_v, device_attribute(cudaDevAttrMultiProcessorCount, context.device.index));
  const int columns = warps * kTileColumns, ranges = (p.head_dim_v + columns - 1) / columns;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(rows * ranges, 1 << 30));
  launch<tile_scan_kernel<kK, kPerChannel>>(
      "delta_rule chunk in fp32", context,
      {blocks, static_cast<unsigned>(warps * kWarpSize), 2 * sizeof(Stage<kK, kPerChannel>)}, args, columns,
      rows * ranges);
}

// What a block of either kernel needs.
size_t shared_bytes(const DeltaRuleForwardProblem& problem) {
  const bool per_channel = problem.args.options.gate == Gate::kPerChannel;
  const int width = padded_k(problem.sizes.head_dim_k);
  size_t bytes = tile_factors_bytes(width, per_channel);
  with_width(width, per_channel,
             [&]<int kK, bool kPerChannel>() { bytes = std::max(bytes, 2 * sizeof(Stage<kK, kPerChannel>)); });
  return bytes;
}

struct Scratch {
  int64_t *first_tile, *first_chunk;
  TileFactors factors;
};

// The layout of the scratch memory of a call.
Scratch take_scratch(ScratchLayout& layout, const DeltaRuleForwardProblem& problem, int64_t num_tiles) {
  const bool per_channel = problem.args.options.gate == Gate::kPerChannel;
  const int64_t items = num_tiles * problem.sizes.num_value_heads;
  const int64_t starts = problem.args.in.cu_seqlens.present() ? problem.sizes.num_sequences + 1 : 0;
  const int width = padded_k(problem.sizes.head_dim_k);
  Scratch scratch;
  scratch.first_tile = layout.take<int64_t>(starts);
  scratch.first_chunk = layout.take<int64_t>(problem.args.chunk_states.present() ? starts : 0);
  TileFactors& factors = scratch.factors;
  factors.total_width = per_channel ? width : 4;
  factors.T = layout.take<float>(items * kSquare);
  factors.P = layout.take<float>(items * kSquare);
  factors.token = layout.take<float>(items * 4 * kTileRows);
  factors.total = layout.take<float>(items * factors.total_width);
  factors.keys = layout.take<float>(per_channel ? items * 3 * kTileRows * width : 0);
  return scratch;
}

}  // namespace

std::string declines_chunk_forward_fp32(const DeltaRuleForwardProblem& problem) {
  return lacks_shared_memory(shared_bytes(problem), problem.args.in.q.device.index);
}

void chunk_forward_fp32(const DeltaRuleForwardProblem& problem, const Context& context) {
  const DeltaRuleForward& forward = problem.args;
  const bool v_first = forward.options.state_v_first;
  TileArgs args;
  args.problem = device_problem(problem);
  args.o = device_tensor(forward.o);
  args.initial_state = device_states(forward.in.initial_state, v_first);
  args.final_state = device_states(forward.final_state, v_first);
  args.chunk_states = device_states(forward.chunk_states, v_first);
  args.state_chunks = problem.sizes.num_chunks;
  args.tiles.sequences = args.chunked.sequences = args.problem.sequences;
  args.tiles.chunk_size = kTileRows;
  args.chunked.chunk_size = forward.options.chunk_size;
  args.num_tiles = max_chunks(args.problem.sequences, kTileRows);

  ScratchLayout measure;
  take_scratch(measure, problem, args.num_tiles);
  const DeviceWorkspace workspace(context, measure.bytes());
  ScratchLayout layout(workspace.data());
  const Scratch scratch = take_scratch(layout, problem, args.num_tiles);
  args.factors = scratch.factors;
  if (forward.in.cu_seqlens.present()) {
    build_first_chunks(args.problem.sequences, kTileRows, scratch.first_tile, context);
    args.tiles.first_chunk = scratch.first_tile;
    if (forward.chunk_states.present()) {
      build_first_chunks(args.problem.sequences, args.chunked.chunk_size, scratch.first_chunk, context);
      args.chunked.first_chunk = scratch.first_chunk;
    }
  }

  const int width = padded_k(problem.sizes.head_dim_k);
  if (args.num_tiles > 0) launch_tile_factors(args, width, context);
  with_width(width, forward.options.gate == Gate::kPerChannel,
             [&]<int kK, bool kPerChannel>() { launch_scan<kK, kPerChannel>(args, context); });
}

}  // namespace fastweight::cuda
