// Backward in the chunk form with 16-bit operands: the equations, and what its kernels share. ../chunk.cuh has those of
// the forward; the symbols are those of docs/notation.md, and G is the gradient of the state after a chunk.
//
//     dR    = sP^T d_o + w (k G)                    Y  = J^T dR
//     dA    = -slower(Y R^T)                        dP = lower(d_o R^T)
//     dq    = scale (e (d_o S^T) + rows(dP, k))     rows(D, y)_i = sum_{j <= i} D_ij y_j exp(gamma_i - gamma_j)
//     dk    = beta (rows(dA, k) - e (Y S^T))        cols(D, x)_j = sum_{i >= j} D_ij x_i exp(gamma_i - gamma_j)
//           + scale cols(dP, q) + cols(dA, beta k) + w (R G^T)
//     dv    = beta Y
//     dbeta = Y . v + k . (rows(dA, k) - e (Y S^T))
//     dg_m  = sum_{i >= m > j} M_ij + sum_{i >= m} a_i + sum_{j < m} b_j + e_n <S, G>
//     dS    = e_n G + (scale e q)^T d_o - (beta e k)^T Y
//
// with M_ij = dP_ij sP_ij + dA_ij A_ij, a_i = q_i . scale e_i (d_o S^T)_i - k_i . beta_i e_i (Y S^T)_i and b_j = k_j . w_j
// (R G^T)_j: all that exp(g_m) multiplies and nothing else, so that no large terms cancel under strong decay. Per channel
// the inner products over K stay open.
//
// Four steps: the factors of every chunk and the states before it as in the forward, unless the caller kept the states;
// the scan from the last chunk to the first (scan_back.cuh), which has dS on its way, writes dv and leaves G and Y; the
// gradients of every chunk, all chunks at once (gradients.cu, gradients_per_channel.cu); and the sums of the gates'
// parameters over the chunks (../parameter_sums.h).
#pragma once

#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/delta_rule/chunk_sm90/segments.h"

namespace fastweight::cuda::chunk_16bit {

// How far the scan back is, for the gradients, where they start before it ends. All 0 before.
struct BackProgress {
  uint32_t* ready = nullptr;    // [chunks][HV][ranges]: G and Y of a range of value columns are in memory
  uint32_t* counter = nullptr;  // [1], of the window: how many pairs of a chunk and a key head have been claimed
  int ranges = 0;

  FW_HOST_DEVICE bool present() const { return ready != nullptr; }
  __device__ __forceinline__ uint32_t* ready_at(int64_t item) const { return ready + item * ranges; }
};

// What the reverse scan reads and writes beside the problem and its factors.
struct GradientArgs {
  // The problem, its chunks and their factors, `row` among them, and the segments of the scan back; o and the states unused.
  chunk_sm90::ScanArgs chunk;
  DeviceTensor d_o;  // absent: 0
  DeviceTensor dq, dk, dv, dg, dbeta;
  bool vector_d_o = false;  // rows can be copied in pieces of 16 bytes
  bool vector_dv = false;
  bool vector_dq = false, vector_dk = false;  // 16-bit rows can be written so
  DeviceStates d_final_state, d_initial_state;

  // The state before every chunk, [B, NT, HV] as chunk_states: 16-bit, k_stride 1, rows in pieces of 16 bytes.
  DeviceStates S;
  int S_width = 0;        // elements of a row that are there: K or more; zeros from K on
  uint16_t* G = nullptr;  // [slots][HV][padded_v][padded K], rounded to operands; slots of the window
  uint16_t* Y = nullptr;  // [slots][HV][padded_v][64], transposed: a row per value column, 0 beyond the chunk's tokens
  int padded_v = 0;       // a multiple of 64; rows from V on are 0
  BackProgress progress;  // absent: the gradients begin when the scan back has ended
  // The kernel before the scan back has waited for all that this one reads, and makes nothing of it: the gradients of the
  // window before, or a scan back over other chunks. And the scan back over the next window will say so of the gradients of
  // this one.
  bool waits_late = false, next_waits_late = false;

  // The chunk's share of dA_log and ddt_bias, [chunks][HV][1 + width], width K per channel, else 1; absent where the
  // gate has no parameters.
  double* parameter_parts = nullptr;

  // Where a block leaves the sum of dq and dk over the heads of a group and the ranges of value columns so far, and per
  // channel that of dg over the ranges: [blocks][2 to 4][64][padded K]; absent where there is one head and one range.
  float* key_sums = nullptr;

  // [slots][H] of the window: pairs of a chunk and a key head that are left to the kernel of chunk_16bit, which takes no
  // others then. Absent: it takes all.
  uint32_t* left = nullptr;
};
inline constexpr int kKeySums = 2, kKeySumsPerChannel = 3;

// One launch each over all chunks and key heads: dq, dk, dg, dbeta and parameter_parts. The number of blocks is that of
// the key_sums.
template <DType kType>
void launch_gradients_per_channel(const GradientArgs& args, int padded_k, int64_t blocks, const Context& context);
template <DType kType>
void launch_gradients_of(const GradientArgs& args, int padded_k, int64_t blocks, const Context& context);
size_t gradients_bytes(int padded_k);  // of shared memory, of a block
size_t gradients_per_channel_bytes(int padded_k);
// Value columns that a block takes at once.
int gradients_columns(int padded_k);
int gradients_per_channel_columns(int padded_k);

// States in any type and order to rows of `width` elements of the type of the operands.
void launch_round_states(const ChunkArgs& args, const DeviceStates& from, const DeviceStates& to, int width,
                         const Context& context);

// The scan from the last chunk to the first, in one launch.
template <DType kType>
void launch_scan_back(const GradientArgs& args, const ScanConfig& config, const Context& context);

}  // namespace fastweight::cuda::chunk_16bit
