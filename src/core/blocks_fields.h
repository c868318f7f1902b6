// The tables of the building blocks' structs. A backward has the gradients of its outputs first, as the other families.
#pragma once

#include "core/fields.h"
#include "fastweight/blocks.h"

namespace fastweight {

template <class S>
inline constexpr auto kTensors<ChunkLocalCumsum, S> = std::to_array<TensorField<S>>({
    {"x", Use::kReads, &S::x},
    {"cu_seqlens", Use::kMayRead, &S::cu_seqlens},
    {"y", Use::kWrites, &S::y},
});

template <class S>
inline constexpr auto kOptions<ChunkLocalCumsum, S> = std::make_tuple(option("chunk_size", &S::chunk_size),
                                                                      option("reverse", &S::reverse));

template <class S>
inline constexpr auto kTensors<ScaledDotKktInputs, S> = std::to_array<TensorField<S>>({
    {"k", Use::kReads, &S::k},
    {"beta", Use::kMayRead, &S::beta},
    {"gamma", Use::kMayRead, &S::gamma},
    {"cu_seqlens", Use::kMayRead, &S::cu_seqlens},
});

template <class S>
inline constexpr auto kTensors<ScaledDotKktForward, S> = std::to_array<TensorField<S>>({
    {"a", Use::kWrites, &S::a},
});

template <class S>
inline constexpr auto kTensors<ScaledDotKktBackward, S> = std::to_array<TensorField<S>>({
    {"da", Use::kReads, &S::da},
    {"dk", Use::kWrites, &S::dk, "k"},
    {"dbeta", Use::kWrites, &S::dbeta, "beta"},
    {"dgamma", Use::kWrites, &S::dgamma, "gamma"},
});

template <class S>
inline constexpr auto kTensors<SolveTrilForward, S> = std::to_array<TensorField<S>>({
    {"a", Use::kReads, &S::a},
    {"cu_seqlens", Use::kMayRead, &S::cu_seqlens},
    {"j", Use::kWrites, &S::j},
});

template <class S>
inline constexpr auto kTensors<SolveTrilBackward, S> = std::to_array<TensorField<S>>({
    {"dj", Use::kReads, &S::dj},
    {"j", Use::kReads, &S::j},
    {"cu_seqlens", Use::kMayRead, &S::cu_seqlens},
    {"da", Use::kWrites, &S::da},
});

template <class S>
inline constexpr auto kTensors<WyInputs, S> = std::to_array<TensorField<S>>({
    {"k", Use::kReads, &S::k},
    {"v", Use::kReads, &S::v},
    {"beta", Use::kMayRead, &S::beta},
    {"gamma", Use::kMayRead, &S::gamma},
    {"j", Use::kReads, &S::j},
    {"cu_seqlens", Use::kMayRead, &S::cu_seqlens},
});

template <class S>
inline constexpr auto kTensors<WyForward, S> = std::to_array<TensorField<S>>({
    {"w", Use::kWrites, &S::w},
    {"u", Use::kWrites, &S::u},
});

template <class S>
inline constexpr auto kTensors<WyBackward, S> = std::to_array<TensorField<S>>({
    {"dw", Use::kMayRead, &S::dw},
    {"du", Use::kMayRead, &S::du},
    {"dk", Use::kWrites, &S::dk, "k"},
    {"dv", Use::kWrites, &S::dv, "v"},
    {"dbeta", Use::kWrites, &S::dbeta, "beta"},
    {"dgamma", Use::kWrites, &S::dgamma, "gamma"},
    {"da", Use::kWrites, &S::da},
});

template <class S>
inline constexpr auto kTensors<L2NormForward, S> = std::to_array<TensorField<S>>({
    {"x", Use::kReads, &S::x},
    {"y", Use::kWrites, &S::y},
    {"rstd", Use::kWrites, &S::rstd},
});

template <class S>
inline constexpr auto kOptions<L2NormForward, S> = std::make_tuple(option("eps", &S::eps));

template <class S>
inline constexpr auto kTensors<L2NormBackward, S> = std::to_array<TensorField<S>>({
    {"dy", Use::kReads, &S::dy},
    {"y", Use::kReads, &S::y},
    {"rstd", Use::kReads, &S::rstd},
    {"dx", Use::kWrites, &S::dx},
});

template <class S>
inline constexpr auto kTensors<GateActivationInputs, S> = std::to_array<TensorField<S>>({
    {"x", Use::kReads, &S::x},
    {"a_log", Use::kMayRead, &S::a_log},
    {"dt_bias", Use::kMayRead, &S::dt_bias},
    {"cu_seqlens", Use::kMayRead, &S::cu_seqlens},
});

template <class S>
inline constexpr auto kTensors<GateActivationForward, S> = std::to_array<TensorField<S>>({
    {"g", Use::kWrites, &S::g},
});

template <class S>
inline constexpr auto kTensors<GateActivationBackward, S> = std::to_array<TensorField<S>>({
    {"dg", Use::kReads, &S::dg},
    {"dx", Use::kWrites, &S::dx, "x"},
    {"da_log", Use::kWrites, &S::da_log, "a_log"},
    {"ddt_bias", Use::kWrites, &S::ddt_bias, "dt_bias"},
});

template <class S>
inline constexpr auto kOptions<GateActivationOptions, S> = std::make_tuple(option("lower_bound", &S::lower_bound),
                                                                           option("chunk_size", &S::chunk_size));

template <class S>
inline constexpr auto kTensors<RmsNormInputs, S> = std::to_array<TensorField<S>>({
    {"x", Use::kReads, &S::x},
    {"gate", Use::kMayRead, &S::gate},
    {"weight", Use::kMayRead, &S::weight},
});

template <class S>
inline constexpr auto kOptions<RmsNormOptions, S> = std::make_tuple(option("eps", &S::eps),
                                                                    option("activation", &S::activation));

template <class S>
inline constexpr auto kTensors<RmsNormForward, S> = std::to_array<TensorField<S>>({
    {"y", Use::kWrites, &S::y},
});

template <class S>
inline constexpr auto kTensors<RmsNormBackward, S> = std::to_array<TensorField<S>>({
    {"dy", Use::kReads, &S::dy},
    {"dx", Use::kWrites, &S::dx, "x"},
    {"dgate", Use::kWrites, &S::dgate, "gate"},
    {"dweight", Use::kWrites, &S::dweight, "weight"},
});

}  // namespace fastweight
