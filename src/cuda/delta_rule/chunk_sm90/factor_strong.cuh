// Strong tiles on the diagonals of A and sP in the factors with a decay per channel (factors_per_channel.cu): decays too strong
// to be divided by.
//
// Tokens j < i of a tile lie in the two halves of a block of 16, 8, 4 or 2 tokens, j in the lower one and i in the upper one.
// With m the last token of the lower half neither factor of
//
//     2^(c_i - c_j) = 2^(c_i - c_m) 2^(c_m - c_j)
//
// is above 1, whatever the decays. So there is a product for the blocks of each size, in which a token has one factor, that of
// its half, and of all pairs of tokens those count that lie in the two halves of one block. The diagonal of sP has no decays.
//
// A warp has the tile and the panel of channels that its threads have the sums of. Of two warps with a tile each finishes one
// of the two products.
#pragma once

#include "cuda/delta_rule/chunk_sm90/factor_lower.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

template <DType kType, int kK>
struct StrongTile {
  static constexpr int kPanels = KeyTile<kK>::kPanels, kColumns = KeyTile<kK>::kPanelColumns;
  static constexpr int kHalf = kRows / 2;
  Shared<kK>& s;
  int warp, lane;  // of the team

  __device__ __forceinline__ int tile() const { return warp / kPanels; }
  __device__ __forceinline__ int panel() const { return warp % kPanels; }
  __device__ __forceinline__ bool finishes_A() const { return panel() == 0; }
  __device__ __forceinline__ bool finishes_P() const { return panel() == kPanels - 1; }

