// Hostile calls of the TTT-linear family.
#include <cstdint>
#include <vector>

#include "core/ttt_linear_fields.h"
#include "fuzz/hostile_call.h"

namespace fastweight::fuzz {
namespace {

class TttLinearCall : public HostileCall {
 public:
  explicit TttLinearCall(FuzzedDataProvider& data) : HostileCall(data) {
    fw_ttt_linear_options_init(&options_);
    fw_ttt_linear_inputs_init(&inputs_);
    fw_ttt_linear_forward_args_init(&forward_);
    fw_ttt_linear_backward_args_init(&backward_);
    fw_ttt_linear_step_args_init(&step_);
    forward_.inputs = backward_.inputs = step_.inputs = &inputs_;
    forward_.options = backward_.options = step_.options = &options_;
    H_ = data_.ConsumeIntegralInRange(1, 3);
    D_ = data_.ConsumeIntegralInRange(1, rarely() ? 128 : 20);
    draw_sequences(H_ * D_ * D_);
    draw_options();
    draw_inputs();
    if (mode_ == kForward) draw_forward();
    if (mode_ == kBackward) draw_backward();
    if (mode_ == kStep) draw_step();
    spoil_and_allocate();
  }

 private:
  fw_status call(const fw_context* context, bool null_args, const char** name) override {
    if (mode_ == kForward) return fw_ttt_linear_forward(context, null_args ? nullptr : &forward_, name);
    if (mode_ == kBackward) return fw_ttt_linear_backward(context, null_args ? nullptr : &backward_, name);
    return fw_ttt_linear_step(context, null_args ? nullptr : &step_, name);
  }
  void drop_inputs() override { forward_.inputs = backward_.inputs = step_.inputs = nullptr; }
  void drop_options() override { forward_.options = backward_.options = step_.options = nullptr; }

  void draw_options() {
    options_.mini_batch = data_.PickValueInArray({16, 32, 64});
    if (flag()) options_.scale = data_.PickValueInArray({0.5, 1e-300, 1e300});
    if (flag()) options_.eps = data_.PickValueInArray({1e-3, 1e-300, 1e300});
    context_.num_threads = data_.ConsumeIntegralInRange(1, 3);
    context_.implementation = data_.PickValueInArray<const char*>({nullptr, "", "chunk", "reference"});
  }

  std::vector<int64_t> rows_shape() const { return {B_, T_, H_, D_}; }
  std::vector<int64_t> state_shape(int64_t count) const { return {count, H_, D_, D_}; }
  std::vector<int64_t> bias_shape(int64_t count) {
    if (flag()) return {count, H_, D_};
    return {count, H_, 1, D_};
  }

  void draw_inputs() {
    dtype_ = floating();
    state_dtype_ = dtype_ == FW_F64 ? or_fp32(FW_F64) : static_cast<int32_t>(FW_F32);
    add(inputs_.q, false, dtype_, rows_shape());
    add(inputs_.k, false, dtype_, rows_shape());
    add(inputs_.v, false, dtype_, rows_shape());
    add(inputs_.w, false, floating(), {H_, D_});
    add(inputs_.b, false, floating(), {H_, D_});
    if (flag()) {
      add(inputs_.eta, false, floating(), {B_, T_, H_});
    } else {
      add(inputs_.eta, false, floating(), {B_, T_, H_, 1});
    }
    if (!offsets_.empty()) add_integers(inputs_.cu_seqlens, offsets_);
    if (mode_ == kStep) return;
    if (flag()) add(inputs_.initial_state, false, floating(), state_shape(N_));
    if (flag()) add(inputs_.initial_state_bias, false, floating(), bias_shape(N_));
  }

  void draw_forward() {
    add(forward_.o, true, or_fp32(dtype_), rows_shape());
    if (flag()) add(forward_.final_state, true, state_dtype_, state_shape(N_));
    if (flag()) add(forward_.final_state_bias, true, state_dtype_, bias_shape(N_));
  }

  void draw_backward() {
    if (flag()) add(backward_.d_o, false, or_fp32(dtype_), rows_shape());
    if (flag()) add(backward_.d_final_state, false, floating(), state_shape(N_));
    if (flag()) add(backward_.d_final_state_bias, false, floating(), bias_shape(N_));
    add_gradients<TttLinearBackward>(backward_, inputs_, state_dtype_);
  }

  void draw_step() {
    const bool indexed = flag();
    const int64_t slots = indexed ? N_ + 2 : N_;
    add(step_.state, true, state_dtype_, state_shape(slots));
    add(step_.state_bias, true, state_dtype_, bias_shape(slots));
    add(step_.gradient, true, state_dtype_, state_shape(slots));
    add(step_.gradient_bias, true, state_dtype_, bias_shape(slots));
    std::vector<int64_t> positions;
    for (int64_t slot = 0; slot < slots; ++slot) {
      positions.push_back(data_.ConsumeIntegralInRange(0, options_.mini_batch - 1));
    }
    add_integers(step_.position, true, FW_I32, positions);
    if (indexed) add_integers(step_.state_indices, draw_state_indices());
    add(step_.o, true, or_fp32(dtype_), rows_shape());
  }

  void spoil_options() override { spoil_any_option<TttLinearOptions>(options_); }

  int64_t H_, D_;
  int32_t dtype_, state_dtype_;
  fw_ttt_linear_options options_;
  fw_ttt_linear_inputs inputs_;
  fw_ttt_linear_forward_args forward_;
  fw_ttt_linear_backward_args backward_;
  fw_ttt_linear_step_args step_;
};

}  // namespace
}  // namespace fastweight::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  FuzzedDataProvider data(bytes, count);
  fastweight::fuzz::TttLinearCall(data).run();
  return 0;
}
