// A problem of one building block with its data, and the functions that run it through the public API. Tests, benches
// and `fastweight check` all use this.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "fastweight/blocks.h"
#include "fastweight/delta_rule.h"
#include "support/placement.h"
#include "support/tensor.h"

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
  double gate_scale = 1;  // of the log decays
};

// The tensors that the block has; the others are absent.
struct BlockCase {
  BlockSpec spec;
  Tensor x;  // raw or log gates, or the rows to normalise
  Tensor k, v, beta, gamma, a, j, cu_seqlens;
  Tensor a_log, dt_bias;
  Tensor y, rstd;            // the norm's, for its backward
  Tensor d_first, d_second;  // gradients of the results, in the order of the forward's tensors
};

// Draws the data, the same for the same seed on every machine. Keys have unit norm, beta is in (0, 1), log decays are
// those of a softplus gate, A and J belong to the keys; a, j, y and rstd were computed by the reference in fp64.
BlockCase draw(const BlockSpec& spec, uint64_t seed);

// The same values in fp64 throughout: what the reference is given to be the oracle.
BlockCase in_double(const BlockCase& problem);

// Results by name, as in blocks.h.
struct BlockResults {
  std::string implementation;
  std::vector<std::pair<std::string, Tensor>> tensors;

  const Tensor& operator[](const std::string& name) const;
  std::vector<std::pair<std::string, const Tensor*>> named() const;
};

// Outputs are poisoned with NaN before the call. Results have the types of the inputs they belong to; chunk matrices
// and rstd have fp32, or fp64 for a problem in double.
//
// `view_of` gives the view that a call receives for one of its tensors; absent ones are passed to it too.
using ViewOf = std::function<TensorView(const Tensor& tensor, bool written)>;
inline TensorView dense_view(const Tensor& tensor, bool) { return tensor.view(); }

// A call with its outputs, which can be made any number of times: on views of host memory, which `run` copies to a CUDA
// device and back and `place` keeps there, or with `enqueue` on views that lie where the context says.
using BlockCall = std::function<std::string(const Context&)>;
struct PreparedBlock {
  BlockResults results;
  BlockCall run, enqueue;
  std::function<BlockCall(Device)> place;
};
PreparedBlock prepare_forward(const BlockCase& problem, const ViewOf& view_of = dense_view);
PreparedBlock prepare_backward(const BlockCase& problem, const ViewOf& view_of = dense_view);

// A call on host tensors on the context's device; for CUDA, the tensors are copied there and back (placement.h).
std::string run(const Context& context, const ChunkLocalCumsum& args);
std::string run(const Context& context, const SolveTrilForward& args);
std::string run(const Context& context, const L2NormForward& args);
std::string run(const Context& context, const L2NormBackward& args);
std::string run(const Context& context, const GateActivationForward& args);
std::string run(const Context& context, const GateActivationBackward& args);

BlockResults forward(const BlockCase& problem, const Context& context, const ViewOf& view_of = dense_view);
BlockResults backward(const BlockCase& problem, const Context& context, const ViewOf& view_of = dense_view);

}  // namespace fastweight::support
