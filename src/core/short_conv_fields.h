// The tables of the short convolution's structs.
#pragma once

#include "core/fields.h"
#include "fastweight/short_conv.h"

namespace fastweight {

template <class S>
inline constexpr auto kTensors<ShortConvInputs, S> = std::to_array<TensorField<S>>({
    {"x", Use::kReads, &S::x},
    {"w", Use::kReads, &S::w},
    {"bias", Use::kMayRead, &S::bias},
    {"initial_state", Use::kMayRead, &S::initial_state},
    {"cu_seqlens", Use::kMayRead, &S::cu_seqlens},
});

template <class S>
inline constexpr auto kTensors<ShortConvForward, S> = std::to_array<TensorField<S>>({
    {"residual", Use::kMayRead, &S::residual},
    {"y", Use::kWrites, &S::y},
    {"final_state", Use::kWrites, &S::final_state},
});

template <class S>
inline constexpr auto kTensors<ShortConvBackward, S> = std::to_array<TensorField<S>>({
    {"dy", Use::kMayRead, &S::dy},
    {"d_final_state", Use::kMayRead, &S::d_final_state},
    {"dx", Use::kWrites, &S::dx, "x"},
    {"dw", Use::kWrites, &S::dw, "w"},
    {"dbias", Use::kWrites, &S::dbias, "bias"},
    {"d_initial_state", Use::kWrites, &S::d_initial_state, "initial_state"},
});

template <class S>
inline constexpr auto kTensors<ShortConvStep, S> = std::to_array<TensorField<S>>({
    {"residual", Use::kMayRead, &S::residual},
    {"state", Use::kUpdates, &S::state},
    {"state_indices", Use::kMayRead, &S::state_indices},
    {"y", Use::kWrites, &S::y},
});

template <class S>
inline constexpr auto kOptions<ShortConvOptions, S> = std::make_tuple(option("activation", &S::activation));

}  // namespace fastweight
