// Backward in the chunk form with the accuracy of fp32: the scan over the tiles of a sequence from the last to the
// first, which carries the gradient G of the state. bwd.cuh has the equations.
//
// As the forward's scan (scan.cu): a block has one (sequence, value head) and up to 64 value columns, a warp 16 of
// them, everything on the value side is transposed, G^T [16 x K] stays in the warp's registers. What the chain from
// tile to tile needs is k G, the two triangular products and the two products that make dS; Y, dv and G go to memory
// beside it.
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_fp32/bwd.cuh"
#include "cuda/delta_rule/chunk_fp32/scan_tile.cuh"

namespace fastweight::cuda::chunk_fp32 {
namespace {

// left right, where right is lower triangular.
__device__ __forceinline__ void multiply_by_lower(const SplitTile (&left)[kTokenTiles], const LowerTile& right,
                                                  int lane, SplitSum (&sum)[kTokenTiles]) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
    for (int m = n; m < kTokenTiles; ++m) multiply(sum[n], left[m], right.pair_across(m, n, lane));
  }
}

// The rows of x^T with their tokens' factors, as left operands.
__device__ __forceinline__ void scale_rows(const float* token, int factor, float sign, int lane, const Values& x,
                                           SplitTile (&left)[kTokenTiles]) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const float2 on_x = token_pair(token, factor, n, lane);
    float scaled[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) scaled[e] = sign * (e % 2 == 0 ? on_x.x : on_x.y) * x[n][e];
    left[n] = split_tile(scaled);
  }
}

// Y^T = (d_o^T sP + w (G^T k^T)) J, in place of G^T k^T.
__device__ __forceinline__ void solve_adjoint(const LowerTile& sP, const LowerTile& J, const float* token, int lane,
                                              const Values& d_o, Values& Y) {
  SplitTile left[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) left[n] = split_tile(d_o[n]);
  SplitSum dR[kTokenTiles], y[kTokenTiles];
  multiply_by_lower(left, sP, lane, dR);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const float2 on_x = token_pair(token, kOnWrite, n, lane);
#pragma unroll
    for (int e = 0; e < 4; ++e) Y[n][e] = fmaf(e % 2 == 0 ? on_x.x : on_x.y, Y[n][e], dR[n].total(e));
    left[n] = split_tile(Y[n]);
  }
  multiply_by_lower(left, J, lane, y);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) Y[n][e] = y[n].total(e);
  }
}

// G^T = e_n G^T + (scale e d_o)^T q - (beta e Y)^T k
template <int kK, bool kPerChannel>
__device__ __forceinline__ void update_gradient(Stage<kK, kPerChannel>& stage, int lane, const Values& d_o,
                                                const Values& Y, float (&G)[kK / 8][4]) {
  const FloatTile<kK> reader = stage.reader(), queries = stage.queries();
  SplitTile of_q[kTokenTiles], of_k[kTokenTiles];
  scale_rows(stage.token, kOnQueryRead, 1.0f, lane, d_o, of_q);
  scale_rows(stage.token, kOnKeyRead, -1.0f, lane, Y, of_k);
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
    SplitSum sum;
#pragma unroll
    for (int m = 0; m < kTokenTiles; ++m) {
      multiply(sum, of_q[m], queries.pair_across(m, n, lane));
      multiply(sum, of_k[m], reader.pair_across(m, n, lane));
    }
    const float2 total = kPerChannel ? *reinterpret_cast<const float2*>(stage.total + 8 * n + 2 * (lane % 4))
                                     : make_float2(stage.total[0], stage.total[0]);
#pragma unroll
    for (int e = 0; e < 4; ++e) G[n][e] = fmaf(e % 2 == 0 ? total.x : total.y, G[n][e], sum.total(e));
  }
}

// One tile: Y and dv, and G^T becomes the gradient of the state before it.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void retreat(const TileBackwardArgs& args, const SequenceSpan& span, const ScanPart& part,
                                        int64_t position, int column, Stage<kK, kPerChannel>& stage, int lane,
                                        float (&G)[kK / 8][4]) {
  const DeltaRuleDeviceProblem& p = args.tile.problem;
  const int64_t first = position * kTileRows;
  const int rows = static_cast<int>(min(span.length - first, int64_t{kTileRows}));
  const auto rows_of = [&](const DeviceTensor& x) {
    return ValueRows{row_offset(x, span.batch, span.begin + first, part.head), rows, column, p.head_dim_v};
  };
  RawValues raw = {};
  if (args.d_o.present()) load_values(args.d_o, rows_of(args.d_o), lane, raw);
  Values Y, d_o;  // Y is G^T k^T first
  multiply_state(stage.writer(), lane, G, Y);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) d_o[n][e] = decode(raw[n][e], args.d_o.dtype);
  }
  solve_adjoint(stage.sP, stage.J, stage.token, lane, d_o, Y);
  if (args.Y.present()) store_values(args.Y, rows_of(args.Y), lane, Y);
  update_gradient(stage, lane, d_o, Y, G);
  if (!args.dv.present()) return;
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const float2 beta = token_pair(stage.token, kOnValue, n, lane);
#pragma unroll
    for (int e = 0; e < 4; ++e) Y[n][e] *= e % 2 == 0 ? beta.x : beta.y;
  }
  store_values(args.dv, rows_of(args.dv), lane, Y);
}

