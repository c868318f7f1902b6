// Backward by mini-batches of 16 tokens: what it takes, its configuration, and the launches.
#include <string>

#include "core/workspace.h"
#include "cuda/common/launch.h"
#include "cuda/ttt_linear/chunk_chain/backward.cuh"
#include "cuda/ttt_linear/chunk_chain/chain.cuh"
#include "cuda/ttt_linear/kept_states.h"
#include "cuda/ttt_linear/kernels.h"
#include "cuda/ttt_linear/parameter_sums.h"

namespace fastweight::cuda::ttt {
namespace {

ReverseArgs reverse_args(const TttLinearBackwardProblem& problem) {
  const TttLinearBackward& call = problem.args;
  ReverseArgs args;
  args.chain.problem = device_problem(problem);
  args.chain.initial_state = device_states(call.d_final_state, false);
  args.chain.initial_state_bias = device_tensor(call.d_final_state_bias);
  args.chain.final_state = device_states(call.d_initial_state, false);
  args.chain.final_state_bias = device_tensor(call.d_initial_state_bias);
  args.vectors = has_vectors(call.in.q) && has_vectors(call.in.k) && has_vectors(call.in.v) &&
                 (!call.d_o.present() || has_vectors(call.d_o));
  args.d_o = device_tensor(call.d_o);
  args.dq = device_tensor(call.dq);
  args.dk = device_tensor(call.dk);
  args.dv = device_tensor(call.dv);
  args.deta = device_tensor(call.deta);
  return args;
}

ChunkArgs states_args(const TttLinearBackwardProblem& problem) {
  const TttLinearInputs& in = problem.args.in;
  ChunkArgs args;
  args.problem = device_problem(problem);
  args.vectors = has_vectors(in.k) && has_vectors(in.v);
  args.initial_state = device_states(in.initial_state, false);
  args.initial_state_bias = device_tensor(in.initial_state_bias);
  return args;
}

void take_scratch(ScratchLayout& layout, bool own_states, ReverseArgs& args) {
  const DeviceProblem& p = args.chain.problem;
  if (own_states) {
    const int64_t count = most_mini_batches(p.sequences, kTileRows) * p.num_heads;
    args.kept.data = layout.take<int32_t>(count * KeptTiles::words(args.kept.padded_dim));
  }
  args.parameter_sums = layout.take<double>(p.sequences.count * p.num_heads * 2 * p.head_dim);
}

ReverseConfig config_of(const TttLinearBackwardProblem& problem) {
  const int device = problem.args.in.q.device.index;
  return reverse_config(problem.sizes.head_dim,
                        static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)));
}

void launch_keep_states(const TttLinearBackwardProblem& problem, const KeptTiles& kept, const Context& context) {
  const ChainConfig config = chain_config(problem.sizes.head_dim);
  ChunkArgs args = states_args(problem);
  args.kept = kept;
  if (problem.args.in.q.dtype == DType::kBF16) {
    launch_keep_states<DType::kBF16>(config, args, context);
  } else {
    launch_keep_states<DType::kF16>(config, args, context);
  }
}

void launch_reverse(const TttLinearBackwardProblem& problem, const ReverseArgs& args, const Context& context) {
  const ReverseConfig config = config_of(problem);
  const auto launch_for = [&]<DType kType>() {
    if (config.padded_dim > 64) {
      launch_wide_reverse<kType>(config, args, context);
    } else {
      launch_reverse<kType>(config, args, context);
    }
  };
  if (problem.args.in.q.dtype == DType::kBF16) {
    launch_for.template operator()<DType::kBF16>();
  } else {
    launch_for.template operator()<DType::kF16>();
  }
}

// Whether the way back has a kernel on tensor cores; else it is that of chunk_fp32, from the states of this chain. So
// sequences can be cut between a forward and a backward that are both chosen automatically.
bool has_reverse(const TttLinearBackwardProblem& problem) {
  const TttLinearBackward& call = problem.args;
  return (!call.d_o.present() || call.d_o.dtype == call.in.q.dtype) &&
         lacks_shared_memory(config_of(problem).shared_bytes, call.in.q.device.index).empty();
}

}  // namespace

ReverseConfig reverse_config(int64_t head_dim, size_t shared_limit) {
  ReverseConfig config;
  config.padded_dim = chain_config(head_dim).padded_dim;
  config.full = head_dim == config.padded_dim;
  if (head_dim == kSoloDim && sizeof(SoloShared) <= shared_limit) {
    config.groups = kSolos;
    config.threads = 2 * kSoloDim + kSolos * kWarpSize;
    config.shared_bytes = sizeof(SoloShared);
    return config;
  }
  config.groups = config.padded_dim == 64 && sizeof(ReverseShared<64, kMostGroups>) <= shared_limit ? kMostGroups : 1;
  config.shared_bytes = config.padded_dim > 64         ? sizeof(ReverseShared<128, 1>)
                        : config.groups == kMostGroups ? sizeof(ReverseShared<64, kMostGroups>)
                                                       : sizeof(ReverseShared<64, 1>);
  config.threads = (1 + config.groups) * column_warps(head_dim) * kWarpSize;
  return config;
}

std::string declines_chunk_chain_backward(const TttLinearBackwardProblem& problem) {
  if (const std::string reason = beyond_all_kernels(problem); !reason.empty()) return reason;
  const TensorView& q = problem.args.in.q;
  const int32_t mini_batch = problem.args.options.mini_batch;
  if (q.dtype != DType::kBF16 && q.dtype != DType::kF16) return "q, k and v must be bf16 or fp16";
  if (mini_batch != kTileRows) return "takes mini-batches of 16 tokens, got " + std::to_string(mini_batch);
  return lacks_shared_memory(chain_config(problem.sizes.head_dim).shared_bytes, q.device.index);
}

std::string chunk_chain_backward_config(const TttLinearBackwardProblem& problem) {
  return has_reverse(problem) ? config_of(problem).text() : "in fp32, " + chunk_fp32_backward_config(problem);
}

void chunk_chain_backward(const TttLinearBackwardProblem& problem, const Context& context) {
  ReverseArgs args = reverse_args(problem);
  args.kept = kept_tiles(problem);
  const bool own_states = !args.kept.present();
  ScratchLayout measure;
  take_scratch(measure, own_states, args);
  const DeviceWorkspace workspace(context, measure.bytes());
  ScratchLayout layout(workspace.data());
  take_scratch(layout, own_states, args);
  if (own_states) launch_keep_states(problem, args.kept, context);
  if (!has_reverse(problem)) {
    backward_in_fp32(problem, args.kept, context);
    return;
  }
  launch_reverse(problem, args, context);
  add_parameter_sums(args.parameter_sums, args.chain.problem, device_tensor(problem.args.dw),
                     device_tensor(problem.args.db), context);
}

}  // namespace fastweight::cuda::ttt
