// The delta-rule family: DeltaNet, Gated DeltaNet (GDN) and Kimi Delta Attention (KDA).
//
// For each sequence and value head, with the state S a K x V matrix and rows q_t, k_t, v_t:
//
//     Sd_t = diag(exp(g_t)) S_{t-1}          g_t: nothing, one number, or one per key channel
//     u_t  = beta_t (v_t - k_t Sd_t)
//     S_t  = Sd_t + k_t^T u_t
//     o_t  = scale q_t S_t
//
// Sizes: B batch, T tokens, H query/key heads, HV value heads (HV = H * group; value head h reads q/k head h / group),
// K and V head widths (K up to 256, V of any width; on CUDA up to 256), N sequences (B, or the count in cu_seqlens), C chunk size, NT chunks.
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

struct DeltaRuleOptions {
  static constexpr double kUnset = std::numeric_limits<double>::infinity();

  Gate gate = Gate::kNone;  // none: DeltaNet, per head: GDN, per channel: KDA
  double scale = kUnset;    // kUnset: K^-0.5
  // 16, 32 or 64: where the chunk-start states stand and where a sequence may be cut without changing a bit (long ones on
  // Hopper: see Context::segment_chunks). On CUDA 16-bit problems are computed in tiles of 64 rows per chunk: smaller
  // chunks fill their tiles less and cost more.
  int32_t chunk_size = 64;
  bool state_v_first = false;  // every state tensor is [.., V, K] instead of [.., K, V]
  bool qk_l2norm = false;      // q and k become x / sqrt(sum x^2 + 1e-6)

  bool beta_sigmoid = false;      // beta holds logits x: beta = sigmoid(x)
  bool allow_neg_eigval = false;  // with beta_sigmoid: beta = 2 sigmoid(x)

  // The gate tensor holds raw values x: g = -exp(A_log) softplus(x + dt_bias), or, per channel with a lower bound,
  // g = lower_bound * sigmoid(exp(A_log) (x + dt_bias)).
  bool gate_in_kernel = false;
  double lower_bound = kUnset;  // kUnset: none
  bool safe_gate = false;       // per channel: the caller promises g >= -5 (checked for lower_bound). No kernel uses it

  // Of a call with some of the value heads of a larger problem, whole groups of them: how many that one has. A backward
  // on the CPU cuts its sums over value columns by the number of heads; with this it has the bits of the larger problem.
  // 0: the call is the problem.
  int32_t total_value_heads = 0;
};

// On CUDA the contents of cu_seqlens and state_indices stay on the device, and no call waits for it: offsets are
// clamped to the tokens that exist and slots that do not exist are skipped like -1, so that malformed contents give
// useless results but touch nothing outside the tensors. Tokens after the last offset are left alone. A call that was
// captured in a CUDA graph may be replayed with other contents of all its tensors, lengths among them. That no two
// sequences of a step name one slot is checked on the CPU, and on CUDA the caller's promise: they would write the same
// state at once, and what it then holds is undefined.

// The tensors that every entry point reads. Inputs may have any strides. q, k and v share one type (fp32, bf16, fp16,
// fp64); g, beta, the states and parameters may have any floating type. fp64 anywhere runs on the CPU's
// reference.
struct DeltaRuleInputs {
  TensorView q;              // [B, T, H, K]
  TensorView k;              // [B, T, H, K]
  TensorView v;              // [B, T, HV, V]
  TensorView g;              // per head [B, T, HV]; per channel [B, T, HV, K]; absent without a gate
  TensorView beta;           // [B, T, HV], or [B, T, HV, V] in the recurrent form; absent: 1
  TensorView a_log;          // [HV]; with gate_in_kernel (optional with a lower bound)
  TensorView dt_bias;        // [HV] per head, [HV * K] or [HV, K] per channel; optional, with gate_in_kernel
  TensorView initial_state;  // [N, HV, K, V]; absent: 0
  TensorView cu_seqlens;     // [N + 1] int32 or int64; absent: N = B sequences of T tokens; given: B = 1
};

struct DeltaRuleForward {
  DeltaRuleInputs in;
  DeltaRuleOptions options;

  TensorView o;             // [B, T, HV, V]; q's type or fp32
  TensorView final_state;   // [N, HV, K, V] fp32; optional
  TensorView chunk_states;  // [B, NT, HV, K, V], the state before every chunk; optional. fp32, or k's type. With
                            // cu_seqlens on CUDA any NT up to delta_rule_num_chunks; chunks from NT on are not written
  TensorView kept;  // [B, NT, HV, W] int32, dense, at a multiple of 16 bytes, NT from delta_rule_num_chunks and W from
                    // delta_rule_kept_words; optional: what was made of the chunks, for the backward
};

// Gradients of a loss whose gradient with respect to o and the final state is given. Every output is optional,
// and absent where its input is; each has the shape of its input and that input's type, or fp32.
struct DeltaRuleBackward {
  DeltaRuleInputs in;
  DeltaRuleOptions options;

  TensorView d_o;            // [B, T, HV, V], q's type or fp32; absent: 0
  TensorView d_final_state;  // [N, HV, K, V]; absent: 0
  TensorView chunk_states;   // the forward's: saves recomputing the states. fp32, or k's type, whose rounding shows in
                             // the gradients. Absent: the states are recomputed
  TensorView kept;           // the forward's, of the same inputs: saves making it again. No bit depends on it

  TensorView dq, dk, dv, dg, dbeta, da_log, ddt_bias;
  TensorView d_initial_state;  // [N, HV, K, V] fp32; with initial_state only
};

// Decoding: T tokens per sequence advance states in place. `in.initial_state` is absent.
struct DeltaRuleStep {
  DeltaRuleInputs in;
  DeltaRuleOptions options;

  TensorView state;          // [slots, HV, K, V] fp32 or bf16, read and written; slots = N without state_indices
  TensorView state_indices;  // [N] int32 or int64: the slot of each sequence, -1: skip it (its o is 0). Optional
  TensorView o;              // [B, T, HV, V]
};

// Each returns the name of the implementation that ran.
std::string delta_rule_forward(const Context& context, const DeltaRuleForward& args);
std::string delta_rule_backward(const Context& context, const DeltaRuleBackward& args);
std::string delta_rule_step(const Context& context, const DeltaRuleStep& args);

// The number of chunks NT along axis 1 of chunk_states: ceil(T / C), or the sum over the sequences of cu_seqlens. With
// cu_seqlens on CUDA, whose contents are not read: the most that there can be.
int64_t delta_rule_num_chunks(int64_t tokens, const TensorView& cu_seqlens, int32_t chunk_size);

// W of `kept` for q, k and v of a type and keys of K channels on the context's device; 0 where nothing can be kept. With decays
// per channel most of it are keys that have their decays: not `all`, and the backward makes these again.
int64_t delta_rule_kept_words(const Context& context, const DeltaRuleOptions& options, DType dtype, int64_t head_dim_k,
                              bool all = true);

// What the library holds for this family, most special first.
std::vector<ImplementationInfo> delta_rule_implementations();

}  // namespace fastweight
