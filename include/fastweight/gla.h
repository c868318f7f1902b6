// Gated linear attention (GLA), simple GLA and plain linear attention: the delta rule's recurrence without a
// correction.
//
// For each sequence and head, with the state S a K x V matrix and rows q_t, k_t, v_t:
//
//     S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t     g_t: nothing, one number (simple GLA), or one per key channel (GLA)
//     o_t = scale q_t S_t
//
// Sizes: B batch, T tokens, H heads, K and V head widths (K up to 256, V of any width; on CUDA up to 256), N sequences (B, or the count in cu_seqlens),
// C chunk size, NT chunks (delta_rule_num_chunks). On the CPU alone so far.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fastweight/context.h"
#include "fastweight/gate.h"
#include "fastweight/info.h"
#include "fastweight/tensor.h"

namespace fastweight {

struct GlaOptions {
  static constexpr double kUnset = std::numeric_limits<double>::infinity();

  Gate gate = Gate::kNone;     // none: linear attention, per head: simple GLA, per channel: GLA
  double scale = kUnset;       // kUnset: K^-0.5
  int32_t chunk_size = 64;     // 16, 32 or 64: where the chunk-start states stand
  bool state_v_first = false;  // every state tensor is [.., V, K] instead of [.., K, V]
};

// The tensors that every entry point reads. Inputs may have any strides. q, k and v share one type (fp32, bf16, fp16,
// fp64); g, g_gamma and the states may have any floating type. fp64 anywhere runs on the reference.
struct GlaInputs {
  TensorView q;              // [B, T, H, K]
  TensorView k;              // [B, T, H, K]
  TensorView v;              // [B, T, H, V]
  TensorView g;              // per head [B, T, H]; per channel [B, T, H, K]; absent without a gate
  TensorView g_gamma;        // [H]: with a gate per head in place of g, a log decay that all tokens of a head share
  TensorView initial_state;  // [N, H, K, V]; absent: 0
  TensorView cu_seqlens;     // [N + 1] int32 or int64; absent: N = B sequences of T tokens; given: B = 1
};

struct GlaForward {
  GlaInputs in;
  GlaOptions options;

  TensorView o;             // [B, T, H, V]; q's type or fp32
  TensorView final_state;   // [N, H, K, V] fp32; optional
  TensorView chunk_states;  // [B, NT, H, K, V], the state before every chunk; optional. fp32, or k's type
};

// Gradients of a loss whose gradient with respect to o and the final state is given. Every output is optional,
// and absent where its input is; each has the shape of its input and that input's type, or fp32. g_gamma has none.
struct GlaBackward {
  GlaInputs in;
  GlaOptions options;

  TensorView d_o;            // [B, T, H, V], q's type or fp32; absent: 0
  TensorView d_final_state;  // [N, H, K, V]; absent: 0
  TensorView chunk_states;   // the forward's, fp32 or k's type: saves recomputing the states. Absent: recomputed

  TensorView dq, dk, dv, dg;
  TensorView d_initial_state;  // [N, H, K, V] fp32; with initial_state only
};

// Decoding: T tokens per sequence advance states in place. `in.initial_state` is absent.
struct GlaStep {
  GlaInputs in;
  GlaOptions options;

  TensorView state;          // [slots, H, K, V] fp32 or bf16, read and written; slots = N without state_indices
  TensorView state_indices;  // [N] int32 or int64: the slot of each sequence, -1: skip it (its o is 0). Optional
  TensorView o;              // [B, T, H, V]
};

// Each returns the name of the implementation that ran.
std::string gla_forward(const Context& context, const GlaForward& args);
std::string gla_backward(const Context& context, const GlaBackward& args);
std::string gla_step(const Context& context, const GlaStep& args);

// What the library holds for this family, most special first.
std::vector<ImplementationInfo> gla_implementations();

}  // namespace fastweight
