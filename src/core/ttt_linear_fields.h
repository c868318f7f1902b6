// The tables of TTT-Linear's structs.
#pragma once

#include "core/fields.h"
#include "fastweight/ttt_linear.h"

namespace fastweight {

template <class S>
inline constexpr auto kTensors<TttLinearInputs, S> = std::to_array<TensorField<S>>({
    {"q", Use::kReads, &S::q},
    {"k", Use::kReads, &S::k},
    {"v", Use::kReads, &S::v},
    {"w", Use::kReads, &S::w},
    {"b", Use::kReads, &S::b},
    {"eta", Use::kReads, &S::eta},
    {"initial_state", Use::kMayRead, &S::initial_state},
    {"initial_state_bias", Use::kMayRead, &S::initial_state_bias},
    {"cu_seqlens", Use::kMayRead, &S::cu_seqlens},
});

template <class S>
inline constexpr auto kTensors<TttLinearForward, S> = std::to_array<TensorField<S>>({
    {"o", Use::kWrites, &S::o},
    {"final_state", Use::kWritesState, &S::final_state},
    {"final_state_bias", Use::kWritesState, &S::final_state_bias},
    {"kept", Use::kWritesState, &S::kept},
});

template <class S>
inline constexpr auto kTensors<TttLinearBackward, S> = std::to_array<TensorField<S>>({
    {"d_o", Use::kMayRead, &S::d_o},
    {"d_final_state", Use::kMayRead, &S::d_final_state},
    {"d_final_state_bias", Use::kMayRead, &S::d_final_state_bias},
    {"kept", Use::kMayRead, &S::kept},
    {"dq", Use::kWrites, &S::dq, "q"},
    {"dk", Use::kWrites, &S::dk, "k"},
    {"dv", Use::kWrites, &S::dv, "v"},
    {"dw", Use::kWrites, &S::dw, "w"},
    {"db", Use::kWrites, &S::db, "b"},
    {"deta", Use::kWrites, &S::deta, "eta"},
    {"d_initial_state", Use::kWritesState, &S::d_initial_state, "initial_state"},
    {"d_initial_state_bias", Use::kWritesState, &S::d_initial_state_bias, "initial_state_bias"},
});

template <class S>
inline constexpr auto kTensors<TttLinearStep, S> = std::to_array<TensorField<S>>({
    {"state", Use::kUpdates, &S::state},
    {"state_bias", Use::kUpdates, &S::state_bias},
    {"gradient", Use::kUpdates, &S::gradient},
    {"gradient_bias", Use::kUpdates, &S::gradient_bias},
    {"position", Use::kUpdates, &S::position},
    {"state_indices", Use::kMayRead, &S::state_indices},
    {"o", Use::kWrites, &S::o},
});

template <class S>
inline constexpr auto kOptions<TttLinearOptions, S> = std::make_tuple(option("scale", &S::scale),
                                                                      option("eps", &S::eps),
                                                                      option("mini_batch", &S::mini_batch));

}  // namespace fastweight
