#include "cuda/delta_rule/map.h"

#include <utility>

#include "cuda/common/launch.h"
#include "cuda/common/workspace.h"

namespace fastweight::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) identity_kernel(float* identity, int K) {
  for (int at = blockIdx.x * kThreads + threadIdx.x; at < K * K; at += gridDim.x * kThreads) {
    identity[at] = at % (K + 1) == 0 ? 1.0f : 0.0f;
  }
}

// h of the map: the state after the segment.
DeltaRuleForwardProblem state_forward(const DeltaRuleMapForwardProblem& map) {
  DeltaRuleForwardProblem inner = recurrence_of<DeltaRuleForward>(map);
  inner.args.in.q = inner.args.in.k;  // the caller's is not read
  inner.args.final_state = map.args.h;
  return inner;
}

// e: the gradient of the state before it.
DeltaRuleBackwardProblem state_backward(const DeltaRuleMapBackwardProblem& map) {
  DeltaRuleBackwardProblem inner = recurrence_of<DeltaRuleBackward>(map);
  inner.args.d_o = map.args.d_o;
  inner.args.d_final_state = map.args.d_final_state;
  inner.args.d_initial_state = map.args.e;
  return inner;
}

// M, the state after the segment from the identity without values.
template <class Args>
DeltaRuleForwardProblem square_forward(const DeltaRuleProblem<Args>& map, const TensorView& m, float* identity) {
  DeltaRuleForwardProblem inner = square_recurrence_of<DeltaRuleForward>(map, nullptr);
  DeltaRuleInputs& in = inner.args.in;
  in.q = in.k;
  in.v = {};  // all of them 0
  in.initial_state = broadcast_square(map.sizes, identity, DType::kF32, in.k.device);
  inner.args.final_state = m;
  return inner;
}

template <class Args>
void run_square(const DeltaRuleProblem<Args>& map, const Recurrence& of, const TensorView& m, const Context& context) {
  const int64_t K = map.sizes.head_dim_k;
  const DeviceWorkspace workspace(context, static_cast<size_t>(K * K) * sizeof(float));
  auto* identity = static_cast<float*>(workspace.data());
  fill_identity(identity, K, context);
  of.forward(square_forward(map, m, identity), context);
}

TensorView transposed(TensorView matrices) {
  std::swap(matrices.shape[2], matrices.shape[3]);
  std::swap(matrices.strides[2], matrices.strides[3]);
  return matrices;
}

}  // namespace

void fill_identity(float* identity, int64_t K, const Context& context) {
  const LaunchShape shape{static_cast<unsigned>((K * K + kThreads - 1) / kThreads), kThreads};
  launch<identity_kernel>("delta_rule identity", context, shape, identity, static_cast<int>(K));
}

std::string declines_map(const DeltaRuleMapForwardProblem& problem, const Recurrence& of) {
  const std::string reason = problem.args.h.present() ? of.declines_forward(state_forward(problem)) : "";
  if (!reason.empty() || !problem.args.m.present()) return reason;
  return of.declines_forward(square_forward(problem, problem.args.m, nullptr));
}

std::string declines_map(const DeltaRuleMapBackwardProblem& problem, const Recurrence& of) {
  const std::string reason = problem.args.e.present() ? of.declines_backward(state_backward(problem)) : "";
  if (!reason.empty() || !problem.args.mt.present()) return reason;
  return of.declines_forward(square_forward(problem, problem.args.mt, nullptr));
}

void map_forward(const DeltaRuleMapForwardProblem& problem, const Recurrence& of, const Context& context) {
  if (problem.args.h.present()) of.forward(state_forward(problem), context);
  if (problem.args.m.present()) run_square(problem, of, problem.args.m, context);
}

void map_backward(const DeltaRuleMapBackwardProblem& problem, const Recurrence& of, const Context& context) {
  if (problem.args.e.present()) of.backward(state_backward(problem), context);
  if (problem.args.mt.present()) run_square(problem, of, transposed(problem.args.mt), context);
}

}  // namespace fastweight::cuda
