// The building blocks of the chunk form of delta-rule operators, one call each: chunk-local sums of gates, the gated
// Gram matrix of the keys, the triangular inverse, the WY factors, the l2 norm and the gate activations.
//
// A sequence is cut into chunks of C = 16, 32 or 64 tokens, counted from its start; the last one has L <= C. For one
// chunk of one value head, with rows k and v, gamma the sum of the log decays from the start of the chunk, and slower()
// the part below the diagonal:
//
//     A = slower(beta * (k k^T) * exp(gamma_i - gamma_j))          scaled_dot_kkt
//     J = (I + A)^-1                                               solve_tril
//     W = J (beta * exp(gamma) * k),   U = J (beta * v)            wy
//
// With the state S before the chunk, U - W S are the rows that the delta rule writes into it.
//
// Sizes are those of delta_rule.h. A chunk matrix (A, J) is [B, T, HV, C]: row t is the row of its chunk's matrix, with
// zeros from column L on; C is read off the last axis. Of A only the part below the diagonal is read, of J the part up
// to and including it. Inputs may have any strides; k and v share one type (fp32, bf16, fp16, fp64), every other input
// has any floating type. fp64 anywhere runs on the CPU's reference.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fastweight/context.h"
#include "fastweight/info.h"
#include "fastweight/tensor.h"

namespace fastweight {

// y_i = sum of x_j over the tokens j <= i of the chunk, or over j >= i in reverse, which is the adjoint.
struct ChunkLocalCumsum {
  TensorView x;           // [B, T, HV] or [B, T, HV, K]
  TensorView cu_seqlens;  // [N + 1] int32 or int64; absent: B sequences of T tokens; given: B = 1
  int32_t chunk_size = 64;
  bool reverse = false;

  TensorView y;  // like x; x's type or fp32
};

struct ScaledDotKktInputs {
  TensorView k;           // [B, T, H, K]
  TensorView beta;        // [B, T, HV]; absent: 1
  TensorView gamma;       // summed log decays, per head [B, T, HV] or per channel [B, T, HV, K]; absent: 0
  TensorView cu_seqlens;  // as above
};

struct ScaledDotKktForward {
  ScaledDotKktInputs in;

  TensorView a;  // [B, T, HV, C] fp32
};

// Every output is optional, and absent where its input is; each has the shape of its input and that input's type, or
// fp32.
struct ScaledDotKktBackward {
  ScaledDotKktInputs in;
  TensorView da;  // [B, T, HV, C]

  TensorView dk, dbeta, dgamma;
};

struct SolveTrilForward {
  TensorView a;           // [B, T, HV, C]
  TensorView cu_seqlens;  // as above

  TensorView j;  // [B, T, HV, C]; any floating type
};

// dA = -slower(J^T dJ J^T)
struct SolveTrilBackward {
  TensorView j;           // [B, T, HV, C], the forward's
  TensorView dj;          // [B, T, HV, C]; the part below the diagonal is read
  TensorView cu_seqlens;  // as above

  TensorView da;  // [B, T, HV, C]; any floating type
};

struct WyInputs {
  TensorView k;           // [B, T, H, K]
  TensorView v;           // [B, T, HV, V]
  TensorView beta;        // [B, T, HV]; absent: 1
  TensorView gamma;       // per head [B, T, HV] or per channel [B, T, HV, K]; absent: 0
  TensorView j;           // [B, T, HV, C]
  TensorView cu_seqlens;  // as above
};

struct WyForward {
  WyInputs in;

  TensorView w;  // [B, T, HV, K]; k's type or fp32; optional
  TensorView u;  // [B, T, HV, V]; k's type or fp32; optional
};

// The gradients of k, v, beta and gamma through W and U at a fixed J, and what reaches A through J. Every output is
// optional, and has the shape of its input and that input's type, or fp32. With dA given to scaled_dot_kkt_backward,
// the sums of the two dk, dbeta and dgamma are the whole gradients.
struct WyBackward {
  WyInputs in;
  TensorView dw;  // [B, T, HV, K]; absent: 0
  TensorView du;  // [B, T, HV, V]; absent: 0

  TensorView dk, dv, dbeta, dgamma;
  TensorView da;  // [B, T, HV, C] fp32
};

// y = x rstd over the last axis,  rstd = 1 / sqrt(sum x^2 + eps)
struct L2NormForward {
  TensorView x;       // [.., D], two to five axes
  double eps = 1e-6;  // at least 2^-126

