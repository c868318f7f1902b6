// The entry `recurrent`, backward: the states before the chunks by the forward (fwd.cu) unless the caller has them, the
// walk back over the tokens (bwd_walk.cu), then the sums over columns, heads and tokens (bwd_sums.cu,
// ../parameter_sums.cu).
#include "cuda/delta_rule/recurrent/bwd.cuh"

#include "core/workspace.h"
#include "cuda/common/first_chunks.h"
#include "cuda/common/launch.h"
#include "cuda/delta_rule/kernels.h"

namespace fastweight::cuda::recurrent {
namespace {

int ranges_of(const DeltaRuleDeviceProblem& p) { return (p.head_dim_v + kColumnsOfBlock - 1) / kColumnsOfBlock; }

// A part for every range, unless the other blocks fill the device anyway.
int parts_of(const DeltaRuleDeviceProblem& p, const Context& context) {
  const int64_t blocks = p.sequences.count * p.num_value_heads;
  return blocks >= 2 * device_attribute(cudaDevAttrMultiProcessorCount, context.device.index) ? 1 : ranges_of(p);
}

// Dense K-first matrices with rows of whole vec4s.
DeviceStates scratch_states(float* data, int64_t chunks, int64_t heads, int64_t K, int64_t V) {
  DeviceStates states;
  states.data = data;
  states.v_stride = 1;
  states.k_stride = (V + 3) / 4 * 4;
  states.v_aligned_vec4 = true;
  states.outer_strides[2] = K * states.k_stride;
  states.outer_strides[1] = heads * states.outer_strides[2];
  states.outer_strides[0] = chunks * states.outer_strides[1];
  return states;
}

struct Scratch {
  int64_t* first_chunk;
  float* states;
  GradientParts parts;
  double* sums;
};

// The layout of the scratch memory of a call.
Scratch take_scratch(ScratchLayout& layout, const DeltaRuleBackwardProblem& problem, const BackwardArgs& args) {
  const DeltaRuleSizes& sizes = problem.sizes;
  const DeltaRuleBackward& call = problem.args;
  Scratch scratch;
  scratch.first_chunk = layout.take<int64_t>(call.in.cu_seqlens.present() ? sizes.num_sequences + 1 : 0);
  const int64_t states = call.chunk_states.present() ? 0 : sizes.batch * args.state_chunks;
  const DeviceStates one = scratch_states(nullptr, 0, sizes.num_value_heads, sizes.head_dim_k, sizes.head_dim_v);
  scratch.states = layout.take<float>(states * one.outer_strides[1]);

  GradientParts& parts = scratch.parts;
  parts = args.parts;
  const int64_t rows = parts.count * parts.rows * sizes.num_value_heads;
  const auto take = [&](bool wanted, int64_t width) { return wanted ? layout.take<float>(rows * width) : nullptr; };
  parts.dq = take(call.dq.present(), sizes.head_dim_k);
  parts.dk = take(call.dk.present(), sizes.head_dim_k);
  parts.dg = take(call.dg.present() || args.sums.wanted(), parts.gate_width);
  parts.dbeta = take(call.dbeta.present() && !args.problem.beta_per_value, 1);
  scratch.sums = layout.take<double>(args.sums.count());
  return scratch;
}

BackwardArgs args_of(const DeltaRuleBackwardProblem& problem, const Context& context) {
  const DeltaRuleBackward& call = problem.args;
  const bool v_first = call.options.state_v_first, per_channel = call.options.gate == Gate::kPerChannel;
  BackwardArgs args;
  args.problem = device_problem(problem);
  args.d_o = device_tensor(call.d_o);
  args.d_final_state = device_states(call.d_final_state, v_first);
  args.d_initial_state = device_states(call.d_initial_state, v_first);
  args.chunk_states = device_states(call.chunk_states, v_first);
  args.state_chunks = problem.sizes.num_chunks;
  args.chunked.sequences = args.problem.sequences;
  args.chunked.chunk_size = call.options.chunk_size;
  args.dq = device_tensor(call.dq);
  args.dk = device_tensor(call.dk);
  args.dv = device_tensor(call.dv);
  args.dg = device_tensor(call.dg);
  args.dbeta = device_tensor(call.dbeta);
  args.parts.count = parts_of(args.problem, context);
  args.parts.rows = problem.sizes.batch * problem.sizes.tokens;
  args.parts.gate_width = per_channel ? args.problem.head_dim_k : 1;
  args.sums.chunked = args.chunked;
  args.sums.num_value_heads = problem.sizes.num_value_heads;
  args.sums.bias_width = args.parts.gate_width;
  args.sums.da_log = device_tensor(call.da_log);
  args.sums.ddt_bias = device_tensor(call.ddt_bias);
  return args;
}

// The states before the chunks, with the bits of the forward.
void make_states(const DeltaRuleBackwardProblem& problem, const BackwardArgs& args, const Context& context) {
  RecurrentArgs forward;
  forward.problem = args.problem;
  forward.initial_state = device_states(problem.args.in.initial_state, problem.args.options.state_v_first);
  forward.chunk_states = args.chunk_states;
  forward.state_chunks = args.state_chunks;
  forward.chunked = args.chunked;
  launch_tokens(forward, context);
}

}  // namespace

void backward(const DeltaRuleBackwardProblem& problem, const Context& context) {
  const DeltaRuleBackward& call = problem.args;
  const DeltaRuleSizes& sizes = problem.sizes;
  BackwardArgs args = args_of(problem, context);
  ScratchLayout measure;
  take_scratch(measure, problem, args);
  const DeviceWorkspace workspace(context, measure.bytes());
  ScratchLayout layout(workspace.data());
  const Scratch scratch = take_scratch(layout, problem, args);
  args.parts = scratch.parts;
  args.sums.parts = scratch.sums;
  if (call.in.cu_seqlens.present()) {
    build_first_chunks(args.problem.sequences, args.chunked.chunk_size, scratch.first_chunk, context);
    args.chunked.first_chunk = args.sums.chunked.first_chunk = scratch.first_chunk;
  }
  if (!call.chunk_states.present()) {
    args.chunk_states =
        scratch_states(scratch.states, args.state_chunks, sizes.num_value_heads, sizes.head_dim_k, sizes.head_dim_v);
    if (args.parts.rows > 0) make_states(problem, args, context);
  }

  const int ranges = ranges_of(args.problem), at_once = args.parts.count == 1 ? 1 : ranges;
  for (int first = 0; first < ranges; first += at_once) launch_walk(args, first, at_once, context);
  launch_key_sums(args, context);
  launch_gate_sums(args, context);
  add_parameter_sums(args.sums, context);
}

}  // namespace fastweight::cuda::recurrent
