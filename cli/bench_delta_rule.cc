// The bench's problems of the delta-rule family and of its maps.
#include <algorithm>
#include <optional>
#include <vector>

#include "cli/bench_families.h"
#include "fastweight/delta_rule.h"
#include "support/delta_rule_case.h"
#include "support/delta_rule_map_case.h"

namespace fastweight::cli {
namespace {

using support::DeltaRuleCase;
using support::DeltaRuleMapCase;
using support::DeltaRuleSpec;
using support::Tensor;

DeltaRuleCase delta_rule_data(const BenchChoice& choice) {
  const Shape& s = choice.shape;
  DeltaRuleSpec spec;
  spec.name = "bench";
  spec.B = 1;
  spec.T = std::min(s.B * s.T, kDrawnTokens);
  spec.H = s.H, spec.HV = s.HV, spec.K = s.K, spec.V = s.V;
  spec.options.gate = gate_of(choice.op);
  spec.dtype = choice.dtype;
  spec.initial_state = choice.mode == Mode::kStep;
  const DeltaRuleCase drawn = support::draw(spec, 1);

  DeltaRuleCase data;
  data.spec = drawn.spec;
  data.spec.B = s.B;
  data.spec.T = s.T;
  data.q = tile(drawn.q, 1, {s.B, s.T, s.H, s.K});
  data.k = tile(drawn.k, 1, {s.B, s.T, s.H, s.K});
  data.v = tile(drawn.v, 1, {s.B, s.T, s.HV, s.V});
  data.beta = tile(drawn.beta, 1, {s.B, s.T, s.HV});
  if (spec.options.gate == Gate::kPerHead) data.g = tile(drawn.g, 1, {s.B, s.T, s.HV});
  if (spec.options.gate == Gate::kPerChannel) data.g = tile(drawn.g, 1, {s.B, s.T, s.HV, s.K});
  if (choice.mode == Mode::kBackward) data.d_o = tile(drawn.d_o, 1, {s.B, s.T, s.HV, s.V});
  if (choice.mode == Mode::kStep) {
    data.initial_state = tile(drawn.initial_state.to(choice.state_dtype.value()), 0, {s.B, s.HV, s.K, s.V});
  }
  if (choice.sequences > 0) {
    const std::vector<int64_t> offsets = growing_offsets(s.T, choice.sequences);
    data.spec.cu_seqlens = offsets;
    data.cu_seqlens = support::offsets_tensor(offsets);
  }
  return data;
}

class DeltaRuleBench : public BenchProblem {
 public:
  explicit DeltaRuleBench(const BenchChoice& choice);
  std::string run(const Context& context) const override;
  double flop() const override;
  double bytes() const override;
  std::unique_ptr<BenchProblem> on_device(Device device) const override;

