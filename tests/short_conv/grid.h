// The grid of the short convolution, and how its specs are written.
#pragma once

#include <string>
#include <vector>

#include "fastweight/short_conv.h"
#include "support/short_conv_case.h"
#include "tests/grid.h"
#include "tests/testing.h"

namespace fastweight::test {

using support::ShortConvCase;
using support::ShortConvResults;
using support::ShortConvSpec;

inline std::vector<std::string> implementations(Mode mode) { return names_of(short_conv_implementations(), mode); }

inline ShortConvSpec spec_of(int64_t T, int64_t D, int64_t W = 4, Activation activation = Activation::kSilu) {
  ShortConvSpec spec;
  spec.T = T;
  spec.D = D;
  spec.W = W;
  spec.options.activation = activation;
  return spec;
}

class ShortConvGrid : public GridOf<ShortConvCase> {
 public:
  ShortConvGrid() {
    add_shapes();
    add_options();
    add_types();
  }

 private:
  void add_shapes() {
    for (int64_t T : first<int64_t>({5, 0, 1, 257, 2, 3, 4, 15, 16, 64, 255, 256, 511, 513, 600}, 4)) {
      add("length", with_batch(spec_of(T, 21), 2), {double(T)});
    }
    for (int64_t D : first<int64_t>({33, 1, 7, 8, 16, 64, 511, 512, 513, 1100}, 3)) {
      add("channels", spec_of(17, D), {double(D)});
    }
    for (int64_t W : first<int64_t>({3, 1, 2, 5, 7, 8, 16}, 3)) {
      for (int64_t T : {1, 2, 9, 300}) add("width", spec_of(T, 19, W), {double(W), double(T)});
    }
    const std::vector<std::vector<int64_t>> lengths{{5, 0, 64, 1, 33},
                                                    {0, 0},
                                                    {0, 300, 0},
                                                    {1, 1, 1, 1},
                                                    {2, 3, 4, 5, 260},
                                                    {256, 512, 1},
                                                    std::vector<int64_t>(600, 1),
                                                    {}};
    for (size_t i = 0; i < lengths.size(); ++i) {
      add("packed", with_lengths(spec_of(0, 20), lengths[i]), {double(i)});
      add("packed_odd", with_lengths(spec_of(0, 9, 3), lengths[i]), {double(i)});
    }
  }

  void add_options() {
    for (Activation activation : {Activation::kNone, Activation::kSilu}) {
      for (int variant = 0; variant < 8; ++variant) {
        ShortConvSpec spec = spec_of(37, 19, 4, activation);
        spec.bias = variant & 1;
        spec.residual = variant & 2;
        spec.initial_state = variant & 4;
        add("options", spec, {double(activation), double(variant)});
      }
    }
    for (int absent = 1; absent < 4; ++absent) {
      for (int64_t T : {70, 3}) {
        auto& one = add("gradients_absent", spec_of(T, 20), {double(absent), double(T)});
        one.modes = {Mode::kBackward};
        one.change = [=](ShortConvCase& x) {
          if (absent & 1) x.dy = {};
          if (absent & 2) x.d_final_state = {};
        };
      }
    }
    add("large_inputs", spec_of(20, 16)).change = [](ShortConvCase& x) {
      for (int64_t i = 0; i < x.x.size(); ++i) x.x.set(i, x.x[i] * 200);
    };
  }

  void add_types() {
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF64, DType::kF32}) {
      for (DType parameter_dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
        const std::string types = std::string(name_of(dtype)) + "_" + name_of(parameter_dtype);
        ShortConvSpec spec = spec_of(67, 37);
        spec.dtype = dtype;
        spec.parameter_dtype = parameter_dtype;
        add(types, spec);
        add(types + "_packed", with_lengths(spec, {5, 0, 64, 1, 33}));
      }
    }
    for (DType type : {DType::kBF16, DType::kF16, DType::kF64}) {
      ShortConvSpec spec = spec_of(2, 20);
      spec.bias = false;
      auto& states = add(std::string("states_in_") + name_of(type), spec);
      states.change = [=](ShortConvCase& x) {
        x.initial_state = x.initial_state.to(type);
        x.d_final_state = x.d_final_state.to(type);
      };
      states.modes = {Mode::kForward, Mode::kBackward};  // a step's state has the type of x, or fp32
    }
    ShortConvSpec narrow = spec_of(70, 20);
    narrow.set_types(DType::kBF16);
    auto& wide = add("wide_results", narrow);
    wide.wide = true;
    wide.modes = {Mode::kForward, Mode::kBackward};
    for (Layout layout : kLayouts) {
      for (DType dtype : {DType::kF32, DType::kBF16}) {
        for (int64_t W : {4, 3}) {
          ShortConvSpec spec = with_batch(spec_of(69, 20, W), 2);
          spec.dtype = dtype;
          add(std::string("strided_") + name_of(dtype), spec, {double(layout), double(W)}).layout = layout;
        }
      }
    }
  }
};

}  // namespace fastweight::test
