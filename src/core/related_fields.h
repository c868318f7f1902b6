// The tables of the families related to the delta rule.
#pragma once

#include "core/fields.h"
#include "fastweight/comba.h"
#include "fastweight/dplr.h"
#include "fastweight/gla.h"

namespace fastweight {

// Gated linear attention ----------------------------------------------------------------------------------------------

template <class S>
inline constexpr auto kTensors<GlaInputs, S> = std::to_array<TensorField<S>>({
    {"q", Use::kReads, &S::q},
    {"k", Use::kReads, &S::k},
    {"v", Use::kReads, &S::v},
    {"g", Use::kMayRead, &S::g},
    {"initial_state", Use::kMayRead, &S::initial_state},
    {"g_gamma", Use::kMayRead, &S::g_gamma},  // has no gradient: stands behind those that have
    {"cu_seqlens", Use::kMayRead, &S::cu_seqlens},
});

template <class S>
inline constexpr auto kTensors<GlaForward, S> = std::to_array<TensorField<S>>({
    {"o", Use::kWrites, &S::o},
    {"final_state", Use::kWritesState, &S::final_state},
    {"chunk_states", Use::kWritesState, &S::chunk_states},
});

template <class S>
inline constexpr auto kTensors<GlaBackward, S> = std::to_array<TensorField<S>>({
    {"d_o", Use::kMayRead, &S::d_o},
    {"d_final_state", Use::kMayRead, &S::d_final_state},
    {"chunk_states", Use::kMayRead, &S::chunk_states},
    {"dq", Use::kWrites, &S::dq, "q"},
    {"dk", Use::kWrites, &S::dk, "k"},
    {"dv", Use::kWrites, &S::dv, "v"},
    {"dg", Use::kWrites, &S::dg, "g"},
    {"d_initial_state", Use::kWritesState, &S::d_initial_state, "initial_state"},
});

template <class S>
inline constexpr auto kTensors<GlaStep, S> = std::to_array<TensorField<S>>({
    {"state", Use::kUpdates, &S::state},
    {"state_indices", Use::kMayRead, &S::state_indices},
    {"o", Use::kWrites, &S::o},
});

template <class S>
inline constexpr auto kOptions<GlaOptions, S> = std::make_tuple(option("gate", &S::gate), option("scale", &S::scale),
                                                                option("chunk_size", &S::chunk_size),
                                                                option("state_v_first", &S::state_v_first));

// Comba ---------------------------------------------------------------------------------------------------------------

template <class S>
inline constexpr auto kTensors<CombaInputs, S> = std::to_array<TensorField<S>>({
    {"q", Use::kReads, &S::q},
    {"k", Use::kReads, &S::k},
    {"v", Use::kReads, &S::v},
    {"p", Use::kMayRead, &S::p},
    {"g", Use::kReads, &S::g},
    {"beta", Use::kMayRead, &S::beta},
    {"initial_state", Use::kMayRead, &S::initial_state},
    {"cu_seqlens", Use::kMayRead, &S::cu_seqlens},
});

template <class S>
inline constexpr auto kTensors<CombaForward, S> = std::to_array<TensorField<S>>({
    {"o", Use::kWrites, &S::o},
    {"final_state", Use::kWritesState, &S::final_state},
    {"chunk_states", Use::kWritesState, &S::chunk_states},
});

template <class S>
inline constexpr auto kTensors<CombaBackward, S> = std::to_array<TensorField<S>>({
    {"d_o", Use::kMayRead, &S::d_o},
    {"d_final_state", Use::kMayRead, &S::d_final_state},
    {"chunk_states", Use::kMayRead, &S::chunk_states},
    {"dq", Use::kWrites, &S::dq, "q"},
    {"dk", Use::kWrites, &S::dk, "k"},
    {"dv", Use::kWrites, &S::dv, "v"},
    {"dp", Use::kWrites, &S::dp, "p"},
    {"dg", Use::kWrites, &S::dg, "g"},
    {"dbeta", Use::kWrites, &S::dbeta, "beta"},
    {"d_initial_state", Use::kWritesState, &S::d_initial_state, "initial_state"},
});

template <class S>
inline constexpr auto kTensors<CombaStep, S> = std::to_array<TensorField<S>>({
    {"state", Use::kUpdates, &S::state},
    {"state_indices", Use::kMayRead, &S::state_indices},
    {"o", Use::kWrites, &S::o},
});

template <class S>
inline constexpr auto kOptions<CombaOptions, S> = std::make_tuple(option("scale", &S::scale),
                                                                  option("chunk_size", &S::chunk_size),
                                                                  option("state_v_first", &S::state_v_first),
                                                                  option("qk_l2norm", &S::qk_l2norm));

// DPLR and IPLR -------------------------------------------------------------------------------------------------------

template <class S>
inline constexpr auto kTensors<DplrInputs, S> = std::to_array<TensorField<S>>({
    {"q", Use::kReads, &S::q},
    {"k", Use::kReads, &S::k},
    {"v", Use::kReads, &S::v},
    {"a", Use::kReads, &S::a},
    {"b", Use::kReads, &S::b},
    {"g", Use::kMayRead, &S::g},
    {"initial_state", Use::kMayRead, &S::initial_state},
    {"cu_seqlens", Use::kMayRead, &S::cu_seqlens},
});

template <class S>
inline constexpr auto kTensors<DplrForward, S> = std::to_array<TensorField<S>>({
    {"o", Use::kWrites, &S::o},
    {"final_state", Use::kWritesState, &S::final_state},
    {"chunk_states", Use::kWritesState, &S::chunk_states},
});

template <class S>
inline constexpr auto kTensors<DplrBackward, S> = std::to_array<TensorField<S>>({
    {"d_o", Use::kMayRead, &S::d_o},
    {"d_final_state", Use::kMayRead, &S::d_final_state},
    {"chunk_states", Use::kMayRead, &S::chunk_states},
    {"dq", Use::kWrites, &S::dq, "q"},
    {"dk", Use::kWrites, &S::dk, "k"},
    {"dv", Use::kWrites, &S::dv, "v"},
    {"da", Use::kWrites, &S::da, "a"},
    {"db", Use::kWrites, &S::db, "b"},
    {"dg", Use::kWrites, &S::dg, "g"},
    {"d_initial_state", Use::kWritesState, &S::d_initial_state, "initial_state"},
});

template <class S>
inline constexpr auto kTensors<DplrStep, S> = std::to_array<TensorField<S>>({
    {"state", Use::kUpdates, &S::state},
    {"state_indices", Use::kMayRead, &S::state_indices},
    {"o", Use::kWrites, &S::o},
});

template <class S>
inline constexpr auto kOptions<DplrOptions, S> = std::make_tuple(option("gate", &S::gate), option("scale", &S::scale),
                                                                 option("chunk_size", &S::chunk_size),
                                                                 option("state_v_first", &S::state_v_first));

}  // namespace fastweight
