// Hostile calls of the building blocks.
#include <cstdint>
#include <vector>

#include "core/blocks_fields.h"
#include "fuzz/hostile_call.h"

namespace fastweight::fuzz {
namespace {

enum Block { kCumsum, kKkt, kSolve, kWy, kNorm, kGate, kRms };

class BlockCall : public HostileCall {
 public:
  explicit BlockCall(FuzzedDataProvider& data) : HostileCall(data) {
    if (mode_ == kStep) mode_ = kForward;  // blocks have no steps
    block_ = data_.PickValueInArray({kCumsum, kKkt, kSolve, kWy, kNorm, kGate, kRms});
    H_ = data_.ConsumeIntegralInRange(1, 2);
    HV_ = H_ * data_.ConsumeIntegralInRange(1, 2);
    K_ = data_.ConsumeIntegralInRange(1, rarely() ? 256 : 20);
    V_ = data_.ConsumeIntegralInRange(1, rarely() ? 256 : 20);
    C_ = data_.PickValueInArray<int64_t>({16, 32, 64});
    draw_sequences(HV_ * C_ * (K_ + V_));
    dtype_ = floating();
    per_channel_ = flag();
    context_.num_threads = data_.ConsumeIntegralInRange(1, 3);
    context_.implementation = data_.PickValueInArray<const char*>({nullptr, "", "simd", "reference"});
    switch (block_) {
      case kCumsum:
        draw_cumsum();
        break;
      case kKkt:
        mode_ == kForward ? draw_kkt_forward() : draw_kkt_backward();
        break;
      case kSolve:
        mode_ == kForward ? draw_solve_forward() : draw_solve_backward();
        break;
      case kWy:
        mode_ == kForward ? draw_wy_forward() : draw_wy_backward();
        break;
      case kNorm:
        mode_ == kForward ? draw_norm_forward() : draw_norm_backward();
        break;
      case kGate:
        mode_ == kForward ? draw_gate_forward() : draw_gate_backward();
        break;
      case kRms:
        mode_ == kForward ? draw_rms_forward() : draw_rms_backward();
        break;
    }
    spoil_and_allocate();
  }

 private:
  fw_status call(const fw_context* context, bool null_args, const char** name) override {
    const auto made = [&](auto entry, const auto& args) { return entry(context, null_args ? nullptr : &args, name); };
    const bool forward = mode_ == kForward;
    switch (block_) {
      case kCumsum:
        return made(fw_chunk_local_cumsum, cumsum_);
      case kKkt:
        return forward ? made(fw_scaled_dot_kkt_forward, kkt_) : made(fw_scaled_dot_kkt_backward, dkkt_);
      case kSolve:
        return forward ? made(fw_solve_tril_forward, solve_) : made(fw_solve_tril_backward, dsolve_);
      case kWy:
        return forward ? made(fw_wy_forward, wy_) : made(fw_wy_backward, dwy_);
      case kNorm:
        return forward ? made(fw_l2norm_forward, norm_) : made(fw_l2norm_backward, dnorm_);
      case kRms:
        return forward ? made(fw_rms_norm_forward, rms_) : made(fw_rms_norm_backward, drms_);
      case kGate:
        break;
    }
    return forward ? made(fw_gate_activation_forward, gate_) : made(fw_gate_activation_backward, dgate_);
  }

  // There are no inner structs to drop: other sizes stand in.
  void drop_inputs() override { cumsum_.struct_size = kkt_.struct_size = solve_.struct_size = wy_.struct_size = 7; }
  void drop_options() override { dkkt_.struct_size = dsolve_.struct_size = dwy_.struct_size = norm_.struct_size = 7; }
  void spoil_options() override {
    spoil_any_option<ChunkLocalCumsum>(cumsum_);
    spoil_any_option<L2NormForward>(norm_);
    spoil_any_option<GateActivationOptions>(gate_);
    spoil_any_option<GateActivationOptions>(dgate_);
    spoil_any_option<RmsNormOptions>(rms_);
    spoil_any_option<RmsNormOptions>(drms_);
  }

  std::vector<int64_t> matrix_shape() const { return {B_, T_, HV_, C_}; }
  std::vector<int64_t> gate_shape() const {
    return per_channel_ ? std::vector<int64_t>{B_, T_, HV_, K_} : std::vector<int64_t>{B_, T_, HV_};
  }
  int32_t wide() { return dtype_ == FW_F64 && flag() ? FW_F64 : FW_F32; }

  void add_offsets(fw_tensor& cu_seqlens) {
    if (!offsets_.empty()) add_integers(cu_seqlens, offsets_);
  }

  void draw_cumsum() {
    fw_chunk_local_cumsum_args_init(&cumsum_);
    cumsum_.chunk_size = static_cast<int32_t>(C_);
    cumsum_.reverse = flag();
    add(cumsum_.x, false, dtype_, gate_shape());
    add_offsets(cumsum_.cu_seqlens);
    add(cumsum_.y, true, or_fp32(dtype_), gate_shape());
  }

  template <class Args>
  void draw_keys(Args& args) {
    add(args.k, false, dtype_, {B_, T_, H_, K_});
    if (flag()) add(args.beta, false, floating(), {B_, T_, HV_});
    if (flag()) add(args.gamma, false, floating(), gate_shape());
    add_offsets(args.cu_seqlens);
  }
  void draw_kkt_forward() {
    fw_scaled_dot_kkt_forward_args_init(&kkt_);
    draw_keys(kkt_);
    add(kkt_.a, true, wide(), matrix_shape());
  }
  void draw_kkt_backward() {
    fw_scaled_dot_kkt_backward_args_init(&dkkt_);
    draw_keys(dkkt_);
    add(dkkt_.da, false, floating(), matrix_shape());
    add_gradients<ScaledDotKktBackward>(dkkt_, dkkt_, dtype_);
  }

