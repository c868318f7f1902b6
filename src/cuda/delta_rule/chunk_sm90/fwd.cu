// The entry chunk_sm90, forward in the chunk form on Hopper: what it takes, its tensor maps and its launches. The scan:
// scan.cuh, with the factors of chunk_16bit. With decays per channel: factors_per_channel.cu and scan_per_channel.cuh.
#include <limits>
#include <string>

#include "cuda/delta_rule/chunk_16bit/setup.h"
#include "cuda/delta_rule/chunk_sm90/factors_per_channel.h"
#include "cuda/delta_rule/chunk_sm90/scan.h"
#include "cuda/delta_rule/chunk_sm90/scan_per_channel.h"
#include "cuda/delta_rule/kernels.h"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::ChunkArgs;
using chunk_16bit::kChunkRows;

// Of boxes, tokens and chunks, places are 32-bit numbers.
bool fits_places(const DeltaRuleForwardProblem& problem, int64_t num_chunks) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - kChunkRows;
  return problem.sizes.tokens <= kMost && num_chunks * problem.sizes.num_value_heads <= kMost;
}

TensorMap rows_map(const TensorView& x) { return token_map(x, kChunkRows, 64, Swizzle::k128); }

int columns_of(const DeltaRuleForwardProblem& problem) {
  return scan_columns(problem.sizes.num_sequences * problem.sizes.num_value_heads, problem.args.in.q.device.index);
}

}  // namespace

// Few heads: narrow blocks, as long as each has a multiprocessor of its own.
int scan_columns(int64_t heads, int device) {
  return 2 * heads <= device_attribute(cudaDevAttrMultiProcessorCount, device) ? kWidth / 2 : kWidth;
}

ScanMaps scan_maps(const DeltaRuleInputs& in, const TensorView& o, const ChunkArgs& args) {
  const int64_t items = count_items(args);
  return {rows_map(in.k),
          rows_map(in.q),
          rows_map(in.v),
          o.present() ? rows_map(o) : TensorMap{},
          lower_map(args.factors.J, in.k.dtype, items),
          lower_map(args.factors.sP, in.k.dtype, items)};
}

ChannelScanMaps channel_scan_maps(const DeltaRuleInputs& in, const TensorView& o, const ChunkArgs& args) {
  const DType dtype = in.k.dtype;
  const int64_t items = count_items(args);
  return {copies_map(args.factors.keys, dtype, items), rows_map(in.v), o.present() ? rows_map(o) : TensorMap{},
          lower_map(args.factors.J, dtype, items), lower_map(args.factors.sP, dtype, items)};
}

TensorMap lower_map(const uint16_t* matrices, DType dtype, int64_t items) {
  constexpr int kBlock = 16, kBlocks = kChunkRows / kBlock;
  TensorMapSpec spec{.data = matrices - (kChunkRows - kBlock),
                     .dtype = dtype,
                     .rank = 4,
                     .sizes = {kChunkRows, kBlocks, kChunkRows, items},
                     .strides = {1, kBlock, kChunkRows, kChunkRows * kChunkRows},
                     .box = {kChunkRows, 1, kBlock, 1},
                     .swizzle = Swizzle::k128};
  return tensor_map(spec);
}

std::string declines_forward(const DeltaRuleForwardProblem& problem) {
  const DeltaRuleInputs& in = problem.args.in;
  const DeltaRuleSizes& sizes = problem.sizes;
  const std::string reason = chunk_16bit::declines_forward(problem);
  if (!reason.empty()) return reason;
  if (device_attribute(cudaDevAttrComputeCapabilityMajor, in.q.device.index) != 9)
    return "needs compute capability 9.0";
  if (sizes.head_dim_k <= kWidth / 2 || sizes.head_dim_k > kWidth || sizes.head_dim_v <= kWidth / 2 ||
      sizes.head_dim_v > kWidth) {
    return "K and V must be from 65 to 128";
  }
  if (!has_token_map(in.q) || !has_token_map(in.k) || !has_token_map(in.v) || !has_token_map(problem.args.o)) {
    return "rows of q, k, v and o must lie together, at multiples of 16 bytes";
  }
  const auto sequences = device_sequences(in.cu_seqlens, sizes.num_sequences, sizes.tokens);
  if (!fits_places(problem, max_chunks(sequences, problem.args.options.chunk_size))) return "too many tokens";
  const bool per_channel = chunk_16bit::has_decay_per_channel(problem);
  return lacks_shared_memory(per_channel ? channel_scan_bytes() : scan_bytes(), in.q.device.index);
}

std::string config_text(const DeltaRuleForwardProblem& problem) {
  return "K " + std::to_string(kWidth) + ", columns " + std::to_string(columns_of(problem)) + ", stages " +
         std::to_string(kStages);
}

void forward(const DeltaRuleForwardProblem& problem, const Context& context) {
  const int columns = columns_of(problem);
  if (chunk_16bit::has_decay_per_channel(problem)) {
    chunk_16bit::forward_in_windows(problem, context, [&](const ChunkArgs& args) {
      chunk_16bit::compute_factors(problem, args, context);
      const ChannelScanMaps maps =
          args.num_chunks > 0 ? channel_scan_maps(problem.args.in, problem.args.o, args) : ChannelScanMaps{};
      args.problem.k.dtype == DType::kBF16 ? launch_channel_scan<DType::kBF16>(args, maps, columns, context)
                                           : launch_channel_scan<DType::kF16>(args, maps, columns, context);
    });
    return;
  }
  chunk_16bit::forward_in_windows(problem, context, [&](const ChunkArgs& args) {
    chunk_16bit::compute_factors(problem, args, context);
    const ScanMaps maps = args.num_chunks > 0 ? scan_maps(problem.args.in, problem.args.o, args) : ScanMaps{};
    if (args.problem.k.dtype == DType::kBF16) {
      launch_scan<DType::kBF16>(args, maps, columns, context);
    } else {
      launch_scan<DType::kF16>(args, maps, columns, context);
    }
  });
}

}  // namespace fastweight::cuda::chunk_sm90
