#include "cli/bench_problem.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "cli/flags.h"
#include "cli/text.h"
#include "fastweight/blocks.h"
#include "fastweight/delta_rule.h"
#include "fastweight/short_conv.h"
#include "fastweight/ttt_linear.h"
#include "support/blocks_case.h"
#include "support/delta_rule_case.h"
#include "support/delta_rule_map_case.h"
#include "support/placement.h"
#include "support/random.h"
#include "support/related_case.h"
#include "support/short_conv_case.h"
#include "support/tensor.h"
#include "support/ttt_linear_case.h"

namespace fastweight::cli {
namespace {

using support::BlockCase;
using support::BlockSpec;
using support::DeltaRuleCase;
using support::DeltaRuleMapCase;
using support::DeltaRuleSpec;
using support::RelatedCase;
using support::RelatedOp;
using support::RelatedSpec;
using support::ShortConvCase;
using support::ShortConvSpec;
using support::Tensor;
using support::TttLinearCase;
using support::TttLinearSpec;

double view_bytes(const TensorView& view) {
  if (!view.present()) return 0;
  double count = static_cast<double>(element_size(view.dtype));
  for (int axis = 0; axis < view.rank; ++axis) count *= static_cast<double>(view.shape[static_cast<size_t>(axis)]);
  return count;
}

// Repeats `block` (rows along axis `axis`, the axes before it 1) over `rows` rows, in the given shape.
Tensor tile(const Tensor& block, size_t axis, std::vector<int64_t> shape) {
  if (!block.present()) return {};
  Tensor tiled(block.dtype(), std::move(shape));
  const int64_t block_rows = block.shape()[axis];
  const size_t row_bytes =
      static_cast<size_t>(block.size() / block_rows) * static_cast<size_t>(element_size(block.dtype()));
  const int64_t rows = tiled.size() / (block.size() / block_rows);
  for (int64_t row = 0; row < rows; row += block_rows) {
    const size_t count = static_cast<size_t>(std::min(block_rows, rows - row));
    std::memcpy(static_cast<char*>(tiled.data()) + static_cast<size_t>(row) * row_bytes, block.data(),
                count * row_bytes);
  }
  return tiled;
}

std::vector<int64_t> growing_offsets(int64_t tokens, int64_t sequences) {
  std::vector<int64_t> offsets;
  for (int64_t n = 0; n <= sequences; ++n) offsets.push_back(tokens * (n * (n + 1)) / (sequences * (sequences + 1)));
  return offsets;
}

// ---- On a device
// ------------------------------------------------------------------------------------------------------

// Calls with the tensors of `host` placed on a device.
class PlacedBench : public BenchProblem {
 public:
  PlacedBench(const BenchProblem& host, support::Call call, Device device)
      : host_(host), call_(std::move(call)), placement_(call_.views(), device) {}

  std::string run(const Context& context) const override { return call_.enqueue(context); }
  double flop() const override { return host_.flop(); }
  double bytes() const override { return host_.bytes(); }

 private:
  const BenchProblem& host_;
  support::Call call_;
  support::Placement placement_;
};

template <class Args>
std::unique_ptr<BenchProblem> placed(const BenchProblem& host, std::string (*entry)(const Context&, const Args&),
                                     const Args& args, Device device) {
  return std::make_unique<PlacedBench>(host, support::Call(entry, args), device);
}

// ---- The delta-rule family ------------------------------------------------------------------------------------------

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

// ---- The families related to the delta rule
// --------------------------------------------------------------------------

class RelatedBench : public BenchProblem {
 public:
  explicit RelatedBench(const BenchChoice& choice) : choice_(choice) {
    if (is_step()) choice_.shape.T = 1;
    const Shape& s = choice_.shape;
    RelatedSpec spec;
    spec.op = *related_of(choice.op);
    spec.T = std::min(s.B * s.T, kDrawnTokens);
    spec.H = s.H, spec.K = s.K, spec.V = s.V;
    spec.dtype = choice.dtype;
    spec.initial_state = false;
    data_ = support::draw(spec, 1);
    data_.spec.B = s.B;
    data_.spec.T = s.T;
    data_.d_final_state = {};
    for (Tensor* tensor : data_.of(support::Part::kTokens)) {
      if (!tensor->present()) continue;
      std::vector<int64_t> shape = tensor->shape();
      shape[0] = s.B;
      shape[1] = s.T;
      *tensor = tile(*tensor, 1, shape);
    }
    if (choice.sequences > 0) {
      data_.spec.cu_seqlens = growing_offsets(s.T, choice.sequences);
      data_.cu_seqlens = support::offsets_tensor(data_.spec.cu_seqlens);
    }
    if (!is_backward()) data_.d_o = {};
    results_ = support::outputs_of(choice.mode, data_);
    if (!choice.saved_states) results_.chunk_states = {};
    call_ = support::call_of(choice.mode, data_, results_);
    if (is_backward() && choice.saved_states) {
      saved_states_ = support::forward(data_, Context(), true).chunk_states;
      (*call_)["chunk_states"] = saved_states_.view();
    }
  }

