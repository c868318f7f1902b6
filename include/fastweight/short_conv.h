// Short causal convolution: each channel is filtered on its own over the last W tokens.
//
// For each sequence and channel, with x_s before the start of the sequence taken from the initial state (absent: 0):
//
//     z_t = bias + sum_{i=0..W-1} w_i x_{t-W+1+i}          w_{W-1} meets the current token
//     y_t = act(z_t) + residual_t                           act: nothing, or silu(z) = z / (1 + exp(-z))
//
// A state holds the last W inputs of a sequence, oldest first. The oldest one never reaches an output.
//
// Sizes: B batch, T tokens, D channels, W width of the filter (1 to 16), N sequences (B, or the count in cu_seqlens).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fastweight/context.h"
#include "fastweight/info.h"
#include "fastweight/tensor.h"

namespace fastweight {

enum class Activation : int32_t { kNone = 0, kSilu = 1 };

struct ShortConvOptions {
  Activation activation = Activation::kNone;
};

// The tensors that every entry point reads. Inputs may have any strides; rows whose channels are neighbours in memory
// are fastest. x is fp32, bf16, fp16 or fp64, the others may have any floating type. fp64 anywhere runs on the CPU's
// reference.
struct ShortConvInputs {
  TensorView x;              // [B, T, D]
  TensorView w;              // [D, W]
  TensorView bias;           // [D]; absent: 0
  TensorView initial_state;  // [N, D, W]; absent: 0
  TensorView cu_seqlens;     // [N + 1] int32 or int64; absent: N = B sequences of T tokens; given: B = 1
};

struct ShortConvForward {
  ShortConvInputs in;
  ShortConvOptions options;

  TensorView residual;     // [B, T, D]; absent: 0
  TensorView y;            // [B, T, D]; x's type or fp32
  TensorView final_state;  // [N, D, W]; x's type or fp32; optional
};

// Gradients of a loss whose gradient with respect to y and the final state is given; the gradient of the residual is dy
// itself. Every output is optional, and absent where its input is; each has the shape of its input and that input's
// type, or fp32.
struct ShortConvBackward {
  ShortConvInputs in;
  ShortConvOptions options;

  TensorView dy;             // [B, T, D], x's type or fp32; absent: 0
  TensorView d_final_state;  // [N, D, W]; absent: 0

  TensorView dx, dw, dbias, d_initial_state;
};

// Decoding: T tokens per sequence advance states in place. `in.initial_state` is absent.
//
// On CUDA the contents of state_indices and cu_seqlens stay on the device: slots that do not exist are skipped like -1,
// offsets are clamped to the tokens that exist. That no two sequences name one slot is checked on the CPU, and on CUDA
// the caller's promise: they would write the same state at once, and what it then holds is undefined.
struct ShortConvStep {
  ShortConvInputs in;
  ShortConvOptions options;

  TensorView residual;       // [B, T, D]; absent: 0
  TensorView state;          // [slots, D, W], read and written; x's type or fp32; slots = N without state_indices
  TensorView state_indices;  // [N] int32 or int64: the slot of each sequence, -1: skip it (its y is 0). Optional
  TensorView y;              // [B, T, D]
};

// Each returns the name of the implementation that ran.
std::string short_conv_forward(const Context& context, const ShortConvForward& args);
std::string short_conv_backward(const Context& context, const ShortConvBackward& args);
std::string short_conv_step(const Context& context, const ShortConvStep& args);

// What the library holds for this family, most special first.
std::vector<ImplementationInfo> short_conv_implementations();

}  // namespace fastweight
