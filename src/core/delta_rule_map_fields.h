// The tables of the structs of the delta rule's segment maps.
#pragma once

#include "core/delta_rule_fields.h"
#include "fastweight/delta_rule_map.h"

namespace fastweight {

template <class S>
inline constexpr auto kTensors<DeltaRuleMapForward, S> = std::to_array<TensorField<S>>({
    {"m", Use::kWritesState, &S::m},
    {"h", Use::kWritesState, &S::h},
});

template <class S>
inline constexpr auto kTensors<DeltaRuleMapBackward, S> = std::to_array<TensorField<S>>({
    {"d_o", Use::kMayRead, &S::d_o},
    {"d_final_state", Use::kMayRead, &S::d_final_state},
    {"mt", Use::kWritesState, &S::mt},
    {"e", Use::kWritesState, &S::e},
});

}  // namespace fastweight
