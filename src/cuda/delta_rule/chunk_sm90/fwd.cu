// The entry chunk_sm90, forward in the chunk form on Hopper: what it takes, its tensor maps and its launches. The kernels:
// factors.cu, scan.cuh; with decays per channel factors_per_channel.cu, scan_per_channel.cuh.
#include <algorithm>
#include <limits>
#include <string>

#include "cuda/delta_rule/chunk_16bit/setup.h"
#include "cuda/delta_rule/chunk_sm90/beside.h"
#include "cuda/delta_rule/chunk_sm90/factors_per_channel.h"
#include "cuda/delta_rule/chunk_sm90/scan.h"
#include "cuda/delta_rule/chunk_sm90/scan_per_channel.h"
#include "cuda/delta_rule/chunk_sm90/segments.h"
#include "cuda/delta_rule/kernels.h"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::ChunkArgs;
using chunk_16bit::kChunkRows;

// Of ranges of 64 value columns, of all heads of so many walks.
int64_t count_ranges(const DeltaRuleSizes& sizes, int64_t walks) {
  return walks * sizes.num_value_heads * ((sizes.head_dim_v + 63) / 64);
}

// Of boxes, tokens and chunks, places are 32-bit numbers, and so are the parts of the scan.
bool fits_places(const DeltaRuleForwardProblem& problem, int64_t num_chunks) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2 - kChunkRows;
  const DeltaRuleSizes& sizes = problem.sizes;
  const int64_t ranges = count_ranges(sizes, sizes.num_sequences);
  return sizes.tokens <= kMost && std::max(num_chunks * sizes.num_value_heads, ranges) <= kMost;
}

TensorMap rows_map(const TensorView& x) {
  return x.present() ? token_map(x, kChunkRows, 64, Swizzle::k128) : TensorMap{};
}

int multiprocessors_of(const DeltaRuleForwardProblem& problem) {
  return device_attribute(cudaDevAttrMultiProcessorCount, problem.args.in.q.device.index);
}

ForwardArgs cut_args(const DeltaRuleForwardProblem& problem, const Context& context) {
  return chunk_16bit::with_segments(chunk_16bit::chunk_args(problem), segment_chunks_of(problem, context));
}

// A scan and its factors may run beside each other where all rows go at the same pace: not with several sequences in one,
// whose chunks come one sequence after the other, and not in segments.
bool may_be_beside(const DeltaRuleForwardProblem& problem, const ForwardArgs& args) {
  const Sequences& sequences = args.problem.sequences;
  return args.segments.chunks == 0 && (sequences.offsets == nullptr || sequences.count == 1) &&
         (!chunk_16bit::has_decay_per_channel(problem) || makes_channel_factors_beside(problem.args.in, problem.sizes));
}

// The value columns of a scan's blocks, and whether they make sP, so that the factors need not.
struct ScanBlocks {
  int columns;
  bool makes_sP;
};

// What the plan asks, for such blocks and `chunks` of all rows. The cycles were measured on an H200 (K = V = 128, bf16): of the
// factors with sP and without, for a pair and each of its value heads, and of a chunk in the scan beside them: what it takes a
// block by itself, and, where there are many, what memory gives them all. Other K are taken to cost in proportion.
BesideProblem beside_problem(const DeltaRuleSizes& sizes, const ForwardArgs& args, const ScanBlocks& of, int64_t chunks,
                             int multiprocessors) {
  const int K = padded_k(sizes.head_dim_k);
  const bool saves = args.chunk_states.present();  // which memory shows
  const int64_t pair_cycles = of.makes_sP ? 800 + 1300 * sizes.group : 1160 + 2080 * sizes.group;
  const int64_t blocks = count_blocks(sizes, of.columns);
  const bool narrow = of.columns == 64;
  int64_t alone = narrow ? (saves ? 3200 : 2100) : saves ? 4700 : of.makes_sP ? 3750 : 3250;
  int64_t of_memory = narrow ? (saves ? 36 : 24) : (saves ? 62 : 43) + (of.makes_sP ? 0 : 12);
  if (narrow && of.makes_sP) {  // with K <= 64: in the proportions of wide blocks
    alone = alone * 3750 / 3250;
    of_memory = of_memory * 43 / 55;
  }
  const int64_t chunk_cycles = std::max(alone, of_memory * std::min<int64_t>(blocks, multiprocessors));
  const int64_t percent_beside = saves ? 157 : of.makes_sP ? 110 : 105;
  return {.pairs = chunks * sizes.num_heads,
          .at_place = count_rows(args.problem.sequences) * sizes.num_heads,
          .pair_cycles = pair_cycles * K / 128,
          .beside_cycles = pair_cycles * K / 128 * percent_beside / 100,
          .chunk_cycles = chunk_cycles * K / 128,
          .scan_blocks = blocks,
          .at_once = factor_groups(K, !of.makes_sP)};
}

