// TTT-linear: a linear model z -> z h + c that is trained online, one gradient step per mini-batch of C tokens.
//
// For each sequence and head, with the state h a D x D matrix, the state bias c a row, rows q_t, k_t, v_t, and LN the
// layer norm over D entries without an affine part. With (h, c) the state at the start of a mini-batch, its token j has
//
//     z_j = k_j h + c
//     n_j = gradient of 1/2 |w * LN(z_j) + b - (v_j - k_j)|^2 with respect to z_j
//
// and its token i reads the state moved by its own step size eta_i over the gradients up to its own:
//
//     y_i = scale q_i (h - eta_i sum_{j<=i} k_j^T n_j) + (c - eta_i sum_{j<=i} n_j)
//     o_i = y_i + w * LN(y_i) + b
//
// The next mini-batch starts from (h - eta_C sum_j k_j^T n_j, c - eta_C sum_j n_j), the move with the step size of the
// last token. A mini-batch of L < C tokens at the end of a sequence is extended by tokens with q = k = v = 0: they
// leave h and every o alone, but each has a gradient n, which moves the final state bias by eta_L n. Cutting a sequence
// and carrying (h, c) over is therefore exact at multiples of C only.
//
// Sizes: B batch, T tokens, H heads, D head width (1 to 128), N sequences (B, or the count in cu_seqlens). State biases
// may be given as [N, H, 1, D] or [N, H, D].
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fastweight/context.h"
#include "fastweight/info.h"
#include "fastweight/tensor.h"

namespace fastweight {

struct TttLinearOptions {
  static constexpr double kUnset = std::numeric_limits<double>::infinity();

  double scale = kUnset;    // above 0; kUnset: D^-0.5
  int32_t mini_batch = 16;  // C: 16, 32 or 64
  double eps = 1e-6;        // at least 2^-126; LN divides by sqrt(variance + eps)
};

// The tensors that every entry point reads. Inputs may have any strides. q, k and v share one type (fp32, bf16, fp16,
// fp64); w, b, eta and the states may have any floating type. fp64 anywhere runs on the CPU's reference.
struct TttLinearInputs {
  TensorView q;                   // [B, T, H, D]
  TensorView k;                   // [B, T, H, D]
  TensorView v;                   // [B, T, H, D]
  TensorView w;                   // [H, D] weight of the inner and the outer layer norm
  TensorView b;                   // [H, D] bias of both
  TensorView eta;                 // [B, T, H] or [B, T, H, 1]; one number for all: strides of 0
  TensorView initial_state;       // [N, H, D, D]; absent: 0
  TensorView initial_state_bias;  // [N, H, 1, D]; absent: 0
  TensorView cu_seqlens;          // [N + 1] int32 or int64; absent: N = B sequences of T tokens; given: B = 1
};

struct TttLinearForward {
  TttLinearInputs in;
  TttLinearOptions options;

  TensorView o;                 // [B, T, H, D]; q's type or fp32
  TensorView final_state;       // [N, H, D, D] fp32; optional
  TensorView final_state_bias;  // [N, H, 1, D] fp32; optional
  TensorView kept;              // [B, NT, H, W] int32, dense, W from ttt_linear_kept_words and NT = ceil(T / C), or
                                // T / C + N with cu_seqlens; optional: the states before the mini-batches, for the
                                // backward
};

// Gradients of a loss whose gradient with respect to o and the final state is given. Every output is optional,
// and absent where its input is; each has the shape of its input and that input's type, or fp32.
struct TttLinearBackward {
  TttLinearInputs in;
  TttLinearOptions options;

  TensorView d_o;                 // [B, T, H, D], q's type or fp32; absent: 0
  TensorView d_final_state;       // [N, H, D, D]; absent: 0
  TensorView d_final_state_bias;  // [N, H, 1, D]; absent: 0
  TensorView kept;                // the forward's, of the same inputs: saves making it again. No bit depends on it

  TensorView dq, dk, dv, dw, db, deta;
  TensorView d_initial_state;       // [N, H, D, D] fp32; with initial_state only
  TensorView d_initial_state_bias;  // [N, H, 1, D] fp32; with initial_state_bias only
};

// Decoding: T tokens per sequence advance what is kept of it in place. Besides the state at the start of the open
// mini-batch these are the sums over the tokens of that mini-batch and their count. A token adds its n to the sums and
// reads the state moved by them; the token that fills the mini-batch also moves the state by eta times the sums and
// sets the sums and the count to 0. A sequence begins with everything 0, or with the final state of a forward over a
// multiple of C tokens and the rest 0. `in.initial_state` and `in.initial_state_bias` are absent.
//
// All five have one entry per slot and are read and written; slots = N without state_indices, and with them the slots
// that are not named are left alone, whatever they hold. Floating ones are fp32.
//
// On CUDA the contents of state_indices, position and cu_seqlens stay on the device: slots that do not exist are
// skipped like -1, positions are clamped to 0 .. C - 1 and offsets to the tokens that exist. That no two sequences name
// one slot is checked on the CPU, and on CUDA the caller's promise: they would write the same slot at once, and what it
// then holds is undefined.
struct TttLinearStep {
  TttLinearInputs in;
  TttLinearOptions options;

  TensorView state;          // [slots, H, D, D] h at the start of the open mini-batch
  TensorView state_bias;     // [slots, H, 1, D] c at the start of the open mini-batch
  TensorView gradient;       // [slots, H, D, D] sum of k_j^T n_j over its tokens so far
  TensorView gradient_bias;  // [slots, H, 1, D] sum of n_j over its tokens so far
  TensorView position;       // [slots] int32: how many tokens these are, 0 to C - 1
  TensorView state_indices;  // [N] int32 or int64: the slot of each sequence, -1: skip it (its o is 0). Optional
  TensorView o;              // [B, T, H, D]
};

// Each returns the name of the implementation that ran.
std::string ttt_linear_forward(const Context& context, const TttLinearForward& args);
std::string ttt_linear_backward(const Context& context, const TttLinearBackward& args);
std::string ttt_linear_step(const Context& context, const TttLinearStep& args);

// W of `kept` for q, k and v of a type and heads of D channels on the context's device; 0 where nothing can be kept.
int64_t ttt_linear_kept_words(const Context& context, const TttLinearOptions& options, DType dtype, int64_t head_dim);

// What the library holds for this family, most special first.
std::vector<ImplementationInfo> ttt_linear_implementations();

}  // namespace fastweight
