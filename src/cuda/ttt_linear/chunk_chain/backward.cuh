// Backward by mini-batches of 16 tokens: its arguments, its shared memory and its launches.
//
// Two passes over a (sequence, head), both with the state, or its gradient, in registers:
//   - keep_states.cuh: the chain of the forward, which leaves the state before every mini-batch in scratch memory, in
//     16 bits as its products read it; not where the forward has kept them;
//   - reverse.cuh: the mini-batches in reverse.
#pragma once

#include "cuda/ttt_linear/chunk.cuh"
#include "cuda/ttt_linear/chunk_chain/chain.cuh"
#include "cuda/ttt_linear/chunk_chain/config.h"
#include "cuda/ttt_linear/kept_states.h"

namespace fastweight::cuda::ttt {

struct ReverseArgs {
  ChunkArgs chain;       // the initial state of the chain is the gradient of the final one, and the other way round
  bool vectors = false;  // rows of q, k, v and d_o can be copied in 16-byte pieces
  DeviceTensor d_o, dq, dk, dv, deta;
  KeptTiles kept;
  double* parameter_sums = nullptr;  // [N, H, 2, D]
};

// A matrix like h in 16 bits in shared memory, in the order of KeptTiles.
template <int kD>
struct StateTile {
  uint16_t* data;

  __device__ __forceinline__ uint32_t address(int w, int m, int lane) const {
    return shared_address(data) + 2 * static_cast<uint32_t>(KeptTiles::offset(kD, w, m)) +
           16 * static_cast<uint32_t>(lane);
  }
};

inline constexpr int kMostGroups = 2;  // of partners

// What a group has of its mini-batches: exchanges with the chain, of the one in hand and the one to be finished, and rows
// and states, of one more that is on its way. D up to 128 leaves room for one exchange: a group then finishes a mini-batch
// before it prepares the next.
template <int kD>
inline constexpr int kGroupBuffers = kD == 64 ? 2 : 1;
template <int kD>
inline constexpr int kGroupStages = kGroupBuffers<kD> + 1;

template <int kD>
struct ReverseStage {
  alignas(128) uint16_t rows[4][kTileRows * kD];
  alignas(128) uint16_t h[kD * kD];
  alignas(16) float c[kD];
  alignas(16) float eta[kTileRows];

  __device__ SharedTile<kD> q() { return {rows[0]}; }
  __device__ SharedTile<kD> k() { return {rows[1]}; }
  __device__ SharedTile<kD> v() { return {rows[2]}; }
  __device__ SharedTile<kD> d_o() { return {rows[3]}; }
  __device__ StateTile<kD> state() { return {h}; }
};

// Of a row: r, and the means of y, x y, w^2 x and w^2 x^2.
struct RowTerms {
  float r, y, xy, wwx, wwxx;
};

// What the chain and its partners hand to each other of one mini-batch. A lane's part of a row is in `[w][half][lane]`,
// an A fragment of 16 tokens and the 16 columns of warp w in `[w][lane]`.
template <int kD>
struct ReverseExchange {
  static constexpr int kWarps = kD / kWarpColumns;
  static constexpr int kRow = kD + 16;  // two rows in different banks

  static constexpr bool kGradientOverRows = false;  // the gradient of the state has a place of its own

  float4 x_rows[kWarps][2][kWarpSize];
  float4 u_rows[kWarps][2][kWarpSize];       // w x + b - v + k
  alignas(16) float base[kTileRows * kRow];  // -P^T (eta dyo), what the state has no part in of dn; then dy
  uint4 n[kWarps][kWarpSize];                // in units
  uint4 dyo_rows[kWarps][kWarpSize];
  uint4 dz_rows[kWarps][kWarpSize];   // in units of dz_unit[w]
  alignas(128) uint16_t dh[kD * kD];  // a StateTile
  uint4 eta_Dm[kWarpSize];            // Dm^T eta, in units of eta_Dm_unit
  RowTerms rows[kTileRows];
  float nF[kWarps][kWarpSize];  // a lane's share of <n, F>
  float deta[kTileRows];        // without <n, F>
  float dz_unit[kWarps];
  float eta_Dm_unit;

