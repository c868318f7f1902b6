// The chunk form, as both of its implementations compute it: chunk_16bit/ with 16-bit operands, chunk_fp32/ with the
// accuracy of fp32. The symbols are those of docs/notation.md.
//
// For one chunk of n tokens with start state S, rows i, j < n:
//
//     A_ij  = beta_i (k_i . k_j) exp(gamma_i - gamma_j)  (i > j)     J  = (I + A)^-1
//     sP_ij = scale (q_i . k_j) exp(gamma_i - gamma_j)   (i >= j)
//     D     = v - e k S                                              what the memory got wrong before the chunk
//     R     = J bD,   bD = diag(beta) D                              what the chunk writes
//     o     = scale e q S + sP R
//     S'    = e_n S + (w k)^T R
//
// A key has two roles. As the reader, it reads the state and is row i of A; as the writer, it writes to the state and
// is column j of A and sP. The code asks the problem, and a tile, by the role (see device_problem.h).
//
// Two steps: the factors of every chunk, all chunks at once (factors*.cu), then the scan over the chunks of each
// sequence. Rows beyond a chunk's tokens are neutral: q = k = v = beta = 0 and decay 1, so A and sP are 0 and J is the
// identity there.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/instructions.cuh"
#include "cuda/common/sequences.h"
#include "cuda/delta_rule/device_problem.h"
#include "cuda/delta_rule/token.cuh"

namespace fastweight::cuda {

// The factor of token i on: the read k_i S; the read q_i S; the write R_i; and D_i, which is beta.
enum TokenFactor { kOnKeyRead, kOnQueryRead, kOnWrite, kOnValue };

// The copies of the keys that hold their decays, where these are per channel: e k of the reader, scale e q, and w k of
// the writer.
enum KeyCopy { kReader, kQuery, kWriter };
inline constexpr int kKeyCopies = 3;

// beta of a row of a chunk; 0 beyond its tokens, 1 without beta.
__device__ __forceinline__ float chunk_beta(const DeltaRuleDeviceProblem& p, const ChunkSpan& span, int head, int row) {
  if (row >= span.length) return 0.0f;
  if (!p.beta.present()) return 1.0f;
  return beta_of(p, load_float(p.beta.data, p.beta.dtype, row_offset(p.beta, span.batch, span.begin + row, head)));
}

// Dense numbers, in pieces of 16 bytes; the caller commits the copies.
__device__ __forceinline__ void copy_floats(float* destination, const float* source, int count, int thread,
                                            int threads) {
  for (int at = thread * 4; at < count; at += threads * 4) {
    copy_async(shared_address(destination + at), source + at, true);
  }
}

// What kernels are compiled for.
inline int padded_k(int64_t K) { return K <= 64 ? 64 : K <= 128 ? 128 : 256; }

// Calls body.template operator()<kK>() for a padded K.
template <class Body>
void with_padded_k(int padded_k, const Body& body) {
  if (padded_k == 64) {
    body.template operator()<64>();
  } else if (padded_k == 128) {
    body.template operator()<128>();
  } else {
    body.template operator()<256>();
  }
}

// Calls body.template operator()<kK, kPerChannel>() for a padded K and the gate of a problem.
template <class Body>
void with_padded_k_and_gate(int padded_k, bool per_channel, const Body& body) {
  with_padded_k(padded_k, [&]<int kK>() {
    per_channel ? body.template operator()<kK, true>() : body.template operator()<kK, false>();
  });
}

}  // namespace fastweight::cuda
