#include "cli/bench_problem.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cli/flags.h"
#include "cli/text.h"

namespace fastweight::cli {
namespace {

using support::DeltaRuleCase;
using support::DeltaRuleSpec;
using support::Tensor;

double view_bytes(const TensorView& view) {
  if (!view.present()) return 0;
  double count = static_cast<double>(support::element_size(view.dtype));
  for (int axis = 0; axis < view.rank; ++axis) count *= static_cast<double>(view.shape[static_cast<size_t>(axis)]);
  return count;
}

// Repeats `block` (rows along axis `axis`, the axes before it 1) over `rows` rows, in the given shape.
Tensor tile(const Tensor& block, size_t axis, std::vector<int64_t> shape) {
  if (!block.present()) return {};
  Tensor tiled(block.dtype(), std::move(shape));
  const int64_t block_rows = block.shape()[axis];
  const size_t row_bytes = static_cast<size_t>(block.size() / block_rows) * support::element_size(block.dtype());
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

// Drawing gaussians for every token of a long sequence would take longer than the bench; a few hundred tokens are drawn
// and repeated.
DeltaRuleCase make_data(const BenchChoice& choice) {
  constexpr int64_t kDrawnTokens = 256;
  const Shape& s = choice.shape;
  DeltaRuleSpec spec;
  spec.name = "bench";
  spec.B = 1;
  spec.T = std::min(s.B * s.T, kDrawnTokens);
  spec.H = s.H, spec.HV = s.HV, spec.K = s.K, spec.V = s.V;
  spec.options.gate = choice.gate;
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
  if (choice.gate == Gate::kPerHead) data.g = tile(drawn.g, 1, {s.B, s.T, s.HV});
  if (choice.gate == Gate::kPerChannel) data.g = tile(drawn.g, 1, {s.B, s.T, s.HV, s.K});
  if (choice.mode == Mode::kBackward) data.d_o = tile(drawn.d_o, 1, {s.B, s.T, s.HV, s.V});
  if (choice.mode == Mode::kStep) data.initial_state = tile(drawn.initial_state, 0, {s.B, s.HV, s.K, s.V});
  if (choice.sequences > 0) {
    const std::vector<int64_t> offsets = growing_offsets(s.T, choice.sequences);
    data.spec.cu_seqlens = offsets;
    data.cu_seqlens = Tensor(DType::kI64, {choice.sequences + 1}, std::vector<double>(offsets.begin(), offsets.end()));
  }
  return data;
}

}  // namespace

std::string Shape::text() const {
  std::string text =
      format("B=%lld,T=%lld,H=%lld", static_cast<long long>(B), static_cast<long long>(T), static_cast<long long>(H));
  if (HV != H) text += format(",HV=%lld", static_cast<long long>(HV));
  return text + format(",K=%lld,V=%lld", static_cast<long long>(K), static_cast<long long>(V));
}

Shape parse_shape(const std::string& text) {
  Shape shape;
  const std::pair<const char*, int64_t*> fields[] = {{"B", &shape.B},   {"T", &shape.T}, {"H", &shape.H},
                                                     {"HV", &shape.HV}, {"K", &shape.K}, {"V", &shape.V}};
  for (const std::string& part : split(text, ',')) {
    const size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    const auto field = std::ranges::find_if(fields, [&](const auto& f) { return name == f.first; });
    if (equals == std::string::npos || field == std::end(fields)) {
      throw UsageError("--shape: expected B=..,T=..,H=..,HV=..,K=..,V=.., got '" + part + "' in '" + text + "'");
    }
    *field->second = parse_integer("--shape: " + name, part.substr(equals + 1), 1);
  }
  for (const auto& [name, value] : {std::pair{"H", shape.H}, {"K", shape.K}, {"V", shape.V}}) {
    if (value == 0) throw UsageError(std::string("--shape: ") + name + " is missing in '" + text + "'");
  }
  if (shape.HV == 0) shape.HV = shape.H;
  return shape;
}

BenchProblem::BenchProblem(const BenchChoice& choice) : choice_(choice) {
  if (choice.mode == Mode::kStep) choice_.shape.T = 1;
  data_ = make_data(choice_);
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

std::string BenchProblem::run(const Context& context) const {
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

double BenchProblem::flop() const {
  const Shape& s = choice_.shape;
  const double K = static_cast<double>(s.K), V = static_cast<double>(s.V);
  const double forward = 6 * K * V + 64 * (K + V);
  const double each = choice_.mode == Mode::kForward    ? forward
                      : choice_.mode == Mode::kBackward ? 3 * forward
                                                        : 7 * K * V;
  return each * static_cast<double>(s.B * s.T * s.HV);
}

double BenchProblem::bytes() const {
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

}  // namespace fastweight::cli
