// The map of a segment: what a run of tokens does to the state of the delta rule, whatever that state is.
//
// The recurrence of delta_rule.h is affine in the state. With K x K and K x V matrices of the segment's tokens alone,
//
//     S_out = M S_in + h                      the state after the segment from the state before it
//     G_in  = M^T G_out + e                   the gradient of the state before it from that of the state after it
//
// and two neighbouring segments compose: (M2, h2) after (M1, h1) is (M2 M1, M2 h1 + h2). Segments can therefore be
// computed at the same time, on several devices or several parts of one, and joined afterwards.
//
// A segment is what delta_rule.h calls a sequence: a row of the batch, or the tokens between two offsets. Sizes as
// there. Of an empty segment M is the identity and h and e are 0, or what they start from.
//
// M, h, M^T and e, and the sums that make them, are fp32. On the CPU and in chunk_fp32 on CUDA so is all else, and composed
// maps agree with the unsplit segment within the rounding of fp32, whatever the type of the tensors. On CUDA a 16-bit problem
// has maps of the operator's own kernels, chunk_sm90 or chunk_16bit, with operands of 16 bits as there: errors are relative to
// the largest state on the way, those of M to the identity. Context::implementation = "chunk_fp32" asks for fp32.
#pragma once

#include <string>
#include <vector>

#include "fastweight/delta_rule.h"

namespace fastweight {

// With in.initial_state h is the state after the segment from that state, bit for bit the final state of the forward of
// the same name. q is not read for either. beta is one number per token.
struct DeltaRuleMapForward {
  DeltaRuleInputs in;
  DeltaRuleOptions options;

  TensorView m;  // [N, HV, K, K] fp32, rows of S_out by rows of S_in, whatever state_v_first says; optional
  TensorView h;  // [N, HV, K, V] fp32; optional
};

// `in` as for the forward, with q and without a state: no state has a part in the gradient of a state. With
// d_final_state e is the gradient of the state before the segment from that of the state after it. v is not read for
// either.
struct DeltaRuleMapBackward {
  DeltaRuleInputs in;
  DeltaRuleOptions options;

  TensorView d_o;            // [B, T, HV, V], q's type or fp32; absent: 0
  TensorView d_final_state;  // [N, HV, K, V]; absent: 0

  TensorView mt;  // [N, HV, K, K] fp32, the transpose of M; optional
  TensorView e;   // [N, HV, K, V] fp32; optional
};

// Each returns the name of the implementation that ran. They keep the promises of the delta rule's forward and backward.
std::string delta_rule_map_forward(const Context& context, const DeltaRuleMapForward& args);
std::string delta_rule_map_backward(const Context& context, const DeltaRuleMapBackward& args);

// What the library holds for them, most special first.
std::vector<ImplementationInfo> delta_rule_map_implementations();

}  // namespace fastweight
