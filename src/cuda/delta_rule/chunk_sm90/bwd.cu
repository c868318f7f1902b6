// The entry chunk_sm90, backward in the chunk form on Hopper: what it takes, its tensor maps and its launches. Factors,
// states and gradients are those of chunk_16bit; the scan back: scan_back.cuh.
#include <limits>
#include <string>

#include "cuda/delta_rule/chunk_16bit/backward.h"
#include "cuda/delta_rule/chunk_16bit/setup.h"
#include "cuda/delta_rule/chunk_sm90/scan.h"
#include "cuda/delta_rule/chunk_sm90/scan_back.h"
#include "cuda/delta_rule/kernels.h"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::ChunkArgs;
using chunk_16bit::GradientArgs;
using chunk_16bit::kChunkRows;

ScanBackMaps scan_back_maps(const DeltaRuleBackward& call, const GradientArgs& args) {
  const auto rows = [](const TensorView& x) { return token_map(x, kChunkRows, 64, Swizzle::k128); };
  const DType dtype = call.in.k.dtype;
  const ChunkArgs& chunk = args.chunk;
  const int64_t HV = chunk.problem.num_value_heads, slots = chunk_16bit::chunks_in_window(chunk) * HV;
  const int64_t items = chunk.factors_of_window ? slots : chunk.num_chunks * HV;
  return {rows(call.in.k),
          rows(call.in.q),
          rows(call.d_o),
          call.dv.present() ? rows(call.dv) : TensorMap{},
          lower_map(chunk.factors.J, dtype, items),
          lower_map(chunk.factors.sP, dtype, items),
          rows_map(args.G, dtype, kWidth, slots),
          rows_map(args.Y, dtype, kChunkRows, slots)};
}

// Few heads: narrow blocks, as long as each has a multiprocessor of its own.
int columns_of(const DeltaRuleBackwardProblem& problem) {
  const int64_t heads = problem.sizes.num_sequences * problem.sizes.num_value_heads;
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount, problem.args.in.q.device.index);
  return 2 * heads <= multiprocessors ? kWidth / 2 : kWidth;
}

}  // namespace

TensorMap rows_map(const uint16_t* matrices, DType dtype, int columns, int64_t items) {
  TensorMapSpec spec{.data = matrices,
                     .dtype = dtype,
                     .rank = 3,
                     .sizes = {columns, kWidth, items},
                     .strides = {1, columns, int64_t{columns} * kWidth},
                     .box = {64, 64, 1},
                     .swizzle = Swizzle::k128};
  return tensor_map(spec);
}

std::string declines_backward(const DeltaRuleBackwardProblem& problem) {
  const DeltaRuleBackward& call = problem.args;
  const DeltaRuleInputs& in = call.in;
  const DeltaRuleSizes& sizes = problem.sizes;
  const std::string reason = chunk_16bit::declines_backward(problem);
  if (!reason.empty()) return reason;
  if (device_attribute(cudaDevAttrComputeCapabilityMajor, in.q.device.index) != 9)
    return "needs compute capability 9.0";
  if (chunk_16bit::has_decay_per_channel(problem)) return "decays must be numbers per token";
  if (sizes.head_dim_k <= kWidth / 2 || sizes.head_dim_k > kWidth || sizes.head_dim_v <= kWidth / 2 ||
      sizes.head_dim_v > kWidth) {
    return "K and V must be from 65 to 128";
  }
  if (!call.d_o.present()) return "d_o must be there";
  if (call.dv.present() && call.dv.dtype != in.k.dtype) return "dv must have the type of k";
  if (!has_token_map(in.q) || !has_token_map(in.k) || !has_token_map(call.d_o) ||
      (call.dv.present() && !has_token_map(call.dv))) {
    return "rows of q, k, d_o and dv must lie together, at multiples of 16 bytes";
  }
  const auto sequences = device_sequences(in.cu_seqlens, sizes.num_sequences, sizes.tokens);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - kChunkRows;  // places are 32-bit numbers
  if (sizes.tokens > kMost || max_chunks(sequences, call.options.chunk_size) * sizes.num_value_heads > kMost)
    return "too many tokens";
  return lacks_shared_memory(scan_back_bytes(), in.q.device.index);
}

std::string config_text(const DeltaRuleBackwardProblem& problem) {
  return "K " + std::to_string(kWidth) + ", columns " + std::to_string(columns_of(problem));
}

void backward(const DeltaRuleBackwardProblem& problem, const Context& context) {
  const int columns = columns_of(problem), width = kWidth;
  const bool bf16 = problem.args.in.k.dtype == DType::kBF16;
  chunk_16bit::backward_in_windows(
      problem,
      {columns, kWidth / 2, 2, problem.sizes.group > 1,
       [&](const GradientArgs& args) {
         const ScanBackMaps maps = args.chunk.num_chunks > 0 ? scan_back_maps(problem.args, args) : ScanBackMaps{};
         bf16 ? launch_scan_back<DType::kBF16>(args, maps, columns, context)
              : launch_scan_back<DType::kF16>(args, maps, columns, context);
       },
       [&](const GradientArgs& args, int64_t blocks) {
         bf16 ? chunk_16bit::launch_gradients_of<DType::kBF16>(args, width, blocks, context)
              : chunk_16bit::launch_gradients_of<DType::kF16>(args, width, blocks, context);
       }},
      context);
}

}  // namespace fastweight::cuda::chunk_sm90