  TensorView y;     // like x; x's type or fp32
  TensorView rstd;  // x's shape without the last axis, fp32; optional
};

// dx = rstd (dy - y (y . dy)), exact including eps
struct L2NormBackward {
  TensorView y;     // [.., D], the forward's
  TensorView rstd;  // [..], the forward's
  TensorView dy;    // [.., D]

  TensorView dx;  // like y; y's type or fp32
};

// g = -exp(A_log) softplus(x + dt_bias), or, per channel with a lower bound,
// g = lower_bound * sigmoid(exp(A_log) (x + dt_bias)).
struct GateActivationOptions {
  static constexpr double kUnset = std::numeric_limits<double>::infinity();

  double lower_bound = kUnset;  // below 0; kUnset: none
  int32_t chunk_size = 0;       // 16, 32 or 64: g is summed within chunks, as by chunk_local_cumsum; 0: it is not
};

struct GateActivationInputs {
  TensorView x;           // per head [B, T, HV] or per channel [B, T, HV, K]
  TensorView a_log;       // [HV]; optional with a lower bound
  TensorView dt_bias;     // [HV] per head, [HV * K] or [HV, K] per channel; absent: 0
  TensorView cu_seqlens;  // as above; matters with a chunk size only
};

struct GateActivationForward {
  GateActivationInputs in;
  GateActivationOptions options;

  TensorView g;  // like x; x's type or fp32
};

// Every output is optional, and absent where its input is; each has the shape of its input and that input's type, or
// fp32. The sums over tokens are made in fp64, of gradients that have not been rounded to dx's type.
struct GateActivationBackward {
  GateActivationInputs in;
  GateActivationOptions options;
  TensorView dg;  // like x: the gradient of the forward's g, summed or not

  TensorView dx, da_log, ddt_bias;
};

// y = weight x rstd activation(gate) over the last axis,  rstd = 1 / sqrt(mean x^2 + eps): the norm behind the delta
// rule's output.
enum class NormGate : int32_t { kSilu = 0, kSigmoid = 1 };

struct RmsNormOptions {
  double eps = 1e-5;  // at least 2^-126, or 0: a row of zeros becomes NaN
  NormGate activation = NormGate::kSilu;
};

struct RmsNormInputs {
  TensorView x;       // [.., D], two to five axes
  TensorView gate;    // like x, any floating type; absent: no gate
  TensorView weight;  // [D]; absent: 1
};

struct RmsNormForward {
  RmsNormInputs in;
  RmsNormOptions options;

  TensorView y;  // like x; x's type or fp32. May be x itself: the norm in place
};

// Every output is optional, and absent where its input is; each has the shape of its input and that input's type, or
// fp32. rstd is found again from x.
struct RmsNormBackward {
  RmsNormInputs in;
  RmsNormOptions options;
  TensorView dy;  // like x

  TensorView dx, dgate, dweight;
};

// Each returns the name of the implementation that ran.
std::string chunk_local_cumsum(const Context& context, const ChunkLocalCumsum& args);
std::string scaled_dot_kkt_forward(const Context& context, const ScaledDotKktForward& args);
std::string scaled_dot_kkt_backward(const Context& context, const ScaledDotKktBackward& args);
std::string solve_tril_forward(const Context& context, const SolveTrilForward& args);
std::string solve_tril_backward(const Context& context, const SolveTrilBackward& args);
std::string wy_forward(const Context& context, const WyForward& args);
std::string wy_backward(const Context& context, const WyBackward& args);
std::string l2norm_forward(const Context& context, const L2NormForward& args);
std::string l2norm_backward(const Context& context, const L2NormBackward& args);
std::string gate_activation_forward(const Context& context, const GateActivationForward& args);
std::string gate_activation_backward(const Context& context, const GateActivationBackward& args);
std::string rms_norm_forward(const Context& context, const RmsNormForward& args);
std::string rms_norm_backward(const Context& context, const RmsNormBackward& args);

enum class Block : int32_t {
  kChunkLocalCumsum = 0,
  kScaledDotKkt = 1,
  kSolveTril = 2,
  kWy = 3,
  kL2Norm = 4,
  kGateActivation = 5,
  kRmsNorm = 6,
};

// What the library holds for a block, most special first. The mode of chunk_local_cumsum is forward.
std::vector<ImplementationInfo> block_implementations(Block block);

}  // namespace fastweight