// The same with decays per channel, where a pair is one of a chunk and a value head. Derived from times on an H200 (K = V = 128, bf16):
//
//     a pair before the scan    0.40 ms for 12288, whose 107 KB each are nearly all that memory gives meanwhile
//     beside it                 9700 cycles in that call, where memory has other work for 0.7 of the time
//     what memory gives         0.37 ms of scan with B = 1, T = 8192, H = 96, with states before the chunks 0.45
//     a chunk, 64 columns       0.35 ms of scan with B = 2, T = 16384, H = 16
//     128 columns, states       taken to be in the proportions of the scan with one decay per head
//
// Beside a scan factors get what it leaves of memory's pace.
BesideProblem channel_beside_problem(const DeltaRuleSizes& sizes, const ForwardArgs& args, int columns, int64_t chunks,
                                     int multiprocessors) {
  constexpr int64_t kPair = 7700, kPairBeside = 7200, kPairOfMemory = 40;
  const int K = padded_k(sizes.head_dim_k);
  const bool saves = args.chunk_states.present();
  const int64_t blocks = count_blocks(sizes, columns);
  const int64_t idle = std::max<int64_t>(multiprocessors - blocks, 0);
  const int64_t alone = columns == 64 ? (saves ? 3900 : 2400) : (saves ? 5700 : 4000);
  const int64_t each = columns == 64 ? (saves ? 33 : 27) : (saves ? 66 : 54);
  const int64_t of_memory = each * std::min<int64_t>(blocks, multiprocessors);
  const int64_t chunk_cycles = std::max(alone, of_memory), left = std::max<int64_t>(chunk_cycles - of_memory, 1);
  return {.pairs = chunks * sizes.num_value_heads,
          .at_place = count_rows(args.problem.sequences) * sizes.num_value_heads,
          .pair_cycles = kPair * K / 128,
          .beside_cycles = std::max(kPairBeside, idle * chunk_cycles * kPairOfMemory / left) * K / 128,
          .chunk_cycles = chunk_cycles * K / 128,
          .scan_blocks = blocks,
          .at_once = channel_factor_teams(K)};
}

// Where a head has several blocks, each would make sP; two blocks of K <= 64 on a multiprocessor have no registers for it, nor
// has one of K > 128.
bool may_make_sP(const DeltaRuleForwardProblem& problem, int columns) {
  const DeltaRuleSizes& sizes = problem.sizes;
  const int K = padded_k(sizes.head_dim_k);
  if (sizes.head_dim_v > columns || chunk_16bit::has_decay_per_channel(problem)) return false;
  return K == 64 ? count_blocks(sizes, columns) <= multiprocessors_of(problem) : columns == 128;
}

// For so many chunks of all rows.
BesidePlan plan_of(const DeltaRuleForwardProblem& problem, const ForwardArgs& args, const ScanBlocks& of,
                   int64_t chunks) {
  const DeltaRuleSizes& sizes = problem.sizes;
  const int multiprocessors = multiprocessors_of(problem);
  return plan_beside(chunk_16bit::has_decay_per_channel(problem)
                         ? channel_beside_problem(sizes, args, of.columns, chunks, multiprocessors)
                         : beside_problem(sizes, args, of, chunks, multiprocessors),
                     multiprocessors);
}

// Whatever gives the shortest time with factors beside the scan. For all windows.
ScanBlocks blocks_of(const DeltaRuleForwardProblem& problem, const Context& context) {
  const DeltaRuleSizes& sizes = problem.sizes;
  const ForwardArgs args = cut_args(problem, context);
  const int K = padded_k(sizes.head_dim_k);
  if (!may_be_beside(problem, args) || K > 128 || (K == 128 && sizes.head_dim_v <= 64)) {
    const int columns = scan_columns(sizes, args, context.device.index);
    // With few blocks the scan sets the pace, not memory.
    const bool few = K == 64 && 2 * count_blocks(sizes, columns) <= multiprocessors_of(problem);
    return {columns, !few && may_make_sP(problem, columns)};
  }
  const auto cycles = [&](const ScanBlocks& of) { return plan_of(problem, args, of, args.num_chunks).cycles; };
  ScanBlocks best{64, false};
  for (const ScanBlocks& other : {ScanBlocks{64, true}, {128, true}, {128, false}}) {
    if (other.columns > 64 && K == 64) continue;
    if (other.makes_sP && !may_make_sP(problem, other.columns)) continue;
    if (cycles(other) < cycles(best)) best = other;
  }
  return best;
}