 private:
  BenchChoice choice_;
  DeltaRuleCase data_;
  std::vector<Tensor> outputs_;  // owns what the calls below write
  DeltaRuleForward forward_;
  DeltaRuleBackward backward_;
  DeltaRuleStep step_;
};

DeltaRuleBench::DeltaRuleBench(const BenchChoice& choice) : choice_(choice) {
  if (choice.mode == Mode::kStep) choice_.shape.T = 1;
  data_ = delta_rule_data(choice_);
  const Shape& s = choice_.shape;
  const auto output = [&](DType dtype, std::vector<int64_t> shape) {
    return outputs_.emplace_back(dtype, std::move(shape)).view();
  };
  // Moving a tensor keeps its memory, so the views stay good while the vector grows.
  const int64_t sequences = choice_.sequences > 0 ? choice_.sequences : s.B;
  DeltaRuleInputs in = data_.inputs();
  in.initial_state = {};
  const DeltaRuleOptions& options = data_.spec.options;
  TensorView chunk_states;
  if (choice_.saved_states && choice_.mode != Mode::kStep) {
    const int64_t chunks = delta_rule_num_chunks(s.T, in.cu_seqlens, options.chunk_size);
    chunk_states = output(DType::kF32, {s.B, chunks, s.HV, s.K, s.V});
  }
  if (choice_.mode == Mode::kForward || (choice_.mode == Mode::kBackward && choice_.saved_states)) {
    forward_.in = in;
    forward_.options = options;
    forward_.o = output(choice_.dtype, {s.B, s.T, s.HV, s.V});
    forward_.final_state = output(DType::kF32, {sequences, s.HV, s.K, s.V});
    forward_.chunk_states = chunk_states;
  }
  if (choice_.mode == Mode::kBackward) {
    if (choice_.saved_states) delta_rule_forward(Context(), forward_);
    backward_.in = in;
    backward_.options = options;
    backward_.d_o = data_.d_o.view();
    backward_.chunk_states = chunk_states;
    backward_.dq = output(choice_.dtype, data_.q.shape());
    backward_.dk = output(choice_.dtype, data_.k.shape());
    backward_.dv = output(choice_.dtype, data_.v.shape());
    if (data_.g.present()) backward_.dg = output(data_.g.dtype(), data_.g.shape());
    backward_.dbeta = output(data_.beta.dtype(), data_.beta.shape());
  }
  if (choice_.mode == Mode::kStep) {
    step_.in = in;
    step_.options = options;
    step_.state = data_.initial_state.view();
    step_.o = output(choice_.dtype, {s.B, s.T, s.HV, s.V});
  }
}

std::unique_ptr<BenchProblem> DeltaRuleBench::on_device(Device device) const {
  switch (choice_.mode) {
    case Mode::kForward:
      return placed(*this, delta_rule_forward, forward_, device);
    case Mode::kBackward:
      return placed(*this, delta_rule_backward, backward_, device);
    case Mode::kStep:
      break;
  }
  return placed(*this, delta_rule_step, step_, device);
}

std::string DeltaRuleBench::run(const Context& context) const {
  switch (choice_.mode) {
    case Mode::kForward:
      return delta_rule_forward(context, forward_);
    case Mode::kBackward:
      return delta_rule_backward(context, backward_);
    case Mode::kStep:
      break;
  }
  return delta_rule_step(context, step_);
}

double DeltaRuleBench::flop() const {
  const Shape& s = choice_.shape;
  const double K = static_cast<double>(s.K), V = static_cast<double>(s.V);
  const double forward = 6 * K * V + 64 * (K + V);
  const double each = choice_.mode == Mode::kForward    ? forward
                      : choice_.mode == Mode::kBackward ? 3 * forward
                                                        : 7 * K * V;
  return each * static_cast<double>(s.B * s.T * s.HV);
}

double DeltaRuleBench::bytes() const {
  double total = 0;
  for (const Tensor* input : {&data_.q, &data_.k, &data_.v, &data_.g, &data_.beta, &data_.d_o}) {
    total += view_bytes(input->view());
  }
  switch (choice_.mode) {
    case Mode::kForward:
      return total + view_bytes(forward_.o) + view_bytes(forward_.final_state) + view_bytes(forward_.chunk_states);
    case Mode::kBackward:
      return total + view_bytes(backward_.chunk_states) + view_bytes(backward_.dq) + view_bytes(backward_.dk) +
             view_bytes(backward_.dv) + view_bytes(backward_.dg) + view_bytes(backward_.dbeta);
    case Mode::kStep:
      break;
  }
  return total + view_bytes(step_.o) + 2 * view_bytes(step_.state);
}

// ---- Maps of segments -----------------------------------------------------------------------------------------------

class DeltaRuleMapBench : public BenchProblem {
 public:
  explicit DeltaRuleMapBench(const BenchChoice& choice)
      : choice_(choice), data_{delta_rule_data(choice)}, results_(support::outputs_of(choice.mode, data_)) {
    call_.emplace(support::call_of(choice.mode, data_, results_));
  }

  std::string run(const Context& context) const override { return call_->enqueue(context); }

  double flop() const override {
    const Shape& s = choice_.shape;
    const double K = static_cast<double>(s.K), V = static_cast<double>(s.V);
    const double state = choice_.mode == Mode::kBackward ? 6 * K * V : 4 * K * V;
    return (state + 4 * K * K + 32 * (K + V)) * static_cast<double>(s.B * s.T * s.HV);
  }

  double bytes() const override {
    double total = 0;
    for (const support::NamedView& named : call_->views()) total += view_bytes(*named.view);
    return total;
  }

  std::unique_ptr<BenchProblem> on_device(Device device) const override {
    return std::make_unique<PlacedBench>(*this, support::call_of(choice_.mode, data_, results_), device);
  }

 private:
  BenchChoice choice_;
  DeltaRuleMapCase data_;
  support::DeltaRuleMapResults results_;
  std::optional<support::Call> call_;
};

}  // namespace

std::unique_ptr<BenchProblem> delta_rule_bench(const BenchChoice& choice) {
  return std::make_unique<DeltaRuleBench>(choice);
}
std::unique_ptr<BenchProblem> delta_rule_map_bench(const BenchChoice& choice) {
  return std::make_unique<DeltaRuleMapBench>(choice);
}

}  // namespace fastweight::cli
