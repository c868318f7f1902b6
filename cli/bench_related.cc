// The bench's problems of the families related to the delta rule.
#include <algorithm>
#include <optional>
#include <vector>

#include "cli/bench_families.h"
#include "support/related_case.h"

namespace fastweight::cli {
namespace {

using support::RelatedCase;
using support::RelatedOp;
using support::RelatedSpec;
using support::Tensor;

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

}  // namespace

std::unique_ptr<BenchProblem> related_bench(const BenchChoice& choice) {
  return std::make_unique<RelatedBench>(choice);
}

}  // namespace fastweight::cli