// Of states [B, chunks, HV, V, channels], the last dimension first.
struct StateDimensions {
  int64_t sizes[5], strides[5];
};
StateDimensions dimensions_of(const DeviceStates& states, int width, const ChunkArgs& args) {
  const DeltaRuleDeviceProblem& p = args.problem;
  return {{width, p.head_dim_v, p.num_value_heads, args.state_chunks, count_rows(p.sequences)},
          {1, states.v_stride, states.outer_strides[2], states.outer_strides[1], states.outer_strides[0]}};
}

}  // namespace

// Few heads: narrow blocks, as long as each has a multiprocessor of its own. With K <= 64 or K > 128 there are no others.
int scan_columns(const DeltaRuleSizes& sizes, const ScanArgs& args, int device) {
  if (padded_k(sizes.head_dim_k) != 128 || sizes.head_dim_v <= 64) return 64;
  const int64_t walks = count_walks(args.problem.sequences, args.segments.chunks * args.chunked.chunk_size);
  return count_ranges(sizes, walks) <= device_attribute(cudaDevAttrMultiProcessorCount, device) ? 64 : 128;
}

std::string declines_device(int device) {
  return device_attribute(cudaDevAttrComputeCapabilityMajor, device) == 9 ? "" : "needs compute capability 9.0";
}

ScanMaps scan_maps(const DeltaRuleInputs& in, const TensorView& o, const ChunkArgs& args) {
  const int64_t items = count_items(args);
  ScanMaps maps{};
  maps.k = rows_map(in.k);
  maps.q = rows_map(in.q);
  maps.v = rows_map(in.v);
  maps.o = rows_map(o);
  maps.lower = lower_maps(args.factors.lower, in.k.dtype, items);
  maps.has_states = have_states_map(args);
  if (maps.has_states) maps.states = states_map(args.chunk_states, args.state_width, args, 64);
  return maps;
}

ChannelScanMaps channel_scan_maps(const DeltaRuleInputs& in, const TensorView& o, const ChunkArgs& args) {
  const DType dtype = in.k.dtype;
  const int64_t items = count_items(args);
  ChannelScanMaps maps{};
  maps.keys = copies_map(args.factors.keys, dtype, padded_k(args.problem.head_dim_k), count_copies(args));
  maps.v = rows_map(in.v);
  maps.o = rows_map(o);
  maps.lower = lower_maps(args.factors.lower, dtype, items);
  maps.has_states = have_states_map(args);
  if (maps.has_states) maps.S = states_map(args.chunk_states, args.state_width, args, 64);
  return maps;
}

bool have_states_map(const ChunkArgs& args) {
  if (args.state_width == 0) return false;
  const StateDimensions of = dimensions_of(args.chunk_states, args.state_width, args);
  for (int i = 0; i < 5; ++i) {
    if (of.sizes[i] == 0 || (of.sizes[i] > 1 && of.strides[i] <= 0)) return false;
  }
  return true;
}

TensorMap states_map(const DeviceStates& states, int width, const ChunkArgs& args, int columns) {
  const StateDimensions of = dimensions_of(states, width, args);
  TensorMapSpec spec{.data = states.data, .dtype = states.dtype, .rank = 5, .box = {64, columns, 1, 1, 1}};
  for (int i = 0; i < 5; ++i) {
    spec.sizes[i] = of.sizes[i];
    // The stride along a dimension of one element may be anything; the map gets one that it can have.
    spec.strides[i] = i == 0 || of.sizes[i] > 1 ? of.strides[i] : spec.strides[i - 1] * 8;
  }
  return tensor_map(spec);
}