  __device__ __forceinline__ float4& x(int w, int half, int lane) { return x_rows[w][half][lane]; }
  __device__ __forceinline__ float4& u(int w, int half, int lane) { return u_rows[w][half][lane]; }
  __device__ __forceinline__ uint4& dyo(int w, int lane) { return dyo_rows[w][lane]; }
  __device__ __forceinline__ uint4& dz(int w, int lane) { return dz_rows[w][lane]; }
  __device__ __forceinline__ StateTile<kD> gradient() { return {dh}; }
};

// Of every row, by the warps of a group: mean and variance of the warp's columns of z; its sums of y, x y, w^2 x and
// w^2 x^2; mean and variance of its columns of y and its sums of w do and w do (y - mean). And the parameters of the norm.
template <int kD>
struct GroupSums {
  alignas(16) RowSums<kD, kTileRows> inner;
  float4 gradient[kD / kWarpColumns][kTileRows];
  float4 outer[kD / kWarpColumns][kTileRows];
  alignas(16) float w[kD], b[kD];

  // By all threads of the block: what warps that D does not need would put.
  __device__ void clear() {
    float2* all = &inner[0][0];
    for (unsigned i = threadIdx.x; i < sizeof(*this) / sizeof(float2); i += blockDim.x) all[i] = make_float2(0, 0);
  }
};

// .. and by those of the chain the sums of dn, x dn, w^2 dn, w^2 x dn and y dn.
template <int kD>
struct ChainSums {
  float4 four[kD / kWarpColumns][kTileRows];
  float fifth[kD / kWarpColumns][kTileRows];
};

template <int kD, int kPartners>
struct ReverseShared {
  static constexpr int kGroups = kPartners, kStages = kGroupStages<kD>, kBuffers = kGroupBuffers<kD>;

  ReverseStage<kD> stages[kGroups][kGroupStages<kD>];
  ReverseExchange<kD> exchange[kGroups][kGroupBuffers<kD>];
  GroupSums<kD> sums[kGroups];
  ChainSums<kD> chain_sums;
  alignas(16) double parameters[1 + kGroups][2][kD];  // dw and db of the chain and of the groups
};

// ---- Partners with a mini-batch each, reverse_solo.cuh --------------------------------------------------------------

// What the chain and a partner hand to each other, in the same order. What a warp of the chain is done with makes room for
// what it writes: dh comes over its columns of x and u, dz over dyo.
struct SoloExchange {
  static constexpr int kWarps = kSoloDim / kWarpColumns, kRow = kSoloDim + 16;
  static constexpr bool kGradientOverRows = true;

  union WarpColumns {
    float4 x_and_u[2][2][kWarpSize];
    uint16_t dh[kSoloDim * kWarpColumns];
  };

  alignas(128) WarpColumns columns[kWarps];
  alignas(16) float base[kTileRows * kRow];
  uint4 dyo_or_dz[kWarps][kWarpSize];
  RowTerms rows[kTileRows];
  float nF[kWarps][kWarpSize];
  float dz_unit[kWarps];

  __device__ __forceinline__ float4& x(int w, int half, int lane) { return columns[w].x_and_u[0][half][lane]; }
  __device__ __forceinline__ float4& u(int w, int half, int lane) { return columns[w].x_and_u[1][half][lane]; }
  __device__ __forceinline__ uint4& dyo(int w, int lane) { return dyo_or_dz[w][lane]; }
  __device__ __forceinline__ uint4& dz(int w, int lane) { return dyo_or_dz[w][lane]; }
  __device__ __forceinline__ StateTile<kSoloDim> gradient() { return {columns[0].dh}; }
};

struct SoloShared {
  static constexpr int kGroups = kSolos, kStages = 2, kBuffers = 1;

  ReverseStage<kSoloDim> stages[kSolos][kStages];  // of the mini-batch in hand and of the next one
  SoloExchange exchange[kSolos][kBuffers];
  ChainSums<kSoloDim> chain_sums;
  alignas(16) float w[kSoloDim], b[kSoloDim];
  alignas(16) double parameters[1 + kSolos][2][kSoloDim];
};

// For bf16 and fp16, a file each.
template <DType kType>
void launch_keep_states(const ChainConfig& config, const ChunkArgs& args, const Context& context);
template <DType kType>
void launch_reverse(const ReverseConfig& config, const ReverseArgs& args, const Context& context);
// .. for D above 64.
template <DType kType>
void launch_wide_reverse(const ReverseConfig& config, const ReverseArgs& args, const Context& context);

}  // namespace fastweight::cuda::ttt
