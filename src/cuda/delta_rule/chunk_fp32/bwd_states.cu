// The forward again, for the backward: the state before every tile of a segment and R, with the bits of the forward's
// scan (scan.cu), without its outputs; or the states before the segments alone. A block has a run of tiles of one value
// head and up to 64 value columns.
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_fp32/bwd.cuh"
#include "cuda/delta_rule/chunk_fp32/scan_tile.cuh"

namespace fastweight::cuda::chunk_fp32 {
namespace {

// Tiles [first, end) of the part's sequence.
struct Run {
  ScanPart part;
  int64_t first, end;
};

// R^T of a tile from the state before it; S^T becomes the state after it where that is wanted.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void advance(const TileBackwardArgs& args, const SequenceSpan& span, const ScanPart& part,
                                        int64_t position, int column, bool starts, bool last,
                                        Stage<kK, kPerChannel>& stage, int lane, float (&S)[kK / 8][4]) {
  const DeltaRuleDeviceProblem& p = args.tile.problem;
  const int64_t first = position * kTileRows;
  const int rows = static_cast<int>(min(span.length - first, int64_t{kTileRows}));
  const auto rows_of = [&](const DeviceTensor& x) {
    return ValueRows{row_offset(x, span.batch, span.begin + first, part.head), rows, column, p.head_dim_v};
  };
  RawValues v = {};
  load_values(p.v, rows_of(p.v), lane, v);
  Values R;  // X = S^T k^T, then bD^T, then R^T
  multiply_state(stage.reader(), lane, S, R);
  subtract_reads(v, p.v.dtype, stage.token, lane, R);
  apply_inverse(stage.J, lane, R);
  if (!starts) store_values(args.R, rows_of(args.R), lane, R);
  if (last) return;
  SplitTile left[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    if constexpr (!kPerChannel) {  // (w R)^T; per channel the writer has the factor
      const float2 on_r = token_pair(stage.token, kOnWrite, n, lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) R[n][e] *= e % 2 == 0 ? on_r.x : on_r.y;
    }
    left[n] = split_tile(R[n]);
  }
  write_state(stage, left, lane, S);
}

// Where the state before a tile goes: to the tiles' states, or, before a segment, to the segments'.
__device__ __forceinline__ StateAddress state_address(const TileBackwardArgs& args, const ScanPart& part,
                                                      int64_t position, bool starts) {
  const Segment& segment = args.segment;
  const int64_t tile = part.first_chunk + position;
  const DeviceStates states = starts ? args.starts : args.S;
  const int64_t slot =
      starts ? segment.start_slot(part.sequence, position, tile) : segment.slot(part.sequence, position, tile);
  return {states, slot * states.outer_strides[0] + part.head * states.outer_strides[1],
          !starts || segment.begins_with(position, tile)};
}

// Where the state before a run is.
__device__ __forceinline__ StateAddress start_address(const TileBackwardArgs& args, const ScanPart& part, int64_t batch,
                                                      int64_t position) {
  const TileArgs& tile = args.tile;
  if (tile.chunk_states.present()) {
    return chunk_state_address(tile, part, batch, position, tile.chunked.chunk_size / kTileRows);
  }
  if (position > 0) return state_address(args, part, position, true);
  return {tile.initial_state, state_offset(tile.initial_state, part), tile.initial_state.present()};
}

// `starts`: the states before the segments are wanted and nothing else.
template <int kK, bool kPerChannel>
__device__ __forceinline__ void run_tiles(const TileBackwardArgs& args, const Run& run, bool starts,
                                          Stage<kK, kPerChannel>* stage) {
  const TileArgs& tile = args.tile;
  const DeltaRuleDeviceProblem& p = tile.problem;
  const ScanPart& part = run.part;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int K = p.head_dim_k, V = p.head_dim_v, column = part.column + kTileColumns * warp;
  const SequenceSpan span = sequence_at(p.sequences, part.sequence);
  if (run.first >= run.end) return;
  load_stage(tile, part, span, run.first, stage[run.first % 2]);
  commit_copies();

  float S[kK / 8][4] = {};
  const StateAddress start = start_address(args, part, span.batch, run.first);
  if (start.exists) load_state<kK>(start.states, start.offset, column, K, V, lane, S);
#pragma unroll 1
  for (int64_t c = run.first; c < run.end; ++c) {
    const StateAddress place = state_address(args, part, c, starts);
    if (place.exists) store_state<kK>(place.states, place.offset, column, K, V, lane, S);
    // After the barrier everybody's part of this tile is there, and nobody reads the last tile's stage any more.
    wait_copies<0>();
    __syncthreads();
    if (c + 1 < run.end) load_stage(tile, part, span, c + 1, stage[(c + 1) % 2]);
    commit_copies();
    if (column < V) advance(args, span, part, c, column, starts, c + 1 == run.end, stage[c % 2], lane, S);
  }
}

// Item `at` of (run, value head, range of columns), the last fastest. A run is a segment's share of a sequence; from
// given chunk states, a chunk of it.
__device__ __forceinline__ Run run_at(const TileBackwardArgs& args, int64_t at, int columns, bool starts) {
  const TileArgs& tile = args.tile;
  const Segment& segment = args.segment;
  const DeltaRuleDeviceProblem& p = tile.problem;
  const int64_t ranges = (p.head_dim_v + columns - 1) / columns, per_run = p.num_value_heads * ranges;
  const int64_t tiles = tile.chunked.chunk_size / kTileRows, rest = at % per_run;
  const bool given = tile.chunk_states.present();
  int64_t sequence = at / per_run, position = 0;
  if (given && segment.kind == Segment::kWhole) {
    const ChunkSpan span = chunk_at(tile.chunked, at / per_run);
    sequence = span.sequence;
    position = span.position * tiles;
  } else if (given) {
    const int64_t runs = segment.count / tiles;
    sequence = at / per_run / runs;
    position = segment.first + at / per_run % runs * tiles;
  }
  Run run{};
  if (sequence < 0) return run;
  run.part = scan_part_at(p, tile.tiles, sequence * per_run + rest, columns);
  const int64_t all = tiles_of(tile, sequence_at(p.sequences, sequence), run.part.first_chunk);
  const Segment::Share share = segment.share(all, run.part.first_chunk);
  run.first = starts ? 0 : given ? position : share.begin;
  run.end = starts ? all : given ? min(position + tiles, all) : share.end;
  return run;
}

template <int kK, bool kPerChannel>
__global__ void __launch_bounds__(kMostWarps* kWarpSize, kK == 64    ? 4
                                                         : kK == 128 ? 3
                                                                     : 2)
    tile_states_kernel(const __grid_constant__ TileBackwardArgs args, int columns, int64_t items, bool starts) {
  auto* stage = &dynamic_shared<Stage<kK, kPerChannel>>();
  for (int64_t at = blockIdx.x; at < items; at += gridDim.x) {
    run_tiles<kK, kPerChannel>(args, run_at(args, at, columns, starts), starts, stage);
    __syncthreads();  // before the next run's first copies
  }
}

void launch_runs(const TileBackwardArgs& args, const ScanConfig& config, int64_t runs, bool starts,
                 const Context& context) {
  const DeltaRuleDeviceProblem& p = args.tile.problem;
  const int columns = config.columns(), ranges = (p.head_dim_v + columns - 1) / columns;
  const int64_t items = runs * p.num_value_heads * ranges;
  if (items == 0) return;
  const LaunchShape shape{static_cast<unsigned>(std::min<int64_t>(items, 1 << 30)),
                          static_cast<unsigned>(config.warps * kWarpSize),
                          scan_bytes(config.padded_k, config.per_channel)};
  with_padded_k_and_gate(config.padded_k, config.per_channel, [&]<int kK, bool kPerChannel>() {
    launch<tile_states_kernel<kK, kPerChannel>>("delta_rule chunk_fp32 states", context, shape, args, columns, items,
                                                starts);
  });
}

}  // namespace

void launch_starts(const TileBackwardArgs& args, const ScanConfig& config, const Context& context) {
  launch_runs(args, config, args.tile.problem.sequences.count, true, context);
}

void launch_states(const TileBackwardArgs& args, const ScanConfig& config, const Context& context) {
  const TileArgs& tile = args.tile;
  const Sequences& sequences = tile.problem.sequences;
  const int64_t tokens = tile.chunked.chunk_size;
  int64_t runs = sequences.count;
  if (tile.chunk_states.present()) {
    runs = args.segment.kind == Segment::kWhole ? max_chunks(sequences, tokens)
                                                : sequences.count * (args.segment.count * kTileRows / tokens);
  }
  launch_runs(args, config, runs, false, context);
}

}  // namespace fastweight::cuda::chunk_fp32
