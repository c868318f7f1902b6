// A thread of the warpgroups that make the gradients with a decay per channel (gradients_per_channel.cuh): which
// channels, value columns and tokens it has, and its gates and dg on their way from and to memory.
#pragma once

#include "cuda/delta_rule/chunk_sm90/gradient_gates.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

enum {
  kDifferencesReady = 5,
  kChannelWritesReady,
  kChannelPairsReady,
  kRoundsDone,
  kPartsReady,
  kTotalsReady,
  kSharesReady
};

// Among the warpgroups of a side.
__device__ __forceinline__ void side_barrier(int side) {
  side == 0 ? named_barrier<3>(kSideThreads) : named_barrier<4>(kSideThreads);
}

// kNorm: q and k have an l2 norm. kRanges: a head has several items, each with a range of its value columns.
template <DType kType, class Block, bool kNorm, bool kRanges>
struct ChannelGroup {
  static constexpr int kWidth = Block::kWidth, kSides = Block::kSides, kWorkers = Block::kWorkers;
  using Keys = typename Block::Keys;
  const GradientArgs& args;
  const ChannelGradientMaps& maps;
  typename Block::Shared& s;
  uint32_t state;  // the thread of all that work, and how many items came before
  int thread = 0, lane = 0;
  int side = 0, half = 0, warp = 0;  // the warp within the warpgroup
  uint32_t turn = 0;

  // What is known of the thread and of the turn from here on is computed here, from one register.
  __device__ __forceinline__ void forget() {
    state = static_cast<uint32_t>(opaque(static_cast<int>(state)));
    thread = static_cast<int>(state % kWorkers);
    lane = thread % kWarpSize;
    turn = state / kWorkers;
    const int at = __shfl_sync(kAllLanes, thread / kWarpSize, 0);
    side = at / kGroupWarps % kSides;
    half = at / (kSides * kGroupWarps);
    warp = at % kGroupWarps;
  }

  __device__ __forceinline__ const Item& item_now() const { return s.items[turn % 2]; }
  __device__ __forceinline__ const ChannelNumbers& numbers_now() const { return s.numbers[turn % 2]; }

  // Where its tokens begin, its 64 channels or value columns, and of the channels the warp's 16; tile m of its tokens.
  __device__ __forceinline__ int first_token() const { return kHalfRows * half; }
  __device__ __forceinline__ int first_of_side() const { return kGroupColumns * side; }
  __device__ __forceinline__ int block_of_channels() const { return kGroupWarps * side + warp; }
  __device__ __forceinline__ int tile_row(int m) const { return first_token() + kTileRows * m; }

  // Two numbers per token, of C tile n.
  __device__ __forceinline__ float2 pair_of(const float* numbers, int n) const {
    return column_pair(numbers + first_token(), n, lane);
  }
  __device__ __forceinline__ float2 norm_of(const float* rstd, int n) const {
    return kNorm ? pair_of(rstd, n) : make_float2(1, 1);
  }
  __device__ __forceinline__ OwnGates own_gates(const Item& item) const {
    const int channel = 16 * block_of_channels() + lane / 4, token = first_token() + 2 * (lane % 4);
    const int tokens = static_cast<int>(item.span.length), K = args.chunk.problem.head_dim_k;
    return {channel, token, tokens - token, K - channel, tokens == kChunkRows && K == kWidth};
  }

  // In a block that serves itself, a warp that has nothing else to do while the first products run.
  __device__ __forceinline__ bool serves() const { return half == 1 && warp == 2; }
  __device__ __forceinline__ OwnBringer<Block, kRanges> bringer(uint32_t of_turn) const {
    return {args, maps, s, lane, of_turn};
  }
  __device__ __forceinline__ void release_pairs() const {
    release(s.pairs_free, lane);
    if constexpr (Block::kServesItself) {
      if (serves()) bringer(turn + 1).bring_pairs();
    }
  }
  // By one thread of a side.
  __device__ __forceinline__ bool stores_side() const { return half == 0 && thread % kGroupThreads == 0; }

