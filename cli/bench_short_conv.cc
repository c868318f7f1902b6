// The bench's problems of the short convolution.
#include <algorithm>
#include <vector>

#include "cli/bench_families.h"
#include "fastweight/short_conv.h"
#include "support/short_conv_case.h"

namespace fastweight::cli {
namespace {

using support::ShortConvCase;
using support::ShortConvSpec;
using support::Tensor;

class ShortConvBench : public BenchProblem {
 public:
  explicit ShortConvBench(const BenchChoice& choice) : choice_(choice) {
    if (choice.mode == Mode::kStep) choice_.shape.T = 1;
    const Shape& s = choice_.shape;
    const int64_t D = s.H * s.K;
    ShortConvSpec spec;
    spec.T = std::min(s.B * s.T, kDrawnTokens);
    spec.D = D;
    spec.dtype = choice.dtype;
    spec.options.activation = Activation::kSilu;
    spec.bias = spec.residual = false;
    data_ = support::draw(spec, 1);
    data_.initial_state = tile(data_.initial_state, 0, {s.B, D, spec.W});
    for (Tensor* x : {&data_.x, &data_.dy}) *x = tile(*x, 1, {s.B, s.T, D});
    if (choice.sequences > 0) data_.cu_seqlens = support::offsets_tensor(growing_offsets(s.T, choice.sequences));
    ShortConvInputs in = data_.inputs();
    in.initial_state = {};
    const int64_t sequences = choice.sequences > 0 ? choice.sequences : s.B;
    if (choice_.mode == Mode::kForward) {
      forward_ = {
          in, spec.options, {}, output(choice.dtype, data_.x.shape()), output(choice.dtype, {sequences, D, spec.W})};
    } else if (choice_.mode == Mode::kBackward) {
      backward_ = {in,
                   spec.options,
                   data_.dy.view(),
                   {},
                   output(choice.dtype, data_.x.shape()),
                   output(DType::kF32, data_.w.shape())};
    } else {
      step_ = {in, spec.options, {}, data_.initial_state.view(), {}, output(choice.dtype, data_.x.shape())};
    }
  }

  std::string run(const Context& context) const override {
    switch (choice_.mode) {
      case Mode::kForward:
        return short_conv_forward(context, forward_);
      case Mode::kBackward:
        return short_conv_backward(context, backward_);
      case Mode::kStep:
        break;
    }
    return short_conv_step(context, step_);
  }

  std::unique_ptr<BenchProblem> on_device(Device device) const override {
    switch (choice_.mode) {
      case Mode::kForward:
        return placed(*this, short_conv_forward, forward_, device);
      case Mode::kBackward:
        return placed(*this, short_conv_backward, backward_, device);
      case Mode::kStep:
        break;
    }
    return placed(*this, short_conv_step, step_, device);
  }

  double flop() const override {
    const double each = static_cast<double>(2 * data_.spec.W + 4) * (choice_.mode == Mode::kBackward ? 3 : 1);
    return each * static_cast<double>(data_.x.size());
  }

  double bytes() const override {
    double total = view_bytes(data_.x.view()) + view_bytes(data_.w.view());
    if (choice_.mode == Mode::kBackward) total += view_bytes(data_.dy.view());
    if (choice_.mode == Mode::kStep) total += 2 * view_bytes(data_.initial_state.view());
    for (const Tensor& output : outputs_) total += view_bytes(output.view());
    return total;
  }

 private:
  TensorView output(DType dtype, const std::vector<int64_t>& shape) {
    return outputs_.emplace_back(dtype, shape).view();
  }

  BenchChoice choice_;
  ShortConvCase data_;
  std::vector<Tensor> outputs_;  // owns what the calls below write
  ShortConvForward forward_;
  ShortConvBackward backward_;
  ShortConvStep step_;
};

}  // namespace

std::unique_ptr<BenchProblem> short_conv_bench(const BenchChoice& choice) {
  return std::make_unique<ShortConvBench>(choice);
}

}  // namespace fastweight::cli
