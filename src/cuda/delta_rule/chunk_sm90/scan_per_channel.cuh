// The scan over the chunks of a sequence on Hopper, for one decay per key channel: as scan.cuh, with the
// decays and norms inside three copies of the keys, which the factors made. See ../chunk.cuh for the equations. A state
// warpgroup goes through a chunk with five groups of products:
//
//     X = S^T reader^T               while it runs, o of the chunk before goes to shared memory
//     O = S^T query^T
//     Y = bD^T J^T                   bD^T = beta (v^T - X)
//     S = S + R^T writer             R^T = Y, rounded
//     O = O + R^T sP^T               while it runs, S is rounded for the next chunk, and scaled by its e_n, a number per
//                                    channel
//
// With K <= 64 two blocks of 64 columns are on a multiprocessor, and with K above 128 two warpgroups have half of the channels
// of 64 columns each, as in scan.cuh.
//
// A chunk has 80 KB of operands, K <= 64 40 KB, and memory is what binds. They come in three rings, in the order in which
// they are used, so that the copies of a later chunk begin where a product of this one has ended:
//
//     read     reader, v, beta, e_n    until bD is made
//     solve    query, J                until R is there
//     write    writer, sP              until the chunk's end
//
// The last warpgroup brings them and stores o, which a warpgroup of the state hands over with the barriers `there` and
// `taken` of its columns. o is announced a good while after it was written, behind products that the tensor cores are then
// busy with: the fence before that waits until the writes have ended. The states before chunks go the same way where a
// tensor map can describe them and K is above 64: written by the threads that have them, every store would touch eight lines.
//
// Beside the factors' kernel (beside.h) each thread that fills a ring waits for the flag of the chunk first.
//
// Rows beyond the tokens of a chunk are zeros in the copies of the keys and in v. A scan of maps (segment_plan.h) has neither
// O nor its operands.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_sm90/scan_channel_operands.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

// What bD^T = beta (v^T - X) is made of beside X.
struct ChannelValues {
  Fragments<kTokenSteps> v;
  float2 beta[kTokenTiles];

  __device__ __forceinline__ void load(const ValueTile& values, const float* factors, int warp, int lane) {
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) values.load_c_transposed(16 * m, warp, lane, v[m]);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) beta[n] = column_pair(factors, n, lane);
  }

  // Tokens [16 m, 16 m + 16) of bD^T, rounded.
  template <DType kType>
  __device__ __forceinline__ void correct(int m, const TokenSums& X, uint32_t (&bD)[4]) const {
    float scaled[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = 2 * m + h;
      const float2 low = unpack<kType>(v[m][2 * h]), high = unpack<kType>(v[m][2 * h + 1]);
      const float difference[4] = {low.x - X[n][0], low.y - X[n][1], high.x - X[n][2], high.y - X[n][3]};
      scale_tile(beta[n], difference, scaled[h]);
    }
    pack_a<kType>(scaled[0], scaled[1], bD);
  }
};

// A warpgroup of the state.
template <DType kType, class Shape>
struct ChannelStateGroup {
  static constexpr bool kMaps = Shape::kMakesMaps, kSends = Shape::kSendsStates, kHalves = Shape::kHalves;
  static constexpr int kParts = kHalves ? 2 : 1, kK = Shape::kWidth / kParts;  // channels of the warpgroup
  using Keys = KeyTile<kK>;
  using Columns = StateColumns<kK, Shape::kRanges, kParts>;
  const Columns& own;
  typename Shape::Shared& s;

  // Which half of the channels, and where it lies in a copy of the keys.
  __device__ __forceinline__ int half() const { return kHalves ? own.first_channel / kK : 0; }
  __device__ __forceinline__ Keys own_keys(const unsigned char* memory) const {
    return Keys(memory + half() * Keys::kBytes);
  }
  // O of the second half goes to the first, which alone has outputs.
  __device__ __forceinline__ bool has_outputs() const { return half() == 0; }

