// The tables of the delta rule's structs.
#pragma once

#include "core/fields.h"
#include "fastweight/delta_rule.h"

namespace fastweight {

template <class S>
inline constexpr auto kTensors<DeltaRuleInputs, S> = std::to_array<TensorField<S>>({
    {"q", Use::kReads, &S::q},
    {"k", Use::kReads, &S::k},
    {"v", Use::kReads, &S::v},
    {"g", Use::kMayRead, &S::g},
    {"beta", Use::kMayRead, &S::beta},
    {"a_log", Use::kMayRead, &S::a_log},
    {"dt_bias", Use::kMayRead, &S::dt_bias},
    {"initial_state", Use::kMayRead, &S::initial_state},
    {"cu_seqlens", Use::kMayRead, &S::cu_seqlens},
});

template <class S>
inline constexpr auto kTensors<DeltaRuleForward, S> = std::to_array<TensorField<S>>({
    {"o", Use::kWrites, &S::o},
    {"final_state", Use::kWritesState, &S::final_state},
    {"chunk_states", Use::kWritesState, &S::chunk_states},
    {"kept", Use::kWritesState, &S::kept},
});

template <class S>
inline constexpr auto kTensors<DeltaRuleBackward, S> = std::to_array<TensorField<S>>({
    {"d_o", Use::kMayRead, &S::d_o},
    {"d_final_state", Use::kMayRead, &S::d_final_state},
    {"chunk_states", Use::kMayRead, &S::chunk_states},
    {"kept", Use::kMayRead, &S::kept},
    {"dq", Use::kWrites, &S::dq, "q"},
    {"dk", Use::kWrites, &S::dk, "k"},
    {"dv", Use::kWrites, &S::dv, "v"},
    {"dg", Use::kWrites, &S::dg, "g"},
    {"dbeta", Use::kWrites, &S::dbeta, "beta"},
    {"da_log", Use::kWrites, &S::da_log, "a_log"},
    {"ddt_bias", Use::kWrites, &S::ddt_bias, "dt_bias"},
    {"d_initial_state", Use::kWritesState, &S::d_initial_state, "initial_state"},
});

template <class S>
inline constexpr auto kTensors<DeltaRuleStep, S> = std::to_array<TensorField<S>>({
    {"state", Use::kUpdates, &S::state},
    {"state_indices", Use::kMayRead, &S::state_indices},
    {"o", Use::kWrites, &S::o},
});

template <class S>
inline constexpr auto kOptions<DeltaRuleOptions, S> =
    std::make_tuple(option("gate", &S::gate), option("scale", &S::scale), option("chunk_size", &S::chunk_size),
                    option("state_v_first", &S::state_v_first), option("qk_l2norm", &S::qk_l2norm),
                    option("beta_sigmoid", &S::beta_sigmoid), option("allow_neg_eigval", &S::allow_neg_eigval),
                    option("gate_in_kernel", &S::gate_in_kernel), option("lower_bound", &S::lower_bound),
                    option("safe_gate", &S::safe_gate), option("total_value_heads", &S::total_value_heads));

}  // namespace fastweight
