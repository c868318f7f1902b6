// What the kernels of the backward token by token share. bwd.cu has their order.
//
// dq, dk, dg and dbeta are sums over value columns, dq and dk also over the value heads of a group. A block of the
// walk (bwd_walk.cu) has 32 columns of one value head: a range. It leaves its sums in scratch memory; the ranges are
// added in order, then the heads (bwd_sums.cu). Either every range has a part of the scratch memory, or the ranges come
// one after the other, each in a launch of its own that adds to the only part: the same sums in the same order.
#pragma once

#include "cuda/delta_rule/device_problem.h"
#include "cuda/delta_rule/parameter_sums.h"
#include "cuda/delta_rule/recurrent/recurrent.cuh"

namespace fastweight::cuda::recurrent {

// Null where nobody wants them. Rows are tokens of all batches.
struct GradientParts {
  float* dq = nullptr;     // [parts][rows][HV][K]
  float* dk = nullptr;     // [parts][rows][HV][K]
  float* dg = nullptr;     // [parts][rows][HV][gate_width]
  float* dbeta = nullptr;  // [parts][rows][HV]
  int count = 1;           // parts
  int gate_width = 1;      // K where the gate is per channel
  int64_t rows = 0;        // B T
};

struct BackwardArgs {
  DeltaRuleDeviceProblem problem;
  DeviceTensor d_o;                             // [B, T, HV, V]; absent: 0
  DeviceStates d_final_state, d_initial_state;  // [N, HV] matrices
  DeviceStates chunk_states;                    // [B, NT, HV] matrices: the states before the chunks
  int64_t state_chunks = 0;                     // NT
  ChunkedSequences chunked;
  DeviceTensor dq, dk, dv, dg, dbeta;
  GradientParts parts;
  ParameterSums sums;
};

// Ranges [first_range, first_range + ranges) of the columns.
void launch_walk(const BackwardArgs& args, int first_range, int ranges, const Context& context);
// From the parts to the caller: dq and dk; then dg, dbeta and the chunks' sums for A_log and dt_bias.
void launch_key_sums(const BackwardArgs& args, const Context& context);
void launch_gate_sums(const BackwardArgs& args, const Context& context);

}  // namespace fastweight::cuda::recurrent
