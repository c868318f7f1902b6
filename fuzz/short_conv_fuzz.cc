// Hostile calls of the short convolution.
#include <cstdint>
#include <vector>

#include "core/short_conv_fields.h"
#include "fuzz/hostile_call.h"

namespace fastweight::fuzz {
namespace {

class ShortConvCall : public HostileCall {
 public:
  explicit ShortConvCall(FuzzedDataProvider& data) : HostileCall(data) {
    fw_short_conv_options_init(&options_);
    fw_short_conv_inputs_init(&inputs_);
    fw_short_conv_forward_args_init(&forward_);
    fw_short_conv_backward_args_init(&backward_);
    fw_short_conv_step_args_init(&step_);
    forward_.inputs = backward_.inputs = step_.inputs = &inputs_;
    forward_.options = backward_.options = step_.options = &options_;
    D_ = data_.ConsumeIntegralInRange(1, rarely() ? 1100 : 40);
    W_ = flag() ? 4 : data_.ConsumeIntegralInRange(1, 16);
    draw_sequences(D_ * W_);
    options_.activation = data_.ConsumeIntegralInRange(0, 1);
    context_.num_threads = data_.ConsumeIntegralInRange(1, 3);
    context_.implementation = data_.PickValueInArray<const char*>({nullptr, "", "direct", "reference"});
    draw_inputs();
    if (mode_ == kForward) draw_forward();
    if (mode_ == kBackward) draw_backward();
    if (mode_ == kStep) draw_step();
    spoil_and_allocate();
  }

 private:
  fw_status call(const fw_context* context, bool null_args, const char** name) override {
    if (mode_ == kForward) return fw_short_conv_forward(context, null_args ? nullptr : &forward_, name);
    if (mode_ == kBackward) return fw_short_conv_backward(context, null_args ? nullptr : &backward_, name);
    return fw_short_conv_step(context, null_args ? nullptr : &step_, name);
  }
  void drop_inputs() override { forward_.inputs = backward_.inputs = step_.inputs = nullptr; }
  void drop_options() override { forward_.options = backward_.options = step_.options = nullptr; }

  std::vector<int64_t> rows_shape() const { return {B_, T_, D_}; }
  std::vector<int64_t> state_shape(int64_t count) const { return {count, D_, W_}; }

  void draw_inputs() {
    dtype_ = floating();
    add(inputs_.x, false, dtype_, rows_shape());
    add(inputs_.w, false, floating(), {D_, W_});
    if (flag()) add(inputs_.bias, false, floating(), {D_});
    if (!offsets_.empty()) add_integers(inputs_.cu_seqlens, offsets_);
    if (mode_ != kStep && flag()) add(inputs_.initial_state, false, floating(), state_shape(N_));
  }

  void draw_forward() {
    if (flag()) add(forward_.residual, false, floating(), rows_shape());
    add(forward_.y, true, or_fp32(dtype_), rows_shape());
    if (flag()) add(forward_.final_state, true, or_fp32(dtype_), state_shape(N_));
  }

  void draw_backward() {
    if (flag()) add(backward_.dy, false, or_fp32(dtype_), rows_shape());
    if (flag()) add(backward_.d_final_state, false, floating(), state_shape(N_));
    add_gradients<ShortConvBackward>(backward_, inputs_, dtype_);
  }

  void draw_step() {
    const bool indexed = flag();
    if (flag()) add(step_.residual, false, floating(), rows_shape());
    add(step_.state, true, or_fp32(dtype_), state_shape(indexed ? N_ + 2 : N_));
    if (indexed) add_integers(step_.state_indices, draw_state_indices());
    add(step_.y, true, or_fp32(dtype_), rows_shape());
  }

  void spoil_options() override { spoil_any_option<ShortConvOptions>(options_); }

  int64_t D_, W_;
  int32_t dtype_;
  fw_short_conv_options options_;
  fw_short_conv_inputs inputs_;
  fw_short_conv_forward_args forward_;
  fw_short_conv_backward_args backward_;
  fw_short_conv_step_args step_;
};

}  // namespace
}  // namespace fastweight::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  FuzzedDataProvider data(bytes, count);
  fastweight::fuzz::ShortConvCall(data).run();
  return 0;
}
