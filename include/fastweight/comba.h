// Comba: a delta rule that predicts from the state before its decay, with a key of its own.
//
// For each sequence and head, with the state S a K x V matrix and rows q_t, k_t, p_t, v_t:
//
//     u_t = beta_t (v_t - p_t S_{t-1})
//     S_t = exp(g_t) S_{t-1} + k_t^T u_t
//     o_t = scale q_t S_t
//
// p_t = exp(g_t) k_t gives the gated delta rule.
//
// Sizes: B batch, T tokens, H heads, HV value heads (a multiple of H: value head h uses the q, k and p of head h / (HV / H)),
// K and V head widths (K up to 256, V of any width; on CUDA up to 256), N sequences (B, or the count in cu_seqlens), C chunk
// size, NT chunks (delta_rule_num_chunks). On the CPU alone so far.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fastweight/context.h"
#include "fastweight/info.h"
#include "fastweight/tensor.h"

namespace fastweight {

struct CombaOptions {
  static constexpr double kUnset = std::numeric_limits<double>::infinity();

  double scale = kUnset;       // kUnset: K^-0.5
  int32_t chunk_size = 64;     // 16, 32 or 64: where the chunk-start states stand
  bool state_v_first = false;  // every state tensor is [.., V, K] instead of [.., K, V]
  bool qk_l2norm = false;      // q, k and p become x / sqrt(sum x^2 + 1e-6)
};

// The tensors that every entry point reads. Inputs may have any strides. q, k, v and p share one type (fp32, bf16, fp16,
// fp64); g, beta and the states may have any floating type. fp64 anywhere runs on the reference.
struct CombaInputs {
  TensorView q;              // [B, T, H, K]
  TensorView k;              // [B, T, H, K]
  TensorView v;              // [B, T, HV, V]
  TensorView p;              // [B, T, H, K]; absent: k, whose gradient then is the sum of both
  TensorView g;              // [B, T, HV], the logarithm of the decay
  TensorView beta;           // [B, T, HV], or [B, T, HV, V]: no chunk form; absent: 1
  TensorView initial_state;  // [N, HV, K, V]; absent: 0
  TensorView cu_seqlens;     // [N + 1] int32 or int64; absent: N = B sequences of T tokens; given: B = 1
};

struct CombaForward {
  CombaInputs in;
  CombaOptions options;

  TensorView o;             // [B, T, HV, V]; q's type or fp32
  TensorView final_state;   // [N, HV, K, V] fp32; optional
  TensorView chunk_states;  // [B, NT, HV, K, V], the state before every chunk; optional. fp32, or k's type
};

// Gradients of a loss whose gradient with respect to o and the final state is given. Every output is optional,
// and absent where its input is; each has the shape of its input and that input's type, or fp32.
struct CombaBackward {
  CombaInputs in;
  CombaOptions options;

  TensorView d_o;            // [B, T, HV, V], q's type or fp32; absent: 0
  TensorView d_final_state;  // [N, HV, K, V]; absent: 0
  TensorView chunk_states;   // the forward's, fp32 or k's type: saves recomputing the states. Absent: recomputed

  TensorView dq, dk, dv, dp, dg, dbeta;
  TensorView d_initial_state;  // [N, HV, K, V] fp32; with initial_state only
};

// Decoding: T tokens per sequence advance states in place. `in.initial_state` is absent.
struct CombaStep {
  CombaInputs in;
  CombaOptions options;

  TensorView state;          // [slots, HV, K, V] fp32 or bf16, read and written; slots = N without state_indices
  TensorView state_indices;  // [N] int32 or int64: the slot of each sequence, -1: skip it (its o is 0). Optional
  TensorView o;              // [B, T, HV, V]
};

// Each returns the name of the implementation that ran.
std::string comba_forward(const Context& context, const CombaForward& args);
std::string comba_backward(const Context& context, const CombaBackward& args);
std::string comba_step(const Context& context, const CombaStep& args);

// What the library holds for this family, most special first.
std::vector<ImplementationInfo> comba_implementations();

}  // namespace fastweight
