// The grid of the families related to the delta rule, and how their specs are written.
#pragma once

#include <string>
#include <vector>

#include "support/related_case.h"
#include "tests/grid.h"
#include "tests/testing.h"

namespace fastweight::test {

using support::kRelatedOps;
using support::name_of;
using support::RelatedCase;
using support::RelatedOp;
using support::RelatedResults;
using support::RelatedSpec;

inline std::vector<std::string> implementations(RelatedOp op, Mode mode) {
  return names_of(support::implementations_of(op), mode);
}

inline RelatedSpec spec_of(RelatedOp op, int64_t T, int64_t K, int64_t V, int64_t H = 1) {
  RelatedSpec spec;
  spec.op = op;
  spec.T = T;
  spec.K = K;
  spec.V = V;
  spec.H = H;
  return spec;
}

// The ways in which an operator's inputs may differ, each on top of `plain`.
inline std::vector<RelatedSpec> variants(const RelatedSpec& plain) {
  std::vector<RelatedSpec> list{plain};
  const auto add = [&](const auto& change) {
    list.push_back(plain);
    change(list.back());
  };
  add([](RelatedSpec& spec) { spec.state_v_first = true; });
  add([](RelatedSpec& spec) { spec.initial_state = false; });
  add([](RelatedSpec& spec) { spec.scale = -0.7; });
  if (plain.op == RelatedOp::kSimpleGla) add([](RelatedSpec& spec) { spec.g_gamma = true; });
  if (plain.op == RelatedOp::kComba) {
    add([](RelatedSpec& spec) { spec.qk_l2norm = true; });
    add([](RelatedSpec& spec) { spec.p_absent = true; });
    add([](RelatedSpec& spec) { spec.beta_absent = true; });
    add([](RelatedSpec& spec) { spec.group = 3; });
    add([](RelatedSpec& spec) { spec.beta_per_value = true; });
    add([](RelatedSpec& spec) { spec.p_absent = spec.beta_absent = spec.qk_l2norm = true; });
    add([](RelatedSpec& spec) {
      spec.group = 2;
      spec.p_absent = spec.qk_l2norm = spec.beta_per_value = true;
    });
  }
  return list;
}

class RelatedGrid : public GridOf<RelatedCase> {
 public:
  RelatedGrid() {
    for (RelatedOp op : kRelatedOps) {
      op_ = op;
      add_shapes();
      if (gate_of(op) != Gate::kNone) add_gates();
      add_types();
    }
  }

 private:
  RelatedSpec spec(int64_t T, int64_t K, int64_t V, int64_t H = 1) const { return spec_of(op_, T, K, V, H); }
  GridCase<RelatedCase>& add(const std::string& name, const RelatedSpec& spec, const std::vector<double>& values = {}) {
    return GridOf::add(std::string(name_of(op_)) + "_" + name, spec, values);
  }

  void add_shapes() {
    for (int64_t T : first<int64_t>({65, 0, 1, 17, 2, 15, 16, 63, 64, 130, 191, 320}, 4)) {
      for (int32_t chunk_size : first<int32_t>({64, 16}, 1)) {
        RelatedSpec one = with_batch(spec(T, 24, 40), 2);
        one.chunk_size = chunk_size;
        add("length", one, {double(T), double(chunk_size)});
      }
    }
    const std::vector<std::pair<int64_t, int64_t>> widths{{20, 36}, {1, 1},    {3, 128},   {128, 3},  {60, 100},
                                                          {1, 17},  {100, 60}, {128, 128}, {16, 256}, {256, 200},
                                                          {7, 5},   {31, 33},  {64, 8}};
    for (const auto& [K, V] : first(widths, 4)) add("widths", spec(70, K, V), {double(K), double(V)});
    add("long", spec(reduced() ? 200 : 1024, 128, 128)).modes = {Mode::kForward};
    add("long_backward", spec(reduced() ? 200 : 512, 128, 128)).modes = {Mode::kBackward};
    const std::vector<std::vector<int64_t>> lengths{{5, 0, 64, 1, 33}, {0, 0},   {0, 130, 0}, {1, 1, 1, 1},
                                                    {64, 128, 65},     {200, 3}, {}};
    for (size_t i = 0; i < lengths.size(); ++i) {
      add("packed", with_lengths(spec(0, 20, 36, 2), lengths[i]), {double(i)});
    }
    // One head alone is cut into units whose sums are added; many are not.
    for (int64_t H : {1, 4, 8}) add("heads", spec(35, 20, 130, H), {double(H)});
    const std::vector<RelatedSpec> all = variants(spec(69, 20, 36, 2));
    for (size_t i = 0; i < all.size(); ++i) {
      RelatedSpec one = all[i];
      add("variant", one, {double(i)});
      add("variant_packed", with_lengths(one, {5, 0, 64, 1, 33}), {double(i)});
      one.set_types(DType::kF64);
      add("variant_f64", one, {double(i)});
      add("variant_packed_f64", with_lengths(one, {5, 0, 64, 1, 33}), {double(i)});
    }
    for (int absent = 1; absent <= 3; ++absent) {
      auto& one = add("gradients_absent", spec(70, 20, 36), {double(absent)});
      one.modes = {Mode::kBackward};
      one.change = [=](RelatedCase& x) {
        if (absent & 1) x.d_o = {};
        if (absent & 2) x.d_final_state = {};
      };
    }
  }

  void add_gates() {
    for (double divisor : {0.01, 0.1, 10.0, 1000.0}) {
      RelatedSpec one = spec(130, 36, 20);
      one.gate_divisor = divisor;
      add("gates_over", one, {divisor});
    }
    for (double fraction : {0.1, 0.5, 1.0}) {
      RelatedSpec one = spec(130, 36, 20);
      one.hard_gate_fraction = fraction;
      add("hard_gates", one, {fraction});
    }
    add("open_gates", spec(130, 36, 20)).change = [](RelatedCase& x) { x.g.fill(0); };
  }

  void add_types() {
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      for (DType gate_dtype : {DType::kF32, dtype}) {
        const std::string types = std::string(name_of(dtype)) + "_" + name_of(gate_dtype);
        RelatedSpec one = spec(70, 60, 100, 2);
        one.dtype = dtype;
        one.gate_dtype = gate_dtype;
        add(types, one);
        add(types + "_packed", with_lengths(one, {5, 0, 64, 1, 33}));
      }
    }
    for (DType other : {DType::kBF16, DType::kF16, DType::kF64}) {
      RelatedSpec one = spec(70, 20, 36);
      one.gate_dtype = other;
      GridCase<RelatedCase>& added = add(std::string("gates_and_states_in_") + name_of(other), one);
      if (other != DType::kBF16) added.modes = {Mode::kForward, Mode::kBackward};  // a step's states are fp32 or bf16
      added.change = [=](RelatedCase& x) {
        x.initial_state = x.initial_state.to(other);
        x.d_final_state = x.d_final_state.to(other);
      };
    }
    RelatedSpec narrow = spec(70, 20, 36);
    narrow.set_types(DType::kBF16);
    add("wide_results", narrow).wide = true;
    for (Layout layout : kLayouts) {
      for (DType dtype : {DType::kF32, DType::kBF16}) {
        RelatedSpec one = with_batch(spec(69, 20, 36, 2), 2);
        one.dtype = dtype;
        add(std::string("strided_") + name_of(dtype), one, {double(layout)}).layout = layout;
      }
    }
  }

  RelatedOp op_{};
};

}  // namespace fastweight::test
