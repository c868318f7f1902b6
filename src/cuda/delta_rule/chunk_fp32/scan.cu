// Forward in the chunk form with the accuracy of fp32: the scan over the tiles of a sequence. See ../chunk.cuh for the
// equations, chunk.cuh for the tiles and factors.
//
// A block has one (sequence, value head) and up to 64 value columns, a warp 16 of them. Everything on the value side is
// transposed: the state, S^T [16 x K], stays in the warp's registers, and every result is the next product's left
// operand as it lies. q, k (with one decay per channel: their three copies), J and sP of a tile come from shared memory,
// where those of the next tile arrive meanwhile; v, beta per value channel and o move between memory and registers, in
// whole sectors of 32 bytes. One barrier per tile.
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_fp32/scan_tile.cuh"

namespace fastweight::cuda::chunk_fp32 {
namespace {

// X = S^T k^T and O = S^T q^T, interrupted after 128 channels.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void read_state(Stage<kK, kPerChannel>& stage, int lane, const float (&S)[kK / 8][4],
                                           Values& X, Values& O) {
  constexpr int kPiece = kK < 128 ? kK / 8 : 16;  // C tiles of S
  const FloatTile<kK> reader = stage.reader(), queries = stage.queries();
#pragma unroll
  for (int first = 0; first < kK / 8; first += kPiece) {
    SplitSum x[kTokenTiles], o[kTokenTiles];
#pragma unroll
    for (int m = first; m < first + kPiece; ++m) {
      const SplitTile s = split_tile(S[m]);
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        multiply(x[n], s, reader.pair_along(n, m, lane));
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

// R^T of D^T with a beta per value channel, where every column has an A of its own: token by token, in its place,
// R_j = beta_j (D_j - sum_{i < j} A_ji R_i). A is without beta, and 0 on and above its diagonal.
__device__ __forceinline__ void substitute(const LowerTile& A, const Values& beta, int lane, Values& D) {
#pragma unroll 1
  for (int j = 0; j < kTileRows; ++j) {
    const int owner = lane / 4 * 4 + j % 8 / 2;  // of the lanes with the same columns
    float own[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float even = j < 8 ? beta[0][2 * h] * D[0][2 * h] : beta[1][2 * h] * D[1][2 * h];
      const float odd = j < 8 ? beta[0][2 * h + 1] * D[0][2 * h + 1] : beta[1][2 * h + 1] * D[1][2 * h + 1];
      own[h] = __shfl_sync(kAllLanes, j % 2 == 0 ? even : odd, owner);
    }
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float a = A.data[(8 * n + 2 * (lane % 4) + e % 2) * LowerTile::kPitch + j];
        D[n][e] = fmaf(-a, own[e / 2], D[n][e]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) D[n][e] *= beta[n][e];
  }
}

// O = scale e O + R^T sP^T
__device__ __forceinline__ void add_writes(const SplitTile (&R)[kTokenTiles], const LowerTile& sP, const float* token,
                                           int lane, Values& O) {
  SplitSum sum[kTokenTiles];
  multiply_lower(R, sP, lane, sum);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const float2 on_o = token_pair(token, kOnQueryRead, n, lane);
#pragma unroll
    for (int e = 0; e < 4; ++e) O[n][e] = fmaf(e % 2 == 0 ? on_o.x : on_o.y, O[n][e], sum[n].total(e));
  }
}

// One tile: advances S^T and stores o^T, which the map of a segment does without.
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

  Values R, O;  // R is X = S^T k^T, then bD^T, then R^T
  read_state(stage, lane, S, R, O);
  subtract_reads(v, p.v.dtype, stage.token, lane, R);
  if (p.beta_per_value) {
    Values beta = {};
    for_each_value(p.beta, rows_of(p.beta), lane, [&](int64_t offset, int n, int e) {
      beta[n][e] = beta_of(p, load_float(p.beta.data, p.beta.dtype, offset));
    });
    substitute(stage.J, beta, lane, R);
  } else {
    apply_inverse(stage.J, lane, R);
  }

  SplitTile left[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) left[n] = split_tile(R[n]);
  add_writes(left, stage.sP, stage.token, lane, O);
  if (args.o.present()) store_values(args.o, rows_of(args.o), lane, O);

  if constexpr (!kPerChannel) {  // (w R)^T; per channel the writer has the factor
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const float2 on_r = token_pair(stage.token, kOnWrite, n, lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) R[n][e] *= e % 2 == 0 ? on_r.x : on_r.y;
      left[n] = split_tile(R[n]);
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

}  // namespace

size_t scan_bytes(int padded_k, bool per_channel) {
  size_t bytes = 0;
  with_padded_k_and_gate(padded_k, per_channel,
                         [&]<int kK, bool kPerChannel>() { bytes = 2 * sizeof(Stage<kK, kPerChannel>); });
  return bytes;
}

void launch_scan(const TileArgs& args, const ScanConfig& config, const Context& context) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int columns = config.columns(), ranges = (p.head_dim_v + columns - 1) / columns;
  const int64_t parts = p.sequences.count * p.num_value_heads * ranges;
  const LaunchShape shape{static_cast<unsigned>(std::min<int64_t>(parts, 1 << 30)),
                          static_cast<unsigned>(config.warps * kWarpSize),
                          scan_bytes(config.padded_k, config.per_channel)};
  with_padded_k_and_gate(config.padded_k, config.per_channel, [&]<int kK, bool kPerChannel>() {
    launch<tile_scan_kernel<kK, kPerChannel>>("delta_rule chunk_fp32 scan", context, shape, args, columns, parts);
  });
}

}  // namespace fastweight::cuda::chunk_fp32
