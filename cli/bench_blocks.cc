// The bench's problems of the building blocks.
#include <algorithm>
#include <optional>
#include <vector>

#include "cli/bench_families.h"
#include "fastweight/blocks.h"
#include "support/blocks_case.h"

namespace fastweight::cli {
namespace {

using support::BlockCase;
using support::BlockSpec;
using support::Tensor;

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

std::unique_ptr<BenchProblem> block_bench(const BenchChoice& choice) { return std::make_unique<BlockBench>(choice); }

}  // namespace fastweight::cli