  __device__ __forceinline__ unsigned char* gates_place(bool first) const {
    return s.gates(args.chunk.problem.g.dtype == DType::kF32, first);
  }
  // The gates as the maps have brought them to `place`, and dg as it leaves from there. Of 32 bits, four elements lie where
  // eight of 16 bits do.
  template <class Body>
  __device__ __forceinline__ void for_each_wide(unsigned char* place, const Body& body) const {
    const int block = block_of_channels();
    const uint32_t own = static_cast<uint32_t>(block / 2 * kPanelBytes);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = first_token() + 2 * (lane % 4) + e % 2, segment = 4 * (block % 2) + e / 2 * 2 + lane / 16;
      const uint32_t at = own + static_cast<uint32_t>(128 * row + ((segment ^ row) & 7) * 16 + lane / 4 % 4 * 4);
#pragma unroll
      for (int n = 0; n < kHalfRows / 8; ++n) body(n, e, *reinterpret_cast<float*>(place + at + 8 * 128 * n));
    }
  }
  __device__ __forceinline__ void read_gates(unsigned char* place, ChannelSums& x) const {
    with_type(args.chunk.problem.g.dtype, [&](auto type) {
      constexpr DType kGate = decltype(type)::value;
      if constexpr (kGate == DType::kF32) {
        for_each_wide(place, [&](int n, int e, const float& gate) { x[n][e] = gate; });
      } else {
#pragma unroll
        for (int m = 0; m < kHalfTiles; ++m) {
          TileWords words;
          Keys(place).load_c_transposed(tile_row(m), block_of_channels(), lane, words);
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float2 pair = unpack<kGate>(words[w]);
            x[2 * m + w / 2][w % 2 * 2] = pair.x;
            x[2 * m + w / 2][w % 2 * 2 + 1] = pair.y;
          }
        }
      }
    });
  }
  __device__ __forceinline__ void write_gates(unsigned char* place, const ChannelSums& x) const {
    with_type(args.chunk.problem.g.dtype, [&](auto type) {
      constexpr DType kGate = decltype(type)::value;
      if constexpr (kGate == DType::kF32) {
        for_each_wide(place, [&](int n, int e, float& gate) { gate = x[n][e]; });
      } else {
#pragma unroll
        for (int m = 0; m < kHalfTiles; ++m) {
          TileWords words;
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float(&tile)[4] = x[2 * m + w / 2];
            words[w] = pack<kGate>(tile[w % 2 * 2], tile[w % 2 * 2 + 1]);
          }
          Keys(place).store_c_transposed(tile_row(m), block_of_channels(), lane, words);
        }
      }
    });
  }

  // By one thread of a side, when all of it have written dg, and have read the gates.
  __device__ __forceinline__ void store_gates(const Item& item) const {
    fence_async_proxy();
    side_barrier(side);
    if (!stores_side()) return;
    const bool wide = args.chunk.problem.g.dtype == DType::kF32;
    if (args.dg.present()) {
      const RowsPlace at = rows_of(item, item.head);
      const uint32_t from =
          shared_address(gates_place(false)) + static_cast<uint32_t>(side * (wide ? 2 : 1) * kPanelBytes);
      const int column = first_of_side(), K = args.chunk.problem.head_dim_k;
      if (column < K) store_box(maps.dg, {column, at.head, at.missing, at.end, at.batch}, from);
      if (wide && column + kGroupColumns / 2 < K) {
        store_box(maps.dg, {column + kGroupColumns / 2, at.head, at.missing, at.end, at.batch}, from + kPanelBytes);
      }
    }
    commit_stores();
    if (wide) {
      wait_stores_read<0>();
      s.gates_free.arrive();
    }
  }

  // Of an item that leaves no dg: the gates' place becomes free without it.
  __device__ __forceinline__ void pass_gates() const {
    if (maps.has_gates && args.chunk.problem.gate_in_kernel) s.gates_again.wait(turn % 2);
    if (stores_side()) {
      if (item_now().last) s.keys_free.arrive();
      if (maps.has_gates && args.chunk.problem.g.dtype == DType::kF32) s.gates_free.arrive();
    }
  }

  // From dg to the gradient of what the gate tensor holds, and the chunk's share of the gate's parameters.
  __device__ __forceinline__ void finish_gates(const Item& item, const ChannelGate& gate, ChannelSums& dg) const {
    const DeltaRuleDeviceProblem& p = args.chunk.problem;
    const OwnGates own = own_gates(item);
    OfChannels bias = {0, 0};
    float a_log = 0;
    if (p.gate_in_kernel) {
      ChannelSums x;
      if (maps.has_gates) {
        s.gates_again.wait(turn % 2);
        read_gates(gates_place(false), x);
        __syncwarp();
      } else {
        load_channel_gates(p, item, own, x);
      }
      own.clear_others(dg);
      const float rate = gate.rate();
      chunk_16bit::with_gate_kind(p, [&](auto kind) {
#pragma unroll
        for (int n = 0; n < 2 * kHalfTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const GateTerms terms = chunk_16bit::gate_of<decltype(kind)::value>(p, x[n][e], rate, gate.bias[e / 2]);
            a_log = fmaf(terms.a_log, dg[n][e], a_log);
            dg[n][e] *= terms.dx;
            bias[e / 2] += dg[n][e];
          }
        }
      });
    }
    const DeviceTensor& out = args.dg;
    if (maps.has_gates) {
      if (out.present()) write_gates(gates_place(false), dg);
      store_gates(item);
    } else if (out.present()) {
      with_type(out.dtype, [&](auto type) {
        constexpr DType kOut = decltype(type)::value;
        own.for_each<kOut>(out, item, [&](int n, int e, char* at) { store_float(at, kOut, 0, dg[n][e]); });
      });
    }
    if (args.parameter_parts != nullptr) leave_parameters(item, own, bias, a_log);
  }

  // The chunk's share of the gate's parameters: one warp adds what all have left, and the others do not wait for it.
  __device__ __forceinline__ void leave_parameters(const Item& item, const OwnGates& own, OfChannels& bias,
                                                   float a_log) const {
#pragma unroll
    for (int distance = 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) bias[h] += __shfl_xor_sync(kAllLanes, bias[h], distance);
      a_log += __shfl_xor_sync(kAllLanes, a_log, distance);
    }
    a_log += __shfl_xor_sync(kAllLanes, a_log, 4);
    if (lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) s.exchange.bias[half][own.channel + 8 * h] = bias[h];
      if (lane % 8 == 0) s.exchange.a_log[thread / 8] = a_log;
    }
    if (thread < kWorkers - kWarpSize) return arrive_at_named_barrier<kSharesReady>(kWorkers);
    named_barrier<kSharesReady>(kWorkers);
    const int64_t K = args.chunk.problem.head_dim_k;
    double* parts = args.parameter_parts + item.at * (1 + K) + 1;
#pragma unroll
    for (int i = 0; i < kWidth / kWarpSize; ++i) {
      const int channel = kWarpSize * i + lane;
      if (channel < K) parts[channel] = double{s.exchange.bias[0][channel]} + s.exchange.bias[1][channel];
    }
    double sum = s.exchange.a_log[lane];
    if constexpr (kSides == 2) sum += s.exchange.a_log[kWarpSize + lane];
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    if (lane == 0) parts[-1] = sum;
  }
};

}  // namespace
}  // namespace fastweight::cuda::chunk_sm90
