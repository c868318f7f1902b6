// The grid of the TTT-linear family, and how its specs are written.
#pragma once

#include <string>
#include <vector>

#include "fastweight/ttt_linear.h"
#include "support/ttt_linear_case.h"
#include "tests/grid.h"
#include "tests/testing.h"

namespace fastweight::test {

using support::TttLinearCase;
using support::TttLinearOpen;
using support::TttLinearResults;
using support::TttLinearSpec;

inline std::vector<std::string> implementations(Mode mode) { return names_of(ttt_linear_implementations(), mode); }

inline TttLinearSpec spec_of(int64_t T, int64_t D, int64_t H = 1) {
  TttLinearSpec spec;
  spec.T = T;
  spec.D = D;
  spec.H = H;
  return spec;
}

inline TttLinearOpen open_after(const TttLinearResults& step) {
  return {step.final_state, step.final_state_bias, step.gradient, step.gradient_bias, step.position};
}

class TttLinearGrid : public GridOf<TttLinearCase> {
 public:
  TttLinearGrid() {
    add_shapes();
    add_options();
    add_types();
  }

 private:
  void add_shapes() {
    for (int64_t T : first<int64_t>({65, 0, 1, 17, 2, 15, 16, 31, 33, 40, 63, 64, 130, 191, 320}, 4)) {
      for (int32_t mini_batch : {16, 32, 64}) {
        TttLinearSpec spec = with_batch(spec_of(T, 24, 2), 2);
        spec.options.mini_batch = mini_batch;
        add("length", spec, {double(T), double(mini_batch)});
      }
    }
    for (int64_t D : first<int64_t>({60, 16, 128, 33, 64, 100, 17, 20, 31, 48, 96, 127, 12, 8, 5, 1}, 4)) {
      add("one_token", with_batch(spec_of(1, D, 2), 3), {double(D)}).modes = {Mode::kStep};
      auto& wide = add("width", spec_of(70, D), {double(D)});
      // Below about 8 entries the layer norm's derivative is a difference of nearly equal numbers.
      if (D <= 8) wide.modes = {Mode::kForward};
    }
    add("long", spec_of(reduced() ? 200 : 1024, 64));
    const std::vector<std::vector<int64_t>> lengths{
        {5, 0, 64, 1, 33}, {0, 0}, {0, 130, 0}, {1, 1, 1, 1}, {64, 128, 65}, {200, 3}, {16, 32, 48},
        {1, 0, 3, 16, 37}, {}};
    for (size_t i = 0; i < lengths.size(); ++i) {
      for (int32_t mini_batch : first<int32_t>({16, 64}, 1)) {
        TttLinearSpec spec = with_lengths(spec_of(0, 20, 2), lengths[i]);
        spec.options.mini_batch = mini_batch;
        add("packed", spec, {double(i), double(mini_batch)});
      }
    }
  }

  void add_options() {
    for (bool state : {false, true}) {
      for (bool bias : {false, true}) {
        TttLinearSpec spec = spec_of(69, 20, 2);
        spec.initial_state = state;
        spec.initial_state_bias = bias;
        add("states", spec, {double(state), double(bias)});
      }
    }
    for (double scale : {0.01, 0.3, 1.0, 3.0}) {
      for (double eps : {1e-6, 1e-2}) {
        TttLinearSpec spec = spec_of(69, 36);
        spec.options.scale = scale;
        spec.options.eps = eps;
        add("scale_and_eps", spec, {scale, eps});
      }
    }
    for (double factor : {0.0, 0.1, -1.0, 10.0}) {
      add("step_size", spec_of(69, 36), {factor}).change = [=](TttLinearCase& x) {
        for (int64_t i = 0; i < x.eta.size(); ++i) x.eta.set(i, factor * x.eta[i]);
      };
    }
    for (int absent = 1; absent < 8; ++absent) {
      auto& one = add("gradients_absent", spec_of(70, 20), {double(absent)});
      one.modes = {Mode::kBackward};
      one.change = [=](TttLinearCase& x) {
        if (absent & 1) x.d_o = {};
        if (absent & 2) x.d_final_state = {};
        if (absent & 4) x.d_final_state_bias = {};
      };
    }
  }

  void add_types() {
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      for (DType parameter_dtype : {DType::kF32, dtype}) {
        for (int32_t mini_batch : {16, 64}) {
          const std::string types = std::string(name_of(dtype)) + "_" + name_of(parameter_dtype);
          TttLinearSpec spec = spec_of(0, 60, 2);
          spec.dtype = dtype;
          spec.parameter_dtype = parameter_dtype;
          spec.options.mini_batch = mini_batch;
          add(types + "_packed", with_lengths(spec, {5, 0, 64, 1, 33}), {double(mini_batch)});
          for (int64_t T : first<int64_t>({63, 19, 300}, 2)) {
            spec.T = T;
            add(types, spec, {double(T), double(mini_batch)});
          }
        }
      }
    }
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      for (int64_t D : {128, 100}) {
        TttLinearSpec spec =
            with_lengths(spec_of(0, D, 2), D == 128 ? std::vector<int64_t>{69} : std::vector<int64_t>{40, 0, 17});
        spec.dtype = dtype;
        add(std::string(name_of(dtype)) + "_wide", spec, {double(D)});
      }
    }
    for (DType type : {DType::kBF16, DType::kF16, DType::kF64}) {
      TttLinearSpec spec = spec_of(70, 20);
      spec.parameter_dtype = type;
      add(std::string("parameters_in_") + name_of(type), spec);
      add(std::string("states_in_") + name_of(type), spec_of(70, 20)).change = [=](TttLinearCase& x) {
        for (Part end : {Part::kStart, Part::kEnd}) {
          for (Tensor* state : x.of(end)) *state = state->to(type);
        }
      };
    }
    TttLinearSpec narrow = spec_of(70, 20);
    narrow.set_types(DType::kBF16);
    add("wide_results", narrow).wide = true;
    for (Layout layout : kLayouts) {
      for (DType dtype : {DType::kF32, DType::kBF16}) {
        TttLinearSpec spec = with_batch(spec_of(69, 20, 2), 2);
        spec.dtype = dtype;
        add(std::string("strided_") + name_of(dtype), spec, {double(layout)}).layout = layout;
      }
    }
  }
};

}  // namespace fastweight::test
