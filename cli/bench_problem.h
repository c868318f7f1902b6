// One problem of the bench: its data, its outputs, the call, and what the call costs at least.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "cli/names.h"
#include "fastweight/context.h"
#include "fastweight/tensor.h"

namespace fastweight::cli {

struct Shape {
  int64_t B = 1, T = 0, H = 0, HV = 0, K = 0, V = 0;

  std::string text() const;  // B=1,T=4096,H=16,K=128,V=128; HV where it differs from H
};

// From `B=1,T=4096,H=16,HV=32,K=128,V=128` in any order; B defaults to 1, HV to H, T stays 0 when absent, D stands for
// K and V. Throws UsageError.
Shape parse_shape(const std::string& text);

struct BenchChoice {
  Op op = Op::kDeltaRule;
  Mode mode = Mode::kForward;
  Shape shape;
  DType dtype = DType::kF32;
  int64_t sequences = 0;  // more than 0: T is cut into this many packed sequences of growing length (not for steps)
  // Of the states; the building blocks have none. bf16 is for a step of the delta-rule family and the short
  // convolution.
  std::optional<DType> state_dtype = DType::kF32;
  bool saved_states = false;  // the forward writes the chunk states, the backward reads them
};

inline constexpr int64_t kBlockChunk = 64;  // C of the building blocks

// Drawing gaussians for every token of a long sequence would take longer than the bench; a few hundred tokens are drawn
// and repeated.
inline constexpr int64_t kDrawnTokens = 256;

// Forward: o and the final state, from no initial state (TTT-linear: from a random one). Backward: every gradient of
// the inputs, from d_o. Step: one token for each of B states. Gates are precomputed, keys have unit norm, gates, beta,
// eta and the parameters of norms are fp32. Short convolution: H K channels of width 4, silu, no bias and residual.
// Maps of segments: those of gdn, the matrix and the state, from none.
// Building blocks: chunks of 64, one log decay per head for scaled_dot_kkt and wy, per channel else; gate_activation
// sums its values within chunks.
class BenchProblem {
 public:
  virtual ~BenchProblem() = default;

  // One call of the public API; the name of the implementation that ran.
  virtual std::string run(const Context& context) const = 0;

  // Per token and value head F = 6KV + 64(K + V) forward, 3F backward, 7KV for a step. TTT-linear: F = 6D^2 + 96D, and
  // 8D^2 for a step. Short convolution, per token and channel: F = 2W + 4, 3F backward, F for a step.
  // GLA, simple GLA and linear attention: F = 4KV + 32(K + V); Comba as the delta rule; DPLR and IPLR:
  // F = 8KV + 128(K + V); 3F backward.
  // Maps of segments: 4K(K + V) + 32(K + V), backward 2KV more.
  // Building blocks, products with triangular matrices as full squares, per token and value head: scaled_dot_kkt 2CK,
  // backward 4CK; solve_tril C^2 / 3, backward 4C^2; wy 2C(K + V), backward 4C(K + V) + 2C^2. The others count their
  // additions and multiplications per element, an activation as one: chunk_local_cumsum 1, l2norm 3, backward 5,
  // gate_activation 4, backward 6.
  virtual double flop() const = 0;

  // Every input and output tensor once; the states of a step twice, read and written.
  virtual double bytes() const = 0;

  // The same problem with its tensors in the device's memory; null for an operator without implementations there. Must
  // not outlive this one.
  virtual std::unique_ptr<BenchProblem> on_device(Device) const { return nullptr; }
};

std::unique_ptr<BenchProblem> make_bench_problem(const BenchChoice& choice);

}  // namespace fastweight::cli
