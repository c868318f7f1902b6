// States between the caller's tensors and the kernels' panels. Re-included once per instruction set.
//
// A kernel holds `panels` panels of kPanel value columns each, [panels][ld][kPanel]; padding rows and columns are 0.
#if defined(FW_CPU_STATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_STATE_INL_H_
#undef FW_CPU_STATE_INL_H_
#else
#define FW_CPU_STATE_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "cpu/element.h"
#include "cpu/simd/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {

// A K x V matrix somewhere in a state tensor.
struct StateRef {
  char* data;
  DType dtype;
  int64_t k_stride, v_stride;
  int64_t K, V;
};

// The matrix at [n, head] of a [N, HV, ..] tensor, or at [n, c, head] of a [B, NT, HV, ..] tensor.
HWY_INLINE StateRef state_at(const TensorView& x, bool v_first, int64_t K, int64_t V, int64_t offset) {
  const auto rank = static_cast<size_t>(x.rank);
  const int64_t outer = x.strides[rank - 2], inner = x.strides[rank - 1];
  return {static_cast<char*>(x.data) + offset * element_size(x.dtype),
          x.dtype,
          v_first ? inner : outer,
          v_first ? outer : inner,
          K,
          V};
}
HWY_INLINE StateRef state_of(const TensorView& x, bool v_first, int64_t K, int64_t V, int64_t n, int64_t head) {
  return state_at(x, v_first, K, V, n * x.strides[0] + head * x.strides[1]);
}
HWY_INLINE StateRef chunk_state_of(const TensorView& x, bool v_first, int64_t K, int64_t V, int64_t batch,
                                   int64_t chunk, int64_t head) {
  return state_at(x, v_first, K, V, batch * x.strides[0] + chunk * x.strides[1] + head * x.strides[2]);
}

// Whether a panel can be moved by 4 x 4 transposes: an fp32 state whose key axis is contiguous.
HWY_INLINE bool transposable(const StateRef& state, int64_t width) {
  return state.dtype == DType::kF32 && state.k_stride == 1 && state.v_stride != 1 && state.K % 4 == 0 && width % 4 == 0;
}

// Panels [first, first + panels) of the state.
HWY_NOINLINE inline void load_state(const StateRef& state, int64_t first, int64_t panels, int64_t ld, float* S) {
  for (int64_t p = 0; p < panels; ++p, S += ld * kPanel) {
    const int64_t column = (first + p) * kPanel;
    const int64_t width = std::min(kPanel, state.V - column);
    const char* src = state.data + column * state.v_stride * element_size(state.dtype);
    if (transposable(state, width)) {
      if (width < kPanel) std::memset(S, 0, static_cast<size_t>(ld * kPanel) * sizeof(float));
      transpose(reinterpret_cast<const float*>(src), state.v_stride, width, state.K, S, kPanel);
    } else {
      load_rows(src, state.dtype, state.k_stride, state.v_stride, state.K, width, S, kPanel);
    }
    std::memset(S + state.K * kPanel, 0, static_cast<size_t>((ld - state.K) * kPanel) * sizeof(float));
  }
}

HWY_NOINLINE inline void store_state(const float* S, const StateRef& state, int64_t first, int64_t panels, int64_t ld) {
  for (int64_t p = 0; p < panels; ++p, S += ld * kPanel) {
    const int64_t column = (first + p) * kPanel;
    const int64_t width = std::min(kPanel, state.V - column);
    char* dst = state.data + column * state.v_stride * element_size(state.dtype);
    if (transposable(state, width)) {
      transpose(S, kPanel, state.K, width, reinterpret_cast<float*>(dst), state.v_stride);
    } else {
      store_rows(S, kPanel, dst, state.dtype, state.k_stride, state.v_stride, state.K, width);
    }
  }
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