  std::string run(const Context& context) const override { return call_->enqueue(context); }

  double flop() const override {
    const Shape& s = choice_.shape;
    const RelatedOp op = data_.spec.op;
    const bool low_rank = op == RelatedOp::kDplr || op == RelatedOp::kIplr;
    const double products = low_rank ? 4 : op == RelatedOp::kComba ? 3 : 2;  // with the state
    const double pairs = low_rank ? 4 : op == RelatedOp::kComba ? 2 : 1;     // matrices A, P, ..
    const double K = static_cast<double>(s.K), V = static_cast<double>(s.V);
    const double forward = 2 * products * K * V + 32 * pairs * (K + V);
    const double token = is_step() ? (2 * products + 1) * K * V : forward * (is_backward() ? 3 : 1);
    return token * static_cast<double>(s.B * s.T * s.H);
  }

  double bytes() const override {
    double total = 0;
    for (const support::NamedView& named : call_->views()) total += view_bytes(*named.view);
    return is_step() ? total + view_bytes((*call_)["state"]) : total;
  }

 private:
  bool is_backward() const { return choice_.mode == Mode::kBackward; }
  bool is_step() const { return choice_.mode == Mode::kStep; }

  BenchChoice choice_;
  RelatedCase data_;
  support::RelatedResults results_;
  Tensor saved_states_;
  std::optional<support::Call> call_;
};

// ---- TTT-linear ----------------------------------------------------------------------------------------------------

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

// ---- Short convolution ----------------------------------------------------------------------------------------------

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

// ---- The building blocks
// ----------------------------------------------------------------------------------------------

class BlockBench : public BenchProblem {
 public:
  explicit BlockBench(const BenchChoice& choice) : choice_(choice) {
    const Shape& s = choice.shape;
    BlockSpec spec;
    spec.block = *block_of(choice.op);
    spec.T = std::min(s.B * s.T, kDrawnTokens);
    spec.H = s.H, spec.HV = s.HV, spec.K = s.K, spec.V = s.V, spec.C = kBlockChunk;
    spec.gate = spec.block == Block::kScaledDotKkt || spec.block == Block::kWy ? Gate::kPerHead : Gate::kPerChannel;
    spec.dtype = choice.dtype;
    data_ = support::draw(spec, 1);
    data_.spec.B = s.B;
    data_.spec.T = s.T;
    for (Tensor* tensor : data_.of(support::Part::kTokens)) {
      if (!tensor->present()) continue;
      std::vector<int64_t> shape = tensor->shape();
      shape[0] = s.B;
      shape[1] = s.T;
      *tensor = tile(*tensor, 1, shape);
    }
    if (choice.sequences > 0) data_.cu_seqlens = support::offsets_tensor(growing_offsets(s.T, choice.sequences));
    results_ = support::outputs_of(choice.mode, data_);
    call_ = support::call_of(choice.mode, data_, results_);
  }

