// The bench's problems of TTT-linear.
#include <algorithm>
#include <vector>

#include "cli/bench_families.h"
#include "fastweight/ttt_linear.h"
#include "support/ttt_linear_case.h"

namespace fastweight::cli {
namespace {

using support::Tensor;
using support::TttLinearCase;
using support::TttLinearSpec;

TttLinearCase ttt_linear_data(const BenchChoice& choice) {
  const Shape& s = choice.shape;
  TttLinearSpec spec;
  spec.name = "bench";
  spec.T = std::min(s.B * s.T, kDrawnTokens);
  spec.H = s.H, spec.D = s.K;
  spec.dtype = choice.dtype;
  const TttLinearCase drawn = support::draw(spec, 1);

  const int64_t states = choice.sequences > 0 ? choice.sequences : s.B;
  TttLinearCase data;
  data.spec = drawn.spec;
  data.spec.B = s.B;
  data.spec.T = s.T;
  data.q = tile(drawn.q, 1, {s.B, s.T, s.H, s.K});
  data.k = tile(drawn.k, 1, {s.B, s.T, s.H, s.K});
  data.v = tile(drawn.v, 1, {s.B, s.T, s.H, s.K});
  data.w = drawn.w;
  data.b = drawn.b;
  data.eta = tile(drawn.eta, 1, {s.B, s.T, s.H, 1});
  data.initial_state = tile(drawn.initial_state, 0, {states, s.H, s.K, s.K});
  data.initial_state_bias = tile(drawn.initial_state_bias, 0, {states, s.H, 1, s.K});
  if (choice.mode == Mode::kBackward) data.d_o = tile(drawn.d_o, 1, {s.B, s.T, s.H, s.K});
  if (choice.sequences > 0) {
    data.spec.cu_seqlens = growing_offsets(s.T, choice.sequences);
    data.cu_seqlens = support::offsets_tensor(data.spec.cu_seqlens);
  }
  return data;
}

class TttLinearBench : public BenchProblem {
 public:
  explicit TttLinearBench(const BenchChoice& choice) : choice_(choice) {
    if (choice.mode == Mode::kStep) choice_.shape.T = 1;
    data_ = ttt_linear_data(choice_);
    if (choice_.mode == Mode::kForward) prepare_forward();
    if (choice_.mode == Mode::kBackward) prepare_backward();
    if (choice_.mode == Mode::kStep) prepare_step();
  }

  std::string run(const Context& context) const override {
    switch (choice_.mode) {
      case Mode::kForward:
        return ttt_linear_forward(context, forward_);
      case Mode::kBackward:
        return ttt_linear_backward(context, backward_);
      case Mode::kStep:
        break;
    }
    return ttt_linear_step(context, step_);
  }

  std::unique_ptr<BenchProblem> on_device(Device device) const override {
    switch (choice_.mode) {
      case Mode::kForward:
        return placed(*this, ttt_linear_forward, forward_, device);
      case Mode::kBackward:
        return placed(*this, ttt_linear_backward, backward_, device);
      case Mode::kStep:
        break;
    }
    return placed(*this, ttt_linear_step, step_, device);
  }

  double flop() const override {
    const Shape& s = choice_.shape;
    const double D = static_cast<double>(s.K);
    const double forward = 6 * D * D + 96 * D;
    const double each = choice_.mode == Mode::kForward    ? forward
                        : choice_.mode == Mode::kBackward ? 3 * forward
                                                          : 8 * D * D;
    return each * static_cast<double>(s.B * s.T * s.H);
  }

  double bytes() const override {
    double total = 0;
    for (const Tensor* input : {&data_.q, &data_.k, &data_.v, &data_.w, &data_.b, &data_.eta, &data_.d_o}) {
      total += view_bytes(input->view());
    }
    const double states = view_bytes(data_.initial_state.view()) + view_bytes(data_.initial_state_bias.view());
    for (const Tensor& output : outputs_) total += view_bytes(output.view());
    if (choice_.mode != Mode::kStep) return total + states;
    // Read and written; the sums are among the outputs.
    return total + 2 * states + view_bytes(step_.gradient) + view_bytes(step_.gradient_bias);
  }

 private:
  // Moving a tensor keeps its memory, so the views stay good while the vector grows.
  TensorView output(DType dtype, const std::vector<int64_t>& shape) {
    return outputs_.emplace_back(dtype, shape).view();
  }

  void prepare_forward() {
    forward_.in = data_.inputs();
    forward_.options = data_.spec.options;
    forward_.o = output(choice_.dtype, data_.v.shape());
    forward_.final_state = output(DType::kF32, data_.initial_state.shape());
    forward_.final_state_bias = output(DType::kF32, data_.initial_state_bias.shape());
  }

  void prepare_backward() {
    backward_.in = data_.inputs();
    backward_.options = data_.spec.options;
    backward_.d_o = data_.d_o.view();
    backward_.dq = output(choice_.dtype, data_.q.shape());
    backward_.dk = output(choice_.dtype, data_.k.shape());
    backward_.dv = output(choice_.dtype, data_.v.shape());
    backward_.dw = output(data_.w.dtype(), data_.w.shape());
    backward_.db = output(data_.b.dtype(), data_.b.shape());
    backward_.deta = output(data_.eta.dtype(), data_.eta.shape());
  }

  void prepare_step() {
    step_.in = data_.inputs();
    step_.in.initial_state = step_.in.initial_state_bias = {};
    step_.options = data_.spec.options;
    step_.state = data_.initial_state.view();
    step_.state_bias = data_.initial_state_bias.view();
    step_.gradient = output(DType::kF32, data_.initial_state.shape());
    step_.gradient_bias = output(DType::kF32, data_.initial_state_bias.shape());
    step_.position = output(DType::kI32, {choice_.shape.B});
    step_.o = output(choice_.dtype, data_.v.shape());
  }

  BenchChoice choice_;
  TttLinearCase data_;
  std::vector<Tensor> outputs_;  // owns what the calls below write
  TttLinearForward forward_;
  TttLinearBackward backward_;
  TttLinearStep step_;
};

}  // namespace

std::unique_ptr<BenchProblem> ttt_linear_bench(const BenchChoice& choice) {
  return std::make_unique<TttLinearBench>(choice);
}

}  // namespace fastweight::cli