  void draw_solve_forward() {
    fw_solve_tril_forward_args_init(&solve_);
    add(solve_.a, false, dtype_, matrix_shape());
    add_offsets(solve_.cu_seqlens);
    add(solve_.j, true, floating(), matrix_shape());
  }
  void draw_solve_backward() {
    fw_solve_tril_backward_args_init(&dsolve_);
    add(dsolve_.j, false, dtype_, matrix_shape());
    add(dsolve_.dj, false, floating(), matrix_shape());
    add_offsets(dsolve_.cu_seqlens);
    add(dsolve_.da, true, floating(), matrix_shape());
  }

  template <class Args>
  void draw_wy_inputs(Args& args) {
    draw_keys(args);
    add(args.v, false, dtype_, {B_, T_, HV_, V_});
    add(args.j, false, floating(), matrix_shape());
  }
  void draw_wy_forward() {
    fw_wy_forward_args_init(&wy_);
    draw_wy_inputs(wy_);
    if (flag()) add(wy_.w, true, or_fp32(dtype_), {B_, T_, HV_, K_});
    if (flag()) add(wy_.u, true, or_fp32(dtype_), {B_, T_, HV_, V_});
  }
  void draw_wy_backward() {
    fw_wy_backward_args_init(&dwy_);
    draw_wy_inputs(dwy_);
    if (flag()) add(dwy_.dw, false, floating(), {B_, T_, HV_, K_});
    if (flag()) add(dwy_.du, false, floating(), {B_, T_, HV_, V_});
    add_gradients<WyBackward>(dwy_, dwy_, dtype_);
    if (flag()) add(dwy_.da, true, wide(), matrix_shape());
  }

  void draw_norm_forward() {
    fw_l2norm_forward_args_init(&norm_);
    add(norm_.x, false, dtype_, {B_, T_, H_, K_});
    add(norm_.y, true, or_fp32(dtype_), {B_, T_, H_, K_});
    if (flag()) add(norm_.rstd, true, wide(), {B_, T_, H_});
  }
  void draw_norm_backward() {
    fw_l2norm_backward_args_init(&dnorm_);
    add(dnorm_.y, false, dtype_, {B_, T_, H_, K_});
    add(dnorm_.rstd, false, floating(), {B_, T_, H_});
    add(dnorm_.dy, false, floating(), {B_, T_, H_, K_});
    add(dnorm_.dx, true, or_fp32(dtype_), {B_, T_, H_, K_});
  }

  template <class Args>
  void draw_gate_inputs(Args& args) {
    add(args.x, false, dtype_, gate_shape());
    add(args.a_log, false, floating(), {HV_});
    if (flag()) add(args.dt_bias, false, floating(), per_channel_ ? std::vector<int64_t>{HV_ * K_} : std::vector{HV_});
    add_offsets(args.cu_seqlens);
    args.chunk_size = flag() ? static_cast<int32_t>(C_) : 0;
    if (per_channel_ && flag()) args.lower_bound = -5;
  }
  void draw_gate_forward() {
    fw_gate_activation_forward_args_init(&gate_);
    draw_gate_inputs(gate_);
    add(gate_.g, true, or_fp32(dtype_), gate_shape());
  }
  void draw_gate_backward() {
    fw_gate_activation_backward_args_init(&dgate_);
    draw_gate_inputs(dgate_);
    add(dgate_.dg, false, floating(), gate_shape());
    add_gradients<GateActivationBackward>(dgate_, dgate_, dtype_);
  }

  template <class Args>
  void draw_rms_inputs(Args& args) {
    add(args.x, false, dtype_, {B_, T_, H_, K_});
    if (flag()) add(args.gate, false, floating(), {B_, T_, H_, K_});
    if (flag()) add(args.weight, false, floating(), {K_});
    args.activation = flag() ? FW_NORM_GATE_SILU : FW_NORM_GATE_SIGMOID;
  }
  void draw_rms_forward() {
    fw_rms_norm_forward_args_init(&rms_);
    draw_rms_inputs(rms_);
    add(rms_.y, true, or_fp32(dtype_), {B_, T_, H_, K_});
  }
  void draw_rms_backward() {
    fw_rms_norm_backward_args_init(&drms_);
    draw_rms_inputs(drms_);
    add(drms_.dy, false, floating(), {B_, T_, H_, K_});
    add_gradients<RmsNormBackward>(drms_, drms_, dtype_);
  }

  Block block_;
  int64_t H_, HV_, K_, V_, C_;
  int32_t dtype_;
  bool per_channel_;
  fw_chunk_local_cumsum_args cumsum_;
  fw_scaled_dot_kkt_forward_args kkt_;
  fw_scaled_dot_kkt_backward_args dkkt_;
  fw_solve_tril_forward_args solve_;
  fw_solve_tril_backward_args dsolve_;
  fw_wy_forward_args wy_;
  fw_wy_backward_args dwy_;
  fw_l2norm_forward_args norm_;
  fw_l2norm_backward_args dnorm_;
  fw_gate_activation_forward_args gate_;
  fw_gate_activation_backward_args dgate_;
  fw_rms_norm_forward_args rms_;
  fw_rms_norm_backward_args drms_;
};

}  // namespace
}  // namespace fastweight::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  FuzzedDataProvider data(bytes, count);
  fastweight::fuzz::BlockCall(data).run();
  return 0;
}
