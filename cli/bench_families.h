// What the problems of the bench are made with, and the families' own, one file each.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/bench_problem.h"
#include "support/case.h"
#include "support/placement.h"
#include "support/tensor.h"

namespace fastweight::cli {

double view_bytes(const TensorView& view);

// Repeats `block` (rows along axis `axis`, the axes before it 1) over `rows` rows, in the given shape.
support::Tensor tile(const support::Tensor& block, size_t axis, std::vector<int64_t> shape);

// Of sequences each of which is longer than the one before it.
std::vector<int64_t> growing_offsets(int64_t tokens, int64_t sequences);

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

std::unique_ptr<BenchProblem> delta_rule_bench(const BenchChoice& choice);
std::unique_ptr<BenchProblem> delta_rule_map_bench(const BenchChoice& choice);
std::unique_ptr<BenchProblem> related_bench(const BenchChoice& choice);
std::unique_ptr<BenchProblem> ttt_linear_bench(const BenchChoice& choice);
std::unique_ptr<BenchProblem> short_conv_bench(const BenchChoice& choice);
std::unique_ptr<BenchProblem> block_bench(const BenchChoice& choice);

}  // namespace fastweight::cli