  // S^T before a chunk and o^T of the one before it to shared memory, whose tiles are free, from where they are stored once
  // they are announced.
  __device__ __forceinline__ void put_state(const Fragments<kKeySteps<kK>>& S) const {
    const StateTile<kK> tile(s.S[own.group]);
#pragma unroll
    for (int m = 0; m < kKeySteps<kK>; ++m) tile.store_a(16 * own.warp, m, own.lane, S[m]);
  }
  __device__ __forceinline__ void put_outputs(const Fragments<kTokenSteps>& o) const {
    if (!has_outputs()) return;
    const ValueTile tile(s.o[own.group]);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) tile.store_c_transposed(16 * m, own.warp, own.lane, o[m]);
  }
  __device__ __forceinline__ void announce() const {
    if (!has_outputs()) return;
    fence_async_proxy();
    __syncwarp();
    if (own.lane == 0) s.handed[own.group].there.arrive();
  }
  // The tiles are free when what they had before has left.
  __device__ __forceinline__ void wait_taken(typename Shape::Turns& turn) const {
    if (!has_outputs()) return;
    s.handed[own.group].taken.wait(turn.handed ^ 1);
    turn.handed ^= 1;
  }

  // Until the chunk has what it begins with.
  __device__ __forceinline__ void wait_for_chunk(const typename Shape::Turns& turn) const {
    s.of_read.filled[turn.read.at].wait(turn.read.parity);
    s.of_solve.filled[turn.other.at].wait(turn.other.parity);
  }
  // The state before chunk c as the product that advances it wants it.
  __device__ __forceinline__ void scale_state(const typename Shape::Turns& turn, StateSums<kK>& S) const {
#pragma unroll
    for (int n = 0; n < kKeyTiles<kK>; ++n) {
      scale_tile(column_pair(s.total[turn.read.at] + kK * half(), n, own.lane), S[n], S[n]);
    }
  }

  // What products read, and what a chunk hands to the next one, rounded.
  struct Rounded {
    Fragments<kKeySteps<kK>> S;
    Fragments<kTokenSteps> o, R;
  };

  // As in scan.cuh, a turn of the loop ends where no product is on its way: with R^T in X, and O, and S, scaled, ready for the two
  // products with R. What the next chunk begins with is waited for beside the last products.
  __device__ __forceinline__ void run() const {
    typename Shape::Turns turn;
    const int chunks = own.walk.chunks;
    StateSums<kK> S = {};
    if constexpr (kMaps) {
      own.begin_map(S);
    } else {
      own.load_first_state(S);
    }
    if (chunks > 0) {
      Rounded rounded;
      TokenSums X, O;
      round_sums<kType, kKeySteps<kK>>(S, rounded.S);
      wait_for_chunk(turn);
      start_chunk(0, turn, S, X, rounded);
      solve_chunk(0, turn, S, X, O, rounded);
      for (int c = 1; c < chunks; ++c) {
        const int at = turn.other.at;
        advance(turn, S, X, O, rounded);
        turn.next();
        wait_for_chunk(turn);
        if constexpr (kMaps) {
          wgmma_wait<0>(S);
        } else {
          wgmma_wait<1>(S);
        }
        round_sums<kType, kKeySteps<kK>>(S, rounded.S);
        start_chunk(c, turn, S, X, rounded);
        if constexpr (!kMaps) {
          wgmma_wait<1>(O);
          round_sums<kType, kTokenSteps>(O, rounded.o);
        }
        release(s.of_write.free[at], own.lane);
        solve_chunk(c, turn, S, X, O, rounded);
      }
      advance(turn, S, X, O, rounded);
      if constexpr (kMaps) {
        wgmma_wait<0>(S);
      } else {
        wgmma_wait<0>(S, O);
        round_sums<kType, kTokenSteps>(O, rounded.o);
        if constexpr (kSends) wait_taken(turn);
        put_outputs(rounded.o);
        announce();
      }
    }
    if constexpr (kMaps) {
      own.end_map(S);
    } else {
      own.save_state(chunks, true, S);
    }
  }

  // X = S^T reader^T, on its way after that.
  __device__ __forceinline__ void start_chunk(int c, const typename Shape::Turns& turn, StateSums<kK>& S, TokenSums& X,
                                              Rounded& rounded) const {
    if constexpr (!kMaps && !kSends) {
      if (own.args.state_width > 0) {
        own.save_rounded_state(c, rounded.S);
      } else if (own.args.chunk_states.present()) {
        own.save_state(c, false, S);
      }
    }
    const Keys reader = own_keys(s.read[turn.read.at].reader);
    wgmma_fence(X, rounded.S);
#pragma unroll
    for (int m = 0; m < kKeySteps<kK>; ++m) {
      wgmma<kType, kChunkRows>(X, rounded.S[m], reader.along_rows(0, m), m > 0);
    }
    wgmma_commit();
  }

  // From X on its way to R^T in its place; O = S^T query^T, and S scaled.
  __device__ __forceinline__ void solve_chunk(int c, typename Shape::Turns& turn, StateSums<kK>& S, TokenSums& X,
                                              TokenSums& O, Rounded& rounded) const {
    const int first = turn.read.at, at = turn.other.at;
    const Keys query = own_keys(s.solve[at].query);
    const LowerTile J(s.solve[at].J);
    ChannelValues values;
    values.load(ValueTile(s.read[first].v[own.group]), s.beta[first], own.warp, own.lane);
    if constexpr (kMaps) {
      wgmma_wait<0>(X);
    } else {
      if constexpr (kSends) {
        wait_taken(turn);  // later than without states, which take longer to leave
        put_state(rounded.S);
      }
      if (c > 0) put_outputs(rounded.o);
      wgmma_fence(O);
#pragma unroll
      for (int m = 0; m < kKeySteps<kK>; ++m) {
        wgmma<kType, kChunkRows>(O, rounded.S[m], query.along_rows(0, m), m > 0);
      }
      wgmma_commit();
      wgmma_wait<1>(X);
    }
    if constexpr (kHalves) exchange_halves(s.halves, half(), kWarpSize * own.warp + own.lane, X);
    Fragments<kTokenSteps> bD;
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) values.template correct<kType>(m, X, bD[m]);
    wgmma_fence(X, bD);
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(X, bD[m], J.along_rows(0, m), m > 0);
    wgmma_commit();
    scale_state(turn, S);
    release(s.of_read.free[first], own.lane);
    if constexpr (!kMaps) {
      if (kSends || c > 0) announce();
    }
    s.of_write.filled[at].wait(turn.other.parity);
    if constexpr (kMaps) {
      wgmma_wait<0>(X);
    } else {
      wgmma_wait<0>(X, O);
    }
    if constexpr (kHalves) hand_half(s.halves, half(), kWarpSize * own.warp + own.lane, O);
    release(s.of_solve.free[at], own.lane);
  }

  // S = S + R^T writer and O = O + R^T sP, on their way after that.
  __device__ __forceinline__ void advance(typename Shape::Turns& turn, StateSums<kK>& S, const TokenSums& X,
                                          TokenSums& O, Rounded& rounded) const {
    const auto& write = s.write[turn.other.at];
    const Keys writer = own_keys(write.writer);
    const LowerTile sP(write.sP);
    auto& R = rounded.R;
#pragma unroll
    for (int m = 0; m < kTokenSteps; ++m) {
      pack_a<kType>(X[2 * m], X[2 * m + 1], R[m]);
      m == 0 ? wgmma_fence(S, R[m]) : wgmma_fence(R[m]);
      wgmma<kType, kK>(S, R[m], writer.along_columns(0, m));
    }
    wgmma_commit();
    if constexpr (!kMaps) {
      wgmma_fence(O);
#pragma unroll
      for (int m = 0; m < kTokenSteps; ++m) wgmma<kType, kChunkRows>(O, R[m], sP.along_rows(0, m));
      wgmma_commit();
      if constexpr (!kSends) wait_taken(turn);
    }
  }
};

