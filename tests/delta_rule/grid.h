// The grid of the delta-rule family, and how its specs are written.
#pragma once

#include <string>
#include <vector>

#include "fastweight/delta_rule.h"
#include "support/delta_rule_case.h"
#include "tests/grid.h"
#include "tests/testing.h"

namespace fastweight::test {

using support::DeltaRuleCase;
using support::DeltaRuleResults;
using support::DeltaRuleSpec;
using support::name_of;

inline constexpr Gate kGates[] = {Gate::kNone, Gate::kPerHead, Gate::kPerChannel};

inline std::vector<std::string> implementations(Mode mode) { return names_of(delta_rule_implementations(), mode); }

inline DeltaRuleSpec spec_of(Gate gate, int64_t T, int64_t K, int64_t V) {
  DeltaRuleSpec spec;
  spec.options.gate = gate;
  spec.T = T;
  spec.K = K;
  spec.V = V;
  return spec;
}

// With grouped value heads; the family has them for the gated operators.
inline DeltaRuleSpec with_heads(DeltaRuleSpec spec, int64_t H, int64_t group) {
  spec.H = H;
  spec.HV = H * group;
  return spec;
}

class DeltaRuleGrid : public GridOf<DeltaRuleCase> {
 public:
  explicit DeltaRuleGrid(Gate gate) : gate_(gate) {
    add_shapes();
    add_options();
    if (gate != Gate::kNone) add_gates();
    add_types();
  }

 private:
  DeltaRuleSpec spec(int64_t T, int64_t K, int64_t V) const { return spec_of(gate_, T, K, V); }
  GridCase<DeltaRuleCase>& add(const std::string& name, const DeltaRuleSpec& spec,
                               const std::vector<double>& values = {}) {
    return GridOf::add(std::string(name_of(gate_)) + "_" + name, spec, values);
  }

  void add_shapes() {
    for (int64_t T : first<int64_t>({65, 0, 1, 17, 2, 15, 16, 63, 64, 130, 191, 320}, 4)) {
      for (int32_t chunk_size : first<int32_t>({64, 32, 16}, 1)) {
        DeltaRuleSpec one = with_batch(spec(T, 24, 40), 2);
        one.options.chunk_size = chunk_size;
        add("length", one, {double(T), double(chunk_size)});
      }
    }
    // On a device one token has a kernel of its own.
    const std::vector<std::pair<int64_t, int64_t>> widths{
        {20, 36},   {1, 1},     {3, 128},  {128, 3},   {128, 128}, {60, 100}, {1, 17}, {100, 60},
        {200, 256}, {256, 200}, {16, 256}, {256, 256}, {7, 5},     {31, 33},  {64, 8}, {60, 200}};
    for (const auto& [K, V] : first(widths, 5)) {
      add("widths", spec(70, K, V), {double(K), double(V)});
      add("one_token", with_batch(with_heads(spec(1, K, V), 2, 2), 3), {double(K), double(V)}).modes = {Mode::kStep};
    }
    add("long", spec(emulated() ? 130 : reduced() ? 200 : 1024, 128, 128));
    for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{{}, {70, 0, 1, 64}}) {
      DeltaRuleSpec one = lengths.empty() ? with_batch(spec(70, 72, 80), 2) : with_lengths(spec(0, 128, 96), lengths);
      one.dtype = DType::kBF16;
      add("wide_16bit", one, {double(lengths.size())});
    }
    for (double group : {2, 3}) {
      DeltaRuleSpec one = with_batch(with_heads(spec(67, 20, 36), 2, int64_t(group)), few_);
      add("groups", one, {group});
      one.options.qk_l2norm = true;
      add("groups_l2norm", one, {group});
    }
    const std::vector<std::vector<int64_t>> lengths{{5, 0, 64, 1, 33}, {0, 0},   {0, 130, 0},     {1, 1, 1, 1},
                                                    {64, 128, 65},     {200, 3}, {1, 0, 3, 1, 7}, {}};
    for (size_t i = 0; i < lengths.size(); ++i) {
      for (int32_t chunk_size : first<int32_t>({64, 16}, 1)) {
        DeltaRuleSpec one = with_lengths(with_heads(spec(0, 20, 36), 2, i == 6 ? 2 : 1), lengths[i]);
        one.options.chunk_size = chunk_size;
        add("packed", one, {double(i), double(chunk_size)});
      }
    }
    for (double T : {1, 2, 69}) {
      for (bool v_first : {false, true}) {
        for (bool initial_state : {false, true}) {
          DeltaRuleSpec one = with_heads(spec(int64_t(T), 20, 36), 1, 2);
          one.options.state_v_first = v_first;
          one.initial_state = initial_state;
          add("states", one, {T, double(v_first), double(initial_state)});
        }
      }
    }
  }

