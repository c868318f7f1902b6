// Mini-batches of 16 tokens in reverse. h, c is the state before one, dh, dc the gradient of the state after it, m() a
// mean over D; all 16 rows take part:
//
//     dyo = do + ro (w do - m(w do) - xo m(xo w do))               xo, ro: the norm of y; 0 in extension rows
//     F   = k dh + dc,   dn = -P^T (eta dyo) - eta_L F
//     dy  = r (dn - m(dn) - x m(x dn))
//     dx  = -r (dn m(x y) + y m(x dn)) + w^2 dy
//     dz  = r (dx - m(dx) - x m(x dx)) - (r <dn, n> / D) x
//     dh  = dh + scale q^T dyo + k^T dz,   dc = dc + sum(dyo + dz)
//     Dm  = lower(dyo n^T)
//     dq  = scale (dyo h^T - eta (Dm k))
//     dk  = w dy + dz h^T - scale Dm^T (eta q) - eta_L n dh^T,   dv = -w dy
//     deta = -rowsum(Dm P),   and -<n, F> for the last token
//     dw += do xo + (w x + u) dy,   db += do + w dy                u = w x + b - v + k, y = w u
//
// dz is linear in dn. m(dx) and m(x dx) follow from the means of dn, x dn, w^2 dn, w^2 x dn and y dn and from means of x
// and y, so the chain from dh to dh has one product, one exchange of row sums and one product. The warps of the chain do
// nothing else. Two groups of partners have every other mini-batch each, or one has all where shared memory is short, as it
// is for D above 64: a group prepares what the state's gradient has no part in (all but F, dn .. dh, dc), tells the chain,
// goes on to dq, and then finishes its mini-batch before that, or this one if there is room for no more:
//
//     chain t:     | t is prepared |  F, dn, sums  | B |  dy, dz, dh, dc  -> t is done
//     group t % 2: rows of t + 2 on their way, x, n, dyo of t -> t is prepared, Dm, dq of t,  | t - 2 is done |
//                  dk, dv, deta of t - 2
//
// For D = 64 a partner is one warp that has every fourth mini-batch to itself (reverse_solo.cuh): the four do it in half of
// the instructions and of the accesses to shared memory of two groups of four, whose warps each have 16 columns, or 16 keys
// of dq and dk, as those of the chain and of the forward have:
//
//     chain t:       | t is prepared |  F, dn, sums  | B |  dy, dz, dh, dc  -> t is done
//     partner t % 4: rows of t + 4 on their way, x, n, dyo of t -> t is prepared, Dm, dq of t,  | t is done |
//                    dk, dv, deta of t
//
// 16-bit operands are q, k, v, h, dh, P, n, dyo, dz and Dm; in fp16 those that may leave its range are rounded in units,
// powers of two.
#pragma once

#include <algorithm>
#include <utility>

#include "cuda/common/launch.h"
#include "cuda/ttt_linear/chunk_chain/reverse_chain.cuh"
#include "cuda/ttt_linear/chunk_chain/reverse_partner.cuh"
#include "cuda/ttt_linear/chunk_chain/reverse_solo.cuh"

