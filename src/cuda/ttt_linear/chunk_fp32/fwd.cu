// Forward by mini-batches in fp32, for every type and every length of a mini-batch. Between barriers of the block:
//
//     rows of the mini-batch   |   z = k h + c, scale q h + c, P   |   n   |   y, h, c   |   o, and the next rows
#include <string>

#include "cuda/ttt_linear/chunk_fp32/forward.cuh"
#include "cuda/ttt_linear/kernels.h"

namespace fastweight::cuda::ttt {
namespace chunk_fp32 {
namespace {

__device__ __forceinline__ void load_mini_batch(const DeviceProblem& p, const Tokens& tokens, bool queries,
                                                const MiniBatch& mb) {
  const int C = p.mini_batch, D = p.head_dim;
  load_rows(p.k, tokens, C, D, mb.k);
  if (queries) load_rows(p.q, tokens, C, D, mb.k.from_row(C));
  load_rows(p.v, tokens, C, D, mb.v);
  load_etas(p, tokens, mb.eta);
}

__device__ __forceinline__ void make_gradients(const DeviceProblem& p, const RowLane& at, const MiniBatch& mb) {
#pragma unroll 1
  for (int row = at.warp; row < p.mini_batch; row += at.warps) {
    float x[4], k[4], v[4], u[4], n[4];
    at.load(mb.x, row, x);
    at.load(mb.k, row, k);
    at.load(mb.v, row, v);
    const float r = at.normalise(p, x);
    inner_gradient(p, at, k, v, x, r, u, n);
    at.store(mb.n, row, n);
  }
}

// o = y + w LN(y) + b
__device__ __forceinline__ void store_outputs(const DeviceProblem& p, const DeviceTensor& o, const Tokens& tokens,
                                              const RowLane& at, const MiniBatch& mb) {
  const Matrix rows = mb.x.from_row(p.mini_batch);
#pragma unroll 1
  for (int row = at.warp; row < tokens.count; row += at.warps) {
    float y[4], x[4];
    at.load(rows, row, y);
    at.load(rows, row, x);
    at.normalise(p, x);
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] += fmaf(at.w[e], x[e], at.b[e]);
    if (at.columns > 0) store_part(o, tokens, row, 4 * at.lane, p.head_dim, y);
  }
}

__device__ void run_head(const ForwardArgs& args, int64_t sequence, int head, const MiniBatch& mb) {
  const DeviceProblem& p = args.problem;
  const int C = p.mini_batch, D = p.head_dim;
  const SequenceSpan span = sequence_at(p.sequences, sequence);
  const int64_t first = first_mini_batch(p.sequences, span, sequence, C);
  const bool outputs = args.o.present();
  const RowLane at(p, head);
  load_state(args.initial_state, args.initial_state_bias, sequence, head, D, mb.h, mb.c);
#pragma unroll 1
  for (int64_t t = 0; t < span.length; t += C) {
    const Tokens tokens{span.batch, span.begin + t, head, static_cast<int>(min(span.length - t, int64_t{C})),
                        t + 2 * C <= span.length ? C : 0};
    TileDealer reads, writes;
    load_mini_batch(p, tokens, outputs, mb);
    __syncthreads();
    if (args.kept.present()) {
      for_each_kept(args.kept, (first + t / C) * p.num_heads + head, D, mb,
                    [](float4& to, const float4& from) { to = from; });
    }
    read_state(p, outputs, mb, reads);
    if (outputs) make_p(p, mb, reads);
    __syncthreads();
    make_gradients(p, at, mb);
    __syncthreads();
    if (outputs) make_outputs(p, mb, writes);
    move_state(p, tokens, mb, writes);
    __syncthreads();
    if (outputs) store_outputs(p, args.o, tokens, at, mb);
  }
  __syncthreads();
  store_state(args.final_state, args.final_state_bias, sequence, head, D, mb.h, mb.c);
}

// The grid runs over the `heads` of all sequences, those of a sequence together; a smaller grid goes round.
__global__ void __launch_bounds__(256, 2) forward_kernel(const __grid_constant__ ForwardArgs args, int64_t heads) {
  BlockLayout layout(block_memory(args.scratch, args.scratch_floats));
  MiniBatch mb;
  mb.lay_out(layout, args.problem.mini_batch, args.problem.head_dim);
  for (int64_t item = blockIdx.x; item < heads; item += gridDim.x) {
    const int64_t sequence = item / args.problem.num_heads;
    run_head(args, sequence, static_cast<int>(item - sequence * args.problem.num_heads), mb);
    __syncthreads();  // before the next head's state
  }
}

Config config_of(const TttLinearForwardProblem& problem) {
  const TttLinearSizes& sizes = problem.sizes;
  const int device = problem.args.in.q.device.index;
  return forward_config(sizes.head_dim, problem.args.options.mini_batch, sizes.num_sequences * sizes.num_heads,
                        device_attribute(cudaDevAttrMultiProcessorCount, device),
                        static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)));
}

}  // namespace

Config forward_config(int64_t head_dim, int32_t mini_batch, int64_t heads, int multiprocessors, size_t shared_limit) {
  BlockLayout layout;
  MiniBatch().lay_out(layout, mini_batch, static_cast<int>(head_dim));
  return config_for(layout.bytes(), heads, multiprocessors, shared_limit);
}

void launch_forward(const Config& config, ForwardArgs args, const Context& context) {
  const int64_t heads = args.problem.sequences.count * args.problem.num_heads;
  const DeviceWorkspace workspace(context, config.in_shared ? 0 : static_cast<size_t>(config.blocks) * config.bytes);
  args.scratch = static_cast<float*>(workspace.data());
  args.scratch_floats = static_cast<int64_t>(config.bytes / sizeof(float));
  launch<forward_kernel>(
      "ttt_linear chunk_fp32", context,
      {static_cast<unsigned>(config.blocks), static_cast<unsigned>(config.threads), config.shared_bytes()}, args,
      heads);
}

}  // namespace chunk_fp32

std::string chunk_fp32_forward_config(const TttLinearForwardProblem& problem) {
  return chunk_fp32::config_of(problem).text();
}

void chunk_fp32_forward(const TttLinearForwardProblem& problem, const Context& context) {
  const TttLinearForward& forward = problem.args;
  chunk_fp32::ForwardArgs args;
  args.problem = device_problem(problem);
  args.o = device_tensor(forward.o);
  args.initial_state = device_states(forward.in.initial_state, false);
  args.final_state = device_states(forward.final_state, false);
  args.initial_state_bias = device_tensor(forward.in.initial_state_bias);
  args.final_state_bias = device_tensor(forward.final_state_bias);
  chunk_fp32::launch_forward(chunk_fp32::config_of(problem), args, context);
}

}  // namespace fastweight::cuda::ttt
