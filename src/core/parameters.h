// Parameters of gates in the form that kernels see them in, whatever shape the caller gave them (check::parameter).
#pragma once

#include <cstdint>

#include "fastweight/tensor.h"

namespace fastweight {

// [count]; a view of another rank is dense.
inline void flatten(TensorView& view) {
  if (!view.present() || view.rank == 1) return;
  int64_t count = 1;
  for (size_t axis = 0; axis < static_cast<size_t>(view.rank); ++axis) count *= view.shape[axis];
  view.rank = 1;
  view.shape = {count};
  view.strides = {1};
}

inline void as_heads_by_channels(TensorView& view, int64_t heads, int64_t channels) {
  if (!view.present() || view.rank == 2) return;
  flatten(view);
  const int64_t stride = view.strides[0];
  view.rank = 2;
  view.shape = {heads, channels};
  view.strides = {channels * stride, stride};
}

// A_log as [HV]; dt_bias as [HV], per channel as [HV, K].
inline void unify_parameters(TensorView& a_log, TensorView& dt_bias, bool per_channel, int64_t heads,
                             int64_t channels) {
  flatten(a_log);
  if (per_channel) {
    as_heads_by_channels(dt_bias, heads, channels);
  } else {
    flatten(dt_bias);
  }
}

}  // namespace fastweight