namespace fastweight::cuda::ttt {
namespace {

// dw and db of a head, from those of the chain and of its partners.
template <int kParts, int kD>
__device__ __forceinline__ void store_parameters(int D, const double (&parameters)[kParts][2][kD], double* sums) {
  for (int i = static_cast<int>(threadIdx.x); i < 2 * D; i += static_cast<int>(blockDim.x)) {
    double sum = 0;
    for (int part = 0; part < kParts; ++part) sum += parameters[part][i / D][i % D];
    sums[i] = sum;
  }
}

// The grid runs over the `heads` of all sequences, those of a sequence together; a smaller grid goes round.
template <DType kType, int kD, int kGroups, bool kFull>
__global__ void __launch_bounds__((1 + kGroups) * 2 * kD, 1)
    reverse_kernel(const __grid_constant__ ReverseArgs args, int64_t heads) {
  auto& shared = dynamic_shared<ReverseShared<kD, kGroups>>();
  const DeviceProblem& p = args.chain.problem;
  for (GroupSums<kD>& sums : shared.sums) sums.clear();
  const int threads = kFull ? 2 * kD : static_cast<int>(blockDim.x) / (1 + kGroups),
            role = static_cast<int>(threadIdx.x) / threads;
  const Lane at(p.head_dim, (static_cast<int>(threadIdx.x) - role * threads) / kWarpSize);
  for (int64_t item = blockIdx.x; item < heads; item += gridDim.x) {
    const int64_t sequence = item / p.num_heads;
    const int head = static_cast<int>(item - sequence * p.num_heads);
    const SequenceSpan span = sequence_at(p.sequences, sequence);
    __syncthreads();  // the head before has been read
    if (role == 0) {
      run_reverse_chain<kType, kD, kFull>(args, span, sequence, head, at, threads, ReverseSignals{threads}, shared);
    } else {
      run_reverse_group<kType, kD, kGroups, kFull>(args, span, sequence, head, at, role - 1, threads, shared);
    }
    __syncthreads();
    store_parameters(p.head_dim, shared.parameters, args.parameter_sums + item * 2 * p.head_dim);
  }
}

template <DType kType>
__global__ void __launch_bounds__(2 * kSoloDim + kSolos * kWarpSize, 1)
    reverse_solo_kernel(const __grid_constant__ ReverseArgs args, int64_t heads) {
  auto& shared = dynamic_shared<SoloShared>();
  const DeviceProblem& p = args.chain.problem;
  constexpr int kThreads = SoloSignals::kChain, kWarps = kThreads / kWarpSize;  // of the chain
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  for (int64_t item = blockIdx.x; item < heads; item += gridDim.x) {
    const int64_t sequence = item / p.num_heads;
    const int head = static_cast<int>(item - sequence * p.num_heads);
    const SequenceSpan span = sequence_at(p.sequences, sequence);
    __syncthreads();  // the head before has been read
    load_norm(p, head, shared.w, shared.b);
    __syncthreads();
    if (warp < kWarps) {
      run_reverse_chain<kType, kSoloDim, true>(args, span, sequence, head, Lane(kSoloDim, warp), kThreads,
                                               SoloSignals(), shared);
    } else {
      run_solo_partner<kType>(args, span, sequence, head, Lane(kSoloDim, 0), warp - kWarps, shared);
    }
    __syncthreads();
    store_parameters(p.head_dim, shared.parameters, args.parameter_sums + item * 2 * p.head_dim);
  }
}

constexpr const char* kReverseName = "ttt_linear chunk_chain backward";

inline std::pair<LaunchShape, int64_t> reverse_shape(const ReverseConfig& config, const ReverseArgs& args) {
  const int64_t heads = args.chain.problem.sequences.count * args.chain.problem.num_heads;
  return {LaunchShape{static_cast<unsigned>(std::min<int64_t>(heads, 1 << 30)), static_cast<unsigned>(config.threads),
                      config.shared_bytes},
          heads};
}

}  // namespace

template <DType kType>
void launch_reverse(const ReverseConfig& config, const ReverseArgs& args, const Context& context) {
  const auto [shape, heads] = reverse_shape(config, args);
  if (config.groups == kSolos) {
    launch<reverse_solo_kernel<kType>>(kReverseName, context, shape, args, heads);
  } else if (config.groups < kMostGroups) {
    launch<reverse_kernel<kType, 64, 1, false>>(kReverseName, context, shape, args, heads);
  } else {
    launch<reverse_kernel<kType, 64, kMostGroups, false>>(kReverseName, context, shape, args, heads);
  }
}

template <DType kType>
void launch_wide_reverse(const ReverseConfig& config, const ReverseArgs& args, const Context& context) {
  const auto [shape, heads] = reverse_shape(config, args);
  if (config.full) {
    launch<reverse_kernel<kType, 128, 1, true>>(kReverseName, context, shape, args, heads);
  } else {
    launch<reverse_kernel<kType, 128, 1, false>>(kReverseName, context, shape, args, heads);
  }
}

}  // namespace fastweight::cuda::ttt
