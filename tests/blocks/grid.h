// The grid of the building blocks, and how their specs are written.
#pragma once

#include <string>
#include <vector>

#include "fastweight/blocks.h"
#include "support/blocks_case.h"
#include "tests/grid.h"
#include "tests/testing.h"

namespace fastweight::test {

using support::BlockCase;
using support::BlockResults;
using support::BlockSpec;
using support::kBlocks;
using support::name_of;

inline std::vector<std::string> implementations(Block block, Mode mode) {
  return names_of(block_implementations(block), mode);
}

inline BlockSpec spec_of(Block block, int64_t T, int64_t C = 64, Gate gate = Gate::kPerHead) {
  BlockSpec spec;
  spec.block = block;
  spec.T = T;
  spec.C = C;
  spec.gate = gate;
  return spec;
}

inline BlockSpec with_heads(BlockSpec spec, int64_t H, int64_t HV, int64_t K = 16, int64_t V = 16) {
  spec.H = H;
  spec.HV = HV;
  spec.K = K;
  spec.V = V;
  return spec;
}

inline std::vector<Gate> gates_of(Block block) {
  if (block == Block::kL2Norm || block == Block::kRmsNorm || block == Block::kSolveTril) return {Gate::kPerHead};
  if (block == Block::kChunkLocalCumsum || block == Block::kGateActivation) return {Gate::kPerHead, Gate::kPerChannel};
  return {Gate::kNone, Gate::kPerHead, Gate::kPerChannel};
}

class BlockGrid : public GridOf<BlockCase> {
 public:
  BlockGrid() {
    for (Block block : kBlocks) {
      for (Gate gate : gates_of(block)) {
        block_ = block;
        gate_ = gate;
        add_shapes();
        add_options();
      }
    }
  }

 private:
  BlockSpec spec(int64_t T, int64_t C) const { return spec_of(block_, T, C, gate_); }
  GridCase<BlockCase>& add(const std::string& name, const BlockSpec& spec, std::vector<double> values = {}) {
    values.insert(values.begin(), double(gate_));
    return GridOf::add(std::string(name_of(block_)) + "_" + name, spec, values);
  }

  void add_shapes() {
    for (int64_t C : {16, 32, 64}) {
      for (int64_t T : first<int64_t>({0, 1, 2, 15, 16, 17, 31, 33, 47, 63, 64, 65, 150}, 6)) {
        add("length", with_batch(with_heads(spec(T, C), 1, 1, 20, 12), 2), {double(T), double(C)});
      }
    }
    for (int64_t K : first<int64_t>({1, 3, 8, 17, 64, 100, 256}, 4)) {
      add("width", with_heads(spec(70, 64), 2, 2, K, K == 256 ? 5 : 257 - K), {double(K)});
    }
    for (int64_t C : {16, 64}) {
      add("packed", with_lengths(spec(0, C), {0, 1, 70, 0, 0, 16, 64, 5, 0}), {double(C)});
      add("packed_empty", with_lengths(spec(0, C), {0, 0}), {double(C)});
      add("no_sequences", with_lengths(spec(0, C), {}), {double(C)});
    }
    add("groups", with_heads(spec(50, 32), 2, 6));
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
      BlockSpec one = with_heads(spec(90, 64), 2, 2, 40);
      one.dtype = dtype;
      add(name_of(dtype), one);
    }
    for (Layout layout : kLayouts) {
      add("strided", with_batch(with_heads(spec(40, 32), 2, 4), 2), {double(layout)}).layout = layout;
    }
  }

  void add_options() {
    BlockSpec one = spec(70, 64);
    one.beta = one.dt_bias = false;
    one.reverse = true;
    add("options", one);
    // A thousandfold decay: factors run through the whole range of fp32 and reach 0; nothing becomes NaN.
    for (double scale : {30.0, 3000.0}) {
      BlockSpec strong = spec(70, 64);
      strong.gate_scale = scale;
      if (block_ != Block::kL2Norm && block_ != Block::kRmsNorm) add("strong_gates", strong, {scale});
    }
    for (int which = 0; which < 4 && block_ == Block::kRmsNorm; ++which) {
      BlockSpec norm = with_heads(spec(70, 64), 2, 2, 300);
      norm.gated = which != 0;
      norm.weight = which != 1;
      norm.sigmoid = which == 2;
      add("norm", norm, {double(which)});
    }
    if (block_ != Block::kGateActivation) return;
    one.C = 0;  // no sum
    add("not_summed", one);
    add("not_summed_packed", with_lengths(one, {3, 0, 100}));
    if (gate_ != Gate::kPerChannel) return;
    for (bool a_log : {false, true}) {
      for (int64_t C : {0, 16}) {
        one.lower_bound = one.dt_bias = true;
        one.a_log = a_log;
        one.C = C;
        add("lower_bound", one, {double(a_log), double(C)});
      }
    }
  }

  Block block_{};
  Gate gate_{};
};

}  // namespace fastweight::test
