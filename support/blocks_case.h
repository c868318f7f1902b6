// A problem of one building block with its data, and the functions that run it through the public API. Tests, benches
// and `fastweight check` all use this.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/blocks_fields.h"
#include "fastweight/blocks.h"
#include "fastweight/delta_rule.h"
#include "support/case.h"

namespace fastweight::support {

// What to draw.
struct BlockSpec {
  std::string name;
  Block block = Block::kSolveTril;
  int64_t B = 1, T = 64, H = 1, HV = 1, K = 16, V = 16;
  int64_t C = 64;                   // of a gate activation: 0 leaves its values unsummed
  std::vector<int64_t> cu_seqlens;  // empty: fixed length
  Gate gate = Gate::kPerHead;       // of gamma, or of the gate to sum or activate
  DType dtype = DType::kF32;        // k, v, raw gates, and what has their types
  bool beta = true;
  bool reverse = false;  // of a chunk-local sum
  bool lower_bound = false, a_log = true, dt_bias = true;
  bool gated = true, weight = true, sigmoid = false;  // of the RMS norm
  double gate_scale = 1;                              // of the log decays

  void set_types(DType type) { dtype = type; }
};

inline constexpr Block kBlocks[] = {Block::kChunkLocalCumsum, Block::kScaledDotKkt,   Block::kSolveTril, Block::kWy,
                                    Block::kL2Norm,           Block::kGateActivation, Block::kRmsNorm};
const char* name_of(Block block);
std::string describe(const BlockSpec& spec);
inline std::vector<ImplementationInfo> implementations_of(const BlockSpec& spec) {
  return block_implementations(spec.block);
}

// The tensors that the block has, by the names of blocks.h; the others are absent.
struct BlockCase : TensorsByName<BlockCase> {
  BlockSpec spec;
  Tensor x;  // raw or log gates, or the rows to normalise
  Tensor k, v, beta, gamma, a, j, a_log, dt_bias, cu_seqlens;
  Tensor gate, weight;            // of the RMS norm
  Tensor y, rstd;                 // the norm's, for its backward
  Tensor da, dj, dw, du, dy, dg;  // gradients of the results

  static std::span<const CaseTensor<BlockCase>> fields();
};

// Draws the data, the same for the same seed on every machine. Keys have unit norm, beta is in (0, 1), log decays are
// those of a softplus gate, A and J belong to the keys; a, j, y and rstd were computed by the reference in fp64.
BlockCase draw(const BlockSpec& spec, uint64_t seed);

// Results by name, as in blocks.h.
struct BlockResults : TensorsByName<BlockResults> {
  std::string implementation;
  Tensor y, rstd, a, j, w, u, g;
  Tensor dx, dk, dv, dbeta, dgamma, da, da_log, ddt_bias, dgate, dweight;

  static std::span<const CaseTensor<BlockResults>> fields();
};

// Results have the types of the inputs they belong to; chunk matrices and rstd have fp32, or fp64 for a problem in
// double. There is no step, and a chunk-local sum has no backward of its own.
BlockResults outputs_of(Mode mode, const BlockCase& problem);
Call call_of(Mode mode, const BlockCase& problem, const BlockResults& outputs);

BlockResults forward(const BlockCase& problem, const Context& context);
BlockResults backward(const BlockCase& problem, const Context& context);

// Calls of the public API with tensors in host memory, on whatever device the context names.
inline std::string run(const Context& context, const ChunkLocalCumsum& args) {
  return Call(chunk_local_cumsum, args).run(context);
}
inline std::string run(const Context& context, const SolveTrilForward& args) {
  return Call(solve_tril_forward, args).run(context);
}
inline std::string run(const Context& context, const L2NormForward& args) {
  return Call(l2norm_forward, args).run(context);
}
inline std::string run(const Context& context, const L2NormBackward& args) {
  return Call(l2norm_backward, args).run(context);
}
inline std::string run(const Context& context, const RmsNormForward& args) {
  return Call(rms_norm_forward, args).run(context);
}
inline std::string run(const Context& context, const GateActivationForward& args) {
  return Call(gate_activation_forward, args).run(context);
}
inline std::string run(const Context& context, const GateActivationBackward& args) {
  return Call(gate_activation_backward, args).run(context);
}

// What a result in this type may be off the reference in double on the same rounded inputs. Stored in 16 bits, a result
// is off by its rounding. Where terms of both signs are summed, or a difference is all but 0, the error of the terms
// shows in the result.
Tolerance tolerance(const BlockCase& problem, const BlockResults& expected, const std::string& tensor,
                    DType result_type);

}  // namespace fastweight::support