LowerMaps lower_maps(const uint16_t* lower, DType dtype, int64_t items) {
  using namespace chunk_16bit;
  LowerMaps maps;
  for (int block = 0; block < kChunkRows / 16; ++block) {
    const int pitch = lower_pitch(block);
    TensorMapSpec spec{.data = lower + lower_offset(block, 0, 0),
                       .dtype = dtype,
                       .rank = 4,
                       .sizes = {pitch, 16, kLowerMatrices, items},
                       .strides = {1, pitch, kLowerElements, kLowerMatrices * kLowerElements},
                       .box = {kChunkRows, 16, 1, 1},
                       .swizzle = Swizzle::k128};
    maps.rows[block] = tensor_map(spec);
  }
  return maps;
}

std::string declines_forward(const DeltaRuleForwardProblem& problem) {
  const DeltaRuleInputs& in = problem.args.in;
  const DeltaRuleSizes& sizes = problem.sizes;
  if (const std::string reason = chunk_16bit::declines_forward(problem); !reason.empty()) return reason;
  if (const std::string reason = declines_device(in.q.device.index); !reason.empty()) return reason;
  const auto has_rows = [](const TensorView& x) { return !x.present() || has_token_map(x); };
  if (!has_token_map(in.q) || !has_token_map(in.k) || !has_rows(in.v) || !has_rows(problem.args.o)) {
    return "rows of q, k, v and o must lie together, at multiples of 16 bytes";
  }
  const auto sequences = device_sequences(in.cu_seqlens, sizes.num_sequences, sizes.tokens);
  if (!fits_places(problem, max_chunks(sequences, problem.args.options.chunk_size))) return "too many tokens";
  const int K = padded_k(sizes.head_dim_k);
  return lacks_shared_memory(chunk_16bit::has_decay_per_channel(problem)
                                 ? channel_scan_bytes(K)
                                 : std::max({factors_bytes(K, true), factors_bytes(K, false), scan_bytes(K)}),
                             in.q.device.index);
}

std::string config_text(const DeltaRuleForwardProblem& problem, const Context& context) {
  const int K = padded_k(problem.sizes.head_dim_k);
  return "K " + std::to_string(K) + ", columns " + std::to_string(blocks_of(problem, context).columns) + ", stages " +
         std::to_string(scan_stages(K)) + segments_text(cut_args(problem, context).segments.chunks);
}

void forward(const DeltaRuleForwardProblem& problem, const Context& context) {
  const ScanBlocks of = blocks_of(problem, context);
  const int segments = segment_chunks_of(problem, context);
  const auto window_plan = [&](const ForwardArgs& args) {
    return may_be_beside(problem, args) ? plan_of(problem, args, of, chunk_16bit::chunks_in_window(args))
                                        : BesidePlan{};
  };
  if (chunk_16bit::has_decay_per_channel(problem)) {
    chunk_16bit::forward_in_windows(problem, context, false, segments, [&](ForwardArgs args) {
      const BesidePlan plan = window_plan(args);
      if (plan.beside > 0) {
        launch_channel_factors_beside(problem.args.in, args, plan, args.flags, context);
        args.published = args.flags;
      } else {
        chunk_16bit::compute_factors(problem, args, context);
      }
      const ChannelScanMaps maps =
          args.num_chunks > 0 ? channel_scan_maps(problem.args.in, problem.args.o, args) : ChannelScanMaps{};
      args.problem.k.dtype == DType::kBF16 ? launch_channel_scan<DType::kBF16>(args, maps, of.columns, context)
                                           : launch_channel_scan<DType::kF16>(args, maps, of.columns, context);
    });
    return;
  }
  const auto advance = [&](ForwardArgs args) {
    ScanMaps maps{};
    if (args.num_chunks > 0) {
      maps = scan_maps(problem.args.in, problem.args.o, args);
      FactorOrder order = factor_order(args, !of.makes_sP, multiprocessors_of(problem));
      if (const BesidePlan plan = window_plan(args); plan.beside > 0) {
        order.before = plan.before;
        order.beside = plan.beside;
        order.flags = args.flags;
        args.published = args.flags;
      }
      launch_factors(args, maps, order, context);
    }
    if (args.problem.k.dtype == DType::kBF16) {
      launch_scan<DType::kBF16>(args, maps, of.columns, !of.makes_sP, context);
    } else {
      launch_scan<DType::kF16>(args, maps, of.columns, !of.makes_sP, context);
    }
  };
  chunk_16bit::forward_in_windows(problem, context, of.makes_sP, segments, advance);
}

}  // namespace fastweight::cuda::chunk_sm90