// A block per part.
template <DType kType, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksOnOne)
    channel_scan_kernel(const __grid_constant__ ForwardArgs args, const __grid_constant__ ChannelScanMaps maps) {
  auto& s = aligned_shared<typename Shape::Shared>();
  if (threadIdx.x == 0) {
    s.of_read.init(Shape::kStateWarps);
    s.of_solve.init(Shape::kStateWarps);
    s.of_write.init(Shape::kStateWarps);
    for (typename Shape::Handed& handed : s.handed) {
      handed.there.init(kGroupWarps);
      handed.taken.init(1);
    }
    fence_barrier_init();
  }
  // Otherwise the kernel before this one has waited for those before it, and its flags say what is there.
  if (args.published == nullptr) wait_for_previous_kernels();
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    s.work = work_at<Shape::kWidth, Shape::kMakesMaps>(args, blockIdx.x, Shape::kColumns);
    const auto& [part, walk, is_tail] = s.work;
    s.first_item = static_cast<int>(args.factors_at(walk.first_chunk)) + part.head;
    s.first_copy = static_cast<int>(args.copies_at(walk.first_chunk)) + part.head;
    if (!Shape::kMakesMaps && args.published != nullptr) {
      s.flags[0] = s.flags[1] = s.flags[2] = flags_of(args, part, walk, args.problem.num_value_heads, part.head);
    }
  }
  __syncthreads();
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (warp >= Shape::kStateWarps) {
    if constexpr (Shape::kTakesRegisters) give_registers<Shape::kOtherRegisters>();
    const int servant = warp - Shape::kStateWarps;
    if (s.work.walk.exists && elect_one()) {
      if (servant < ChannelScanBringer<Shape>::kRings) {
        ChannelScanBringer<Shape>{args, maps, s}.run(servant);
      } else if constexpr (!Shape::kMakesMaps) {
        ChannelScanStorer<Shape>{args, maps, s}.run();
      }
    }
  } else {
    if constexpr (Shape::kTakesRegisters) take_registers<Shape::kStateRegisters>();
    const auto& [part, walk, is_tail] = s.work;
    using Group = ChannelStateGroup<kType, Shape>;
    const int group = warp / kGroupWarps;
    const typename Group::Columns own{args,
                                      part,
                                      walk,
                                      is_tail,
                                      Shape::kHalves ? 0 : group,
                                      warp % kGroupWarps,
                                      opaque_below<kWarpSize>(lane),
                                      Shape::kHalves ? Group::kK * group : 0};
    if (walk.exists) Group{own, s}.run();
  }
  if (args.published == nullptr) return;
  __syncthreads();  // a warp that waits for the kernel before keeps its other lanes from working
  wait_for_previous_kernels();
}

