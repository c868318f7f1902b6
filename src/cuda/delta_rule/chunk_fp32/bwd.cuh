// The backward in the chunk form with the accuracy of fp32: what its kernels share. For one tile of 16 tokens with the
// state S before it and the gradient G of the state after it, in the symbols of docs/notation.md with k and q as the
// norm leaves them:
//
//     R    = J bD                                  the forward again (bwd_states.cu)
//
//     dR   = sP^T d_o + w k G                      R is read by o and by S'
//     Y    = J^T dR                                dv = beta Y
//     dS   = e_n G + (scale e q)^T d_o - (beta e k)^T Y                      (bwd_scan.cu)
//
//     dsP  = lower(d_o R^T)                        dA = -slower(Y R^T)
//     dq   = scale e (d_o S^T) + rows(scale dsP, k)
//     read = -e (Y S^T) + rows(dA, k)              dbeta = Y . v + k . read
//     dk   = beta read + cols(scale dsP, q) + cols(dA, beta k) + w (R G^T)
//     dg_m = sum_{i >= m > j} M_ij + sum_{i >= m} a_i + sum_{j < m} b_j + e_n <S, G>     (bwd_gradients.cu)
//
//     rows(D, y)_i = sum_{j <= i} D_ij y_j exp(gamma_i - gamma_j)      M_ij = dsP_ij sP_ij + dA_ij A_ij
//     cols(D, x)_j = sum_{i >= j} D_ij x_i exp(gamma_i - gamma_j)      b_j  = k_j . w_j (R G^T)_j
//     a_i = q_i . scale e_i (d_o S^T)_i - k_i . beta_i e_i (Y S^T)_i
//
// dg has the terms that exp(g_m) multiplies and no others; per channel its inner products stay open. The first two
// kernels go over the tiles of each sequence, forward and backward, and leave S, G, R and Y in scratch memory; the
// third has all tiles at once.
#pragma once

#include "cuda/delta_rule/chunk_fp32/chunk.cuh"
#include "cuda/delta_rule/parameter_sums.h"

namespace fastweight::cuda::chunk_fp32 {

// The tiles whose S and G are in scratch memory at a time: all of them; or of sequences of one length a slice, tiles
// [first, first + count) of each; or of packed sequences, whose lengths the host does not know, tiles [first, first +
// count) in the order of all tiles.
struct Segment {
  enum Kind { kWhole, kSlice, kRange };

  Kind kind = kWhole;
  int64_t first = 0, count = 0;
  int64_t slices = 1;  // of a sequence

  // Tiles [begin, end) of a sequence of `tiles` tiles, of which the first is first_tile in the order of all.
  struct Share {
    int64_t begin, end;
  };
  FW_HOST_DEVICE Share share(int64_t tiles, int64_t first_tile) const {
    if (kind == kWhole) return {0, tiles};
    const int64_t begin = kind == kSlice ? first : first - first_tile;
    return {clamped(begin, 0, tiles), clamped(begin + count, 0, tiles)};
  }
  // Where a tile's states are; `tile` is its number in the order of all tiles.
  FW_HOST_DEVICE int64_t slot(int64_t sequence, int64_t position, int64_t tile) const {
    return kind == kWhole ? tile : kind == kSlice ? sequence * count + position - first : tile - first;
  }
  // Whether a segment begins with the tile, and where the state before that segment is.
  FW_HOST_DEVICE bool begins_with(int64_t position, int64_t tile) const {
    return kind != kWhole && (kind == kSlice ? position : tile) % count == 0;
  }
  FW_HOST_DEVICE int64_t start_slot(int64_t sequence, int64_t position, int64_t tile) const {
    return kind == kSlice ? sequence * slices + position / count : tile / count;
  }
  // Where the gradient of a state between two segments is: in a range at most one sequence goes on in the next.
  FW_HOST_DEVICE int64_t carry_slot(int64_t sequence) const { return kind == kSlice ? sequence : 0; }
};

struct TileBackwardArgs {
  TileArgs tile;  // without outputs; chunk_states: given by the caller, and used
  Segment segment;
  DeviceTensor d_o;                  // [B, T, HV, V]; absent: 0
  DeviceTensor R, Y;                 // [B, T, HV, V] fp32, scratch memory; absent in the map of a segment
  DeviceStates S, G;                 // [slots, HV] matrices of fp32 with even rows along V, scratch memory; as R and Y
  DeviceStates starts;               // [start slots, HV] matrices before the segments, scratch memory
  DeviceStates carry_in, carry_out;  // [carry slots, HV] matrices: gradients after and before the segment
  DeviceStates d_final_state, d_initial_state;
  DeviceTensor dq, dk, dv, dg, dbeta;
  ParameterSums sums;  // over tiles
};

// How many tiles of a sequence there are; offsets out of order may claim more than there is memory for.
__device__ __forceinline__ int64_t tiles_of(const TileArgs& args, const SequenceSpan& span, int64_t first_tile) {
  return max(min(chunks_of(span.length, kTileRows), args.num_tiles - first_tile), int64_t{0});
}

// The states before all segments.
void launch_starts(const TileBackwardArgs& args, const ScanConfig& config, const Context& context);
// S and R of a segment's tiles; then their G and Y, and dv; then the other gradients.
void launch_states(const TileBackwardArgs& args, const ScanConfig& config, const Context& context);
void launch_gradient_scan(const TileBackwardArgs& args, const ScanConfig& config, const Context& context);
void launch_gradients(const TileBackwardArgs& args, int padded_k, const Context& context);
size_t gradients_bytes(int padded_k, bool per_channel);

}  // namespace fastweight::cuda::chunk_fp32