  std::string run(const Context& context) const override { return call_->enqueue(context); }
  double bytes() const override {
    double total = 0;
    for (const support::NamedView& named : call_->views()) total += view_bytes(*named.view);
    return total;
  }
  std::unique_ptr<BenchProblem> on_device(Device device) const override {
    return std::make_unique<PlacedBench>(*this, support::call_of(choice_.mode, data_, results_), device);
  }

  double flop() const override {
    const bool forward = choice_.mode == Mode::kForward;
    const Shape& s = choice_.shape;
    const double C = kBlockChunk, K = static_cast<double>(s.K), V = static_cast<double>(s.V);
    const double value_rows = static_cast<double>(s.B * s.T * s.HV);
    switch (data_.spec.block) {
      case Block::kChunkLocalCumsum:
        return value_rows * K;
      case Block::kScaledDotKkt:
        return value_rows * C * K * (forward ? 2 : 4);
      case Block::kSolveTril:
        return value_rows * C * C * (forward ? 1.0 / 3 : 4);
      case Block::kWy:
        return value_rows * C * (forward ? 2 * (K + V) : 4 * (K + V) + 2 * C);
      case Block::kL2Norm:
        return static_cast<double>(data_.x.size()) * (forward ? 3 : 5);
      case Block::kRmsNorm:
        return static_cast<double>(data_.x.size()) * (forward ? 8 : 16);
      case Block::kGateActivation:
        break;
    }
    return value_rows * K * (forward ? 4 : 6);
  }

 private:
  BenchChoice choice_;
  BlockCase data_;
  support::BlockResults results_;
  std::optional<support::Call> call_;
};

}  // namespace

std::string Shape::text() const {
  std::string text =
      format("B=%lld,T=%lld,H=%lld", static_cast<long long>(B), static_cast<long long>(T), static_cast<long long>(H));
  if (HV != H) text += format(",HV=%lld", static_cast<long long>(HV));
  return text + format(",K=%lld,V=%lld", static_cast<long long>(K), static_cast<long long>(V));
}

Shape parse_shape(const std::string& text) {
  Shape shape;
  int64_t D = 0;
  const std::pair<const char*, int64_t*> fields[] = {{"B", &shape.B},   {"T", &shape.T}, {"H", &shape.H}, {"D", &D},
                                                     {"HV", &shape.HV}, {"K", &shape.K}, {"V", &shape.V}};
  std::set<std::string> given;
  for (const std::string& part : split(text, ',')) {
    const size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    const auto field = std::ranges::find_if(fields, [&](const auto& f) { return name == f.first; });
    if (equals == std::string::npos || field == std::end(fields)) {
      throw UsageError("--shape: expected B=..,T=..,H=..,HV=..,K=..,V=.. or D=.., got '" + part + "' in '" + text +
                       "'");
    }
    if (!given.insert(name).second) throw UsageError("--shape: " + name + " is given twice in '" + text + "'");
    *field->second = parse_integer("--shape: " + name, part.substr(equals + 1), 1, std::numeric_limits<int32_t>::max());
  }
  if (D > 0 && (shape.K > 0 || shape.V > 0)) throw UsageError("--shape: D stands for K and V in '" + text + "'");
  if (D > 0) shape.K = shape.V = D;
  for (const auto& [name, value] : {std::pair{"H", shape.H}, {"K", shape.K}, {"V", shape.V}}) {
    if (value == 0) throw UsageError(std::string("--shape: ") + name + " is missing in '" + text + "'");
  }
  if (shape.HV == 0) shape.HV = shape.H;
  return shape;
}

std::unique_ptr<BenchProblem> make_bench_problem(const BenchChoice& choice) {
  if (block_of(choice.op)) return std::make_unique<BlockBench>(choice);
  if (related_of(choice.op)) return std::make_unique<RelatedBench>(choice);
  if (choice.op == Op::kDeltaRuleMap) return std::make_unique<DeltaRuleMapBench>(choice);
  if (choice.op == Op::kShortConv) return std::make_unique<ShortConvBench>(choice);
  if (choice.op == Op::kTttLinear) return std::make_unique<TttLinearBench>(choice);
  return std::make_unique<DeltaRuleBench>(choice);
}

}  // namespace fastweight::cli