template <DType kType, class Shape>
void launch_channel_scan_of(const ForwardArgs& args, const ChannelScanMaps& maps, const Context& context) {
  const auto parts = static_cast<unsigned>(count_forward_parts<Shape::kMakesMaps>(args, Shape::kColumns));
  launch<channel_scan_kernel<kType, Shape>>("delta_rule chunk_sm90 scan per channel", context,
                                            {parts, Shape::kThreads, sizeof(typename Shape::Shared), true}, args, maps);
}

}  // namespace

template <DType kType>
void launch_channel_scan(const ForwardArgs& args, const ChannelScanMaps& maps, int columns, const Context& context) {
  const auto of = [&]<class Shape>() { launch_channel_scan_of<kType, Shape>(args, maps, context); };
  const auto with = [&]<ChannelMakes kMakes>() {
    columns == kGroupColumns ? of.template operator()<ChannelBlock<128, 1, kMakes>>()
                             : of.template operator()<ChannelBlock<128, 2, kMakes>>();
  };
  if (args.segments.chunks > 0) {
    of.template operator()<ChannelBlock<128, 2, ChannelMakes::kMaps>>();
    launch_compose(args, context);
  }
  const int K = padded_k(args.problem.head_dim_k);
  if (K == 64) {
    of.template operator()<ChannelBlock<64, 1, ChannelMakes::kOutputs>>();
  } else if (K == 256) {
    of.template operator()<ChannelBlock<256, 1, ChannelMakes::kOutputs>>();
  } else {
    maps.has_states ? with.template operator()<ChannelMakes::kOutputsAndStates>()
                    : with.template operator()<ChannelMakes::kOutputs>();
  }
}

}  // namespace fastweight::cuda::chunk_sm90