// Where the gradient of the state after the share of a sequence is, and where that of the state before it goes: at the
// ends of the sequence the caller's, else carried from segment to segment. An empty sequence belongs to the first one.
template <bool kEnd>
__device__ __forceinline__ StateAddress gradient_address(const TileBackwardArgs& args, const ScanPart& part,
                                                         const Segment::Share& share, int64_t tiles) {
  const bool at_end = share.end == tiles, at_start = share.begin == 0;
  const bool callers = kEnd ? at_end : at_start;
  const DeviceStates states =
      callers ? (kEnd ? args.d_final_state : args.d_initial_state) : (kEnd ? args.carry_in : args.carry_out);
  const int64_t slot = callers ? part.sequence : args.segment.carry_slot(part.sequence);
  const bool has_share = share.begin < share.end || (tiles == 0 && args.segment.first == 0);
  return {states, slot * states.outer_strides[0] + part.head * states.outer_strides[1], has_share && states.present()};
}

// The state is written in one place of the code, which its compile time asks for.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void run_part(const TileBackwardArgs& args, const ScanPart& part,
                                         Stage<kK, kPerChannel>* stage) {
  const TileArgs& tile = args.tile;
  const DeltaRuleDeviceProblem& p = tile.problem;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int K = p.head_dim_k, V = p.head_dim_v, column = part.column + kTileColumns * warp;
  const SequenceSpan span = sequence_at(p.sequences, part.sequence);
  const int64_t tiles = tiles_of(tile, span, part.first_chunk);
  const Segment::Share share = args.segment.share(tiles, part.first_chunk);
  if (share.end > share.begin) load_stage(tile, part, span, share.end - 1, stage[(share.end - 1) % 2]);
  commit_copies();

  float G[kK / 8][4] = {};
  const StateAddress end = gradient_address<true>(args, part, share, tiles);
  if (end.exists) load_state<kK>(end.states, end.offset, column, K, V, lane, G);
#pragma unroll 1
  for (int64_t c = share.end - 1;; --c) {
    const bool last = c < share.begin;
    StateAddress place = gradient_address<false>(args, part, share, tiles);
    if (!last) {
      const int64_t slot = args.segment.slot(part.sequence, c, part.first_chunk + c);
      place = {args.G, slot * args.G.outer_strides[0] + part.head * args.G.outer_strides[1], args.G.present()};
    }
    if (place.exists) store_state<kK>(place.states, place.offset, column, K, V, lane, G);
    if (last) return;
    // After the barrier everybody's part of this tile is there, and nobody reads the last tile's stage any more.
    wait_copies<0>();
    __syncthreads();
    if (c > share.begin) load_stage(tile, part, span, c - 1, stage[(c - 1) % 2]);
    commit_copies();
    if (column < V) retreat(args, span, part, c, column, stage[c % 2], lane, G);
  }
}

// A block per part; a smaller grid goes round.
template <int kK, bool kPerChannel>
__global__ void __launch_bounds__(kMostWarps* kWarpSize, kK == 64    ? 4
                                                         : kK == 128 ? 3
                                                                     : 2)
    tile_gradient_scan_kernel(const __grid_constant__ TileBackwardArgs args, int columns, int64_t parts) {
  auto* stage = &dynamic_shared<Stage<kK, kPerChannel>>();
  for (int64_t at = blockIdx.x; at < parts; at += gridDim.x) {
    run_part<kK, kPerChannel>(args, scan_part_at(args.tile.problem, args.tile.tiles, at, columns), stage);
    __syncthreads();  // before the next part's first copies
  }
}

}  // namespace

void launch_gradient_scan(const TileBackwardArgs& args, const ScanConfig& config, const Context& context) {
  const DeltaRuleDeviceProblem& p = args.tile.problem;
  const int columns = config.columns(), ranges = (p.head_dim_v + columns - 1) / columns;
  const int64_t parts = p.sequences.count * p.num_value_heads * ranges;
  const LaunchShape shape{static_cast<unsigned>(std::min<int64_t>(parts, 1 << 30)),
                          static_cast<unsigned>(config.warps * kWarpSize),
                          scan_bytes(config.padded_k, config.per_channel)};
  with_padded_k_and_gate(config.padded_k, config.per_channel, [&]<int kK, bool kPerChannel>() {
    launch<tile_gradient_scan_kernel<kK, kPerChannel>>("delta_rule chunk_fp32 gradient scan", context, shape, args,
                                                       columns, parts);
  });
}

}  // namespace fastweight::cuda::chunk_fp32