  // Four channels of c of a row, summed from the start of its half of the tile; those of neighbouring rows are in other banks.
  __device__ __forceinline__ float4& sum(int row, int channel) const {
    return four_at(s.half_sums + (warp * kRows + row) * kColumns + (channel ^ row % 2 * 16));
  }
  __device__ __forceinline__ void put(const Sums& own) const {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) sum(lane / 16 * kHalf + i, lane % 16 * kOwnChannels) = own.unit * own.c[i];
    __syncwarp();
  }
  __device__ __forceinline__ void take(Sums& own) const {
    own.unit = 1;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) own.c[i] = sum(lane / 16 * kHalf + i, lane % 16 * kOwnChannels);
    __syncwarp();
  }

  // The products for blocks of twice `half` tokens: k k^T and q k^T. A lane has rows g and g + 8 on either side, and the same four
  // of 16 channels.
  template <bool kWholeTile>
  __device__ __forceinline__ void multiply(int half, GramBlock& of_k, GramBlock& of_q) const {
    const int g = lane / 4, last = (g & -2 * half) | (half - 1);  // of the lower half of the block
    const bool upper = (g & half) != 0;
#pragma unroll 1
    for (int n = 0; n < kColumns / 16; ++n) {
      const int channel = 16 * n + lane % 4 * 4;
      uint2 k[2], q[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float4 fall;
        if constexpr (kWholeTile) {
          fall = h == 0 ? sum(kHalf - 1, channel) - sum(g, channel) : sum(g + kHalf, channel);
        } else {
          const int row = g + kHalf * h, middle = last + kHalf * h;
          fall = sum(upper ? row : middle, channel) - sum(upper ? middle : row, channel);
        }
        const float4 decay = exp2_approx(fall);
        const uint32_t at = key_offset<kK>(kRows * tile() + g + kHalf * h, panel() * kColumns + channel);
        k[h] = pack<kType>(decay * unpack<kType>(four_at(s.k, at)));
        q[h] = pack<kType>(decay * unpack<kType>(four_at(s.q, at)));
      }
      const uint32_t k_rows[4] = {k[0].x, k[1].x, k[0].y, k[1].y}, q_rows[4] = {q[0].x, q[1].x, q[0].y, q[1].y};
#pragma unroll
      for (int m = kWholeTile ? 1 : 2; m-- > 0;) {
        mma<kType>(of_k[m], k_rows, k[m].x, k[m].y);
        mma<kType>(of_q[m], q_rows, k[m].x, k[m].y);
      }
    }
  }

  // Of the products, what counts: of tokens that differ in `half`, and in no higher bit.
  __device__ __forceinline__ void select(int half, const GramBlock& products, GramBlock& result) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int i = lane / 4 + e / 2 % 2 * kHalf, j = e / 4 * kHalf + 2 * (lane % 4) + e % 2;
      if (static_cast<uint32_t>((i ^ j) - half) < static_cast<uint32_t>(half))
        result[e / 4][e % 4] = products[e / 4][e % 4];
    }
  }
  __device__ __forceinline__ void add_diagonal(GramBlock& P) const {
    const KeyTile<kK> k(s.k), q(s.q);
    GramBlock products = {};
#pragma unroll
    for (int m = 0; m < kColumns / 16; ++m) {
      uint32_t a[4], b[4];
      q.load_a(kRows * tile(), panel() * (kColumns / 16) + m, lane, a);
      k.load_b(kRows * tile(), panel() * (kColumns / 16) + m, lane, b);
#pragma unroll
      for (int n = 0; n < 2; ++n) mma<kType>(products[n], a, b[2 * n], b[2 * n + 1]);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int i = lane / 4 + e / 2 % 2 * kHalf, j = e / 4 * kHalf + 2 * (lane % 4) + e % 2;
      if (i == j) P[e / 4][e % 4] = products[e / 4][e % 4];
    }
  }

  // The panel's share of both tiles, below the diagonal, and of sP on it.
  __device__ __forceinline__ void multiply(GramBlock& A, GramBlock& P) const {
    multiply<true>(kHalf, A, P);
#pragma unroll 1
    for (int half = kHalf / 2; half > 0; half /= 2) {
      GramBlock of_k = {}, of_q = {};
      multiply<false>(half, of_k, of_q);
      select(half, of_k, A);
      select(half, of_q, P);
    }
    add_diagonal(P);
  }

  // Of two warps with a tile, what the other one finishes, in the place of the sums.
  __device__ __forceinline__ float4* handed(int from) const {
    return reinterpret_cast<float4*>(s.half_sums + from * kRows * kColumns) + lane;
  }
  __device__ __forceinline__ void hand_over(const GramBlock& A, const GramBlock& P) const {
    if constexpr (kPanels == 2) {
      const auto other = [&](int n, int e) { return finishes_A() ? P[n][e] : A[n][e]; };
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        handed(warp)[n * kWarpSize] = make_float4(other(n, 0), other(n, 1), other(n, 2), other(n, 3));
      }
    }
  }
  // Added to both: which of them it belongs to is not known to the compiler.
  __device__ __forceinline__ void take_over(GramBlock& A, GramBlock& P) const {
    if constexpr (kPanels == 2) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float4 x = handed(warp ^ 1)[n * kWarpSize];
        for (GramBlock* block : {&A, &P}) {
          (*block)[n][0] += x.x, (*block)[n][1] += x.y, (*block)[n][2] += x.z, (*block)[n][3] += x.w;
        }
      }
    }
  }

  // With the norms, to where A lies in shared memory and sP outside of it.
  __device__ __forceinline__ void scale(bool of_A, GramBlock& block) const {
    const float2* on_rows = s.on_rows + kRows * tile();
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float2 on = on_rows[lane / 4 + e / 2 % 2 * kHalf];
      block[e / 4][e % 4] *= (of_A ? on.x : on.y) * on_rows[e / 4 * kHalf + 2 * (lane % 4) + e % 2].x;
    }
  }
  __device__ __forceinline__ void store(const ChunkArgs& args, GramBlock& A, GramBlock& P) const {
    if (finishes_A()) {
      scale(true, A);
      store_A<true>(s, InverseSteps{s.inverse, tile(), lane}, tile(), tile(), A);
    }
    if (finishes_P()) {
      scale(false, P);
      store_sP<true>(results_of<kType>(args, s.item.factors, lane), tile(), tile(), P);
    }
  }
};

// All strong tiles, before k and q are scaled. The sums have no registers meanwhile.
template <DType kType, class Team, int kK>
__device__ __forceinline__ void make_strong(Shared<kK>& s, const ChunkArgs& args, int warp, int lane, Sums& sums) {
  const StrongTile<kType, kK> own{s, warp, lane};
  const bool strong = s.strong[own.tile()];
  GramBlock A = {}, P = {};
  if (strong) {
    own.put(sums);
    own.multiply(A, P);
    own.take(sums);
    own.hand_over(A, P);
  }
  Team::barrier();
  if (strong) own.take_over(A, P);
  Team::barrier();  // A lies where the sums were
  if (strong) own.store(args, A, P);
}

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