  void add_options() {
    const bool per_channel = gate_ == Gate::kPerChannel;
    for (int64_t T : {chunks_, int64_t{1}, int64_t{2}}) {
      for (int variant = 0; variant < 6; ++variant) {
        DeltaRuleSpec one = with_batch(with_heads(spec(T, 36, 20), 1, 2), few_);
        one.options.qk_l2norm = true;
        one.options.state_v_first = T < 3 && variant % 2 == 1;
        one.options.beta_sigmoid = variant >= 1;
        one.options.allow_neg_eigval = variant >= 2;
        one.options.gate_in_kernel = gate_ != Gate::kNone && variant >= 2;
        one.dt_bias_absent = gate_ != Gate::kNone && variant == 3;
        if (per_channel && variant >= 4) {
          one.options.lower_bound = -5;
          one.options.safe_gate = one.a_log_absent = variant == 5;
        }
        add("options", one, {double(T), double(variant)});
      }
    }
    for (double divisor : {1.0, 0.1}) {
      DeltaRuleSpec one = spec(chunks_, 36, 20);
      one.options.safe_gate = true;
      one.gate_divisor = divisor;
      if (per_channel) add("safe_gate", one, {divisor});
    }
    for (double T : {70, 1, 2}) {
      DeltaRuleSpec one = spec(int64_t(T), 20, 36);
      one.beta_absent = true;
      add("beta_absent", one, {T});
      one.beta_absent = false;
      one.beta_per_value = true;
      add("beta_per_value", one, {T});
    }
    for (double value : {0.0, 1.0, 1.99}) {
      add("beta_of", spec(70, 20, 36), {value}).change = [=](DeltaRuleCase& x) { x.beta.fill(value); };
    }
    for (int absent = 1; absent <= 3; ++absent) {
      auto& one = add("gradients_absent", spec(70, 20, 36), {double(absent)});
      one.modes = {Mode::kBackward};
      one.change = [=](DeltaRuleCase& x) {
        if (absent & 1) x.d_o = {};
        if (absent & 2) x.d_final_state = {};
      };
    }
  }

  void add_gates() {
    for (double divisor : {0.01, 0.1, 10.0, 1000.0}) {
      DeltaRuleSpec one = spec(chunks_, 36, 20);
      one.gate_divisor = divisor;
      add("gates_over", one, {divisor});
    }
    for (double fraction : {0.1, 0.5, 1.0}) {
      DeltaRuleSpec one = spec(chunks_, 36, 20);
      one.hard_gate_fraction = fraction;
      add("hard_gates", one, {fraction});
    }
    add("open_gates", spec(chunks_, 36, 20)).change = [](DeltaRuleCase& x) { x.g.fill(0); };
    // Open gates, under which distant tokens meet; and where the decay of 16 tokens is just above what a 16-bit operand
    // holds, and just below.
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      const std::string type = name_of(dtype);
      DeltaRuleSpec one = spec(70, 36, 20);
      one.dtype = dtype;
      for (double g : {0.0, -0.1, -0.3, -5.0, -5.1, -5.5, -9.0}) {
        add("gates_of_" + type, one, {g}).change = [=](DeltaRuleCase& x) { x.g.fill(g); };
      }
      for (double fraction : {0.1, 1.0}) {
        one.hard_gate_fraction = fraction;
        add("hard_gates_" + type, one, {fraction});
      }
    }
  }

  void add_types() {
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      for (DType gate_dtype : {DType::kF32, dtype}) {
        for (int64_t T : first<int64_t>({70, 1, 3, 300}, 3)) {
          const std::string types = std::string(name_of(dtype)) + "_" + name_of(gate_dtype);
          DeltaRuleSpec one = with_heads(spec(T, 60, 100), 1, 2);
          one.dtype = dtype;
          one.gate_dtype = gate_dtype;
          add(types, one, {double(T)});
          one.options.qk_l2norm = true;
          if (T == 70) add(types + "_packed", with_lengths(one, {5, 0, 64, 1, 33}));
        }
      }
    }
    for (DType type : {DType::kBF16, DType::kF16, DType::kF64}) {
      DeltaRuleSpec one = spec(70, 20, 36);
      one.gate_dtype = type;
      add(std::string("gates_in_") + name_of(type), one);
      auto& states = add(std::string("states_in_") + name_of(type), spec(70, 20, 36));
      states.change = [=](DeltaRuleCase& x) {
        x.initial_state = x.initial_state.to(type);
        x.d_final_state = x.d_final_state.to(type);
      };
      states.modes = {Mode::kForward, Mode::kBackward};  // a step writes its state in the type it has
    }
    DeltaRuleSpec narrow = spec(70, 20, 36);
    narrow.dtype = narrow.gate_dtype = DType::kBF16;
    add("wide_results", narrow).wide = true;

    const int first_layout = emulated() ? 1 : 0;  // the rest of the grid is dense
    std::vector<Layout> layouts(std::begin(kLayouts) + first_layout, std::end(kLayouts));
    layouts.push_back(Layout::kAlignedRows);
    for (Layout layout : layouts) {
      for (int64_t T : {69, 1, 2}) {
        for (DType dtype : {DType::kF32, DType::kBF16}) {
          DeltaRuleSpec one = with_batch(with_heads(spec(T, 20, 36), 2, emulated() ? 1 : 2), 2);
          one.dtype = dtype;
          one.options.gate_in_kernel = T > 2 && gate_ != Gate::kNone;
          add(std::string("strided_") + name_of(dtype), one, {double(layout), double(T)}).layout = layout;
        }
      }
    }
  }

  Gate gate_;
  // Where only options differ: several chunks and rows, of which the emulator has time for the fewest. Lengths and packed
  // sequences have more.
  int64_t chunks_ = emulated() ? 70 : 130;  // tokens
  int64_t few_ = emulated() ? 1 : 2;        // rows
};

}  // namespace fastweight::test
