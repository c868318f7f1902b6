// The factors of the chunk form with no decay or one per head on Hopper. See ../chunk.cuh for the equations
// and chunk_16bit/chunk.cuh for what is written.
//
// A block fills a multiprocessor with warpgroups, each of which takes one pair of a chunk and a key head after the other,
// and goes through factor_steps.cuh for all value heads of the key head, which share the products. q and k of the next
// pair come by TMA as soon as both products have been made, its gates and beta while two warps of the four have nothing to
// do. Beside a scan (beside.h) some blocks have pairs left when the others leave, and one more warp publishes what all have made.
// Where nothing is made before the scan, the warpgroups begin one after the other: it waits for the first pairs, and one at a time
// takes less time for each than all at once.
#include <algorithm>
#include <limits>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_sm90/copies.cuh"
#include "cuda/delta_rule/chunk_sm90/factor_steps.cuh"
#include "cuda/delta_rule/chunk_sm90/publisher.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::ChunkFactors;

// Where a pair stands in the order of all: heads go first, then rows of the batch, then chunks of a row.
struct Place {
  int position, row, key_head;
};

// A warpgroup's pairs of a part of the order: the first, where that is, and how far the next ones are.
struct Stride {
  int first, end;
  Place place;
  int step;
  Place step_place;
};

// A chunk and a key head.
struct Pair {
  int number;  // in the order of all
  Place place;
  int item;                  // of the key head's first value head
  int batch, begin, length;  // tokens of the chunk; none: there is no such pair
};

// With q a warpgroup keeps two products in registers, and there is memory for fewer of them.
template <int kK, bool kWithP>
struct FactorShape {
  static constexpr int kGroups = factor_groups(kK, kWithP);

  struct alignas(1024) Shared {
    unsigned char k[KeyTile<kK>::kBytes], q[kWithP ? KeyTile<kK>::kBytes : 16];
    FactorScratch scratch;
    Pair pair[3];  // this one and the next two
    // Of the part of the order that the warpgroup is in, and of the one that the first blocks have.
    Stride stride, beside;
    uint32_t* made;  // the flag of the pair before
    int heads;       // of keys
    TransactionBarrier filled;
  };
  struct alignas(1024) BlockShared {
    Shared groups[kGroups];
    Publisher<kGroups> publisher;
    TransactionBarrier begun[kGroups];  // a warpgroup is in the midst of its first pair
  };
};

template <DType kType, int kK, bool kWithP>
struct FactorGroup {
  using Shape = FactorShape<kK, kWithP>;
  static constexpr int kGroups = Shape::kGroups;
  const ChunkArgs& args;
  const ScanMaps& maps;
  const FactorOrder& order;
  typename Shape::Shared& s;
  typename Shape::BlockShared& all;
  int group, warp, lane;  // the warp within the warpgroup

  __device__ __forceinline__ FactorSteps<kType, kK> steps() const {
    return FactorSteps<kType, kK>{args.problem, s.scratch, warp, lane}.anew();
  }
  __device__ __forceinline__ bool is_chosen() const { return warp == 0 && elect_one(); }
  __device__ __forceinline__ void barrier() const { warpgroup_barrier(group); }

  // The chunk at a position of a row of the window. With offsets there is one row, and maybe no such chunk.
  __device__ __forceinline__ void find_chunk(int row, int position, Pair& pair) const {
    const int C = static_cast<int>(args.chunked.chunk_size), in_row = static_cast<int>(args.window.begin) + position;
    const int chunk = row * static_cast<int>(args.window.row) + in_row;
    pair.item = args.factors_of_window ? row * static_cast<int>(args.window.width()) + position : chunk;
    pair.batch = row;
    if (args.chunked.first_chunk == nullptr) {
      pair.begin = in_row * C;
      pair.length = min(static_cast<int>(args.problem.sequences.tokens) - pair.begin, C);
    } else {
      const ChunkSpan span = chunk_at(args.chunked, chunk);
      pair.begin = static_cast<int>(span.begin);
      pair.length = static_cast<int>(span.length);
    }
  }

  __device__ __forceinline__ Place place_of(int n) const {
    const int turn = n / s.heads, position = turn / order.rows;
    return {position, turn - position * order.rows, n - turn * s.heads};
  }

  __device__ __forceinline__ void find_pair(int n, const Place& place, Pair& pair) const {
    pair.number = n;
    pair.place = place;
    pair.length = 0;
    if (n >= order.pairs) return;
    find_chunk(place.row, place.position, pair);
    pair.item = pair.item * args.problem.num_value_heads + place.key_head * args.problem.group;
  }
  // The one that this warpgroup takes after `last`, without divisions: all wait for the thread that finds it. At the end of a
  // part the first of the other part follows, or, where there is none, no pair.
  __device__ __forceinline__ void find_next(const Pair& last, Pair& pair) const {
    const Place step = s.stride.step_place;
    int n = last.number + s.stride.step;
    Place place{last.place.position + step.position, last.place.row + step.row, last.place.key_head + step.key_head};
    if (place.key_head >= s.heads) {
      place.key_head -= s.heads;
      ++place.row;
    }
    if (place.row >= order.rows) {
      place.row -= order.rows;
      ++place.position;
    }
    if (n >= s.stride.end) {
      begin_beside();
      n = s.stride.first;
      place = s.stride.place;
    }
    find_pair(n, place, pair);
  }
  __device__ __forceinline__ void begin_beside() const {
    s.stride = s.beside;
    s.beside = no_pairs();
  }
  __device__ __forceinline__ Stride no_pairs() const { return {order.pairs, order.pairs, {}, 1, {}}; }

  __device__ __forceinline__ void load_keys(const Pair& pair) const {
    if (pair.length == 0) return;
    s.filled.arrive_expecting((kWithP ? 2 : 1) * KeyTile<kK>::kBytes);
    const RowsPlace at{pair.place.key_head, kChunkRows - pair.length, pair.begin + pair.length, pair.batch};
    load_panels(KeyTile<kK>(s.k), maps.k, 0, args.problem.head_dim_k, at, s.filled);
    if constexpr (kWithP) load_panels(KeyTile<kK>(s.q), maps.q, 0, args.problem.head_dim_k, at, s.filled);
  }

  __device__ __forceinline__ int first_head(const Pair& pair) const { return pair.place.key_head * args.problem.group; }

  // Of value head h of a pair's key head, if there is such a pair, by warps 0 and 2.
  __device__ __forceinline__ chunk_16bit::RawGates load_tokens(const Pair& pair, int h) const {
    if (pair.length == 0) return {};
    return steps().load_tokens({0, pair.batch, pair.begin, pair.length, 0}, first_head(pair) + h);
  }
  __device__ __forceinline__ void finish_tokens(const chunk_16bit::RawGates& raw, const Pair& pair, int h,
                                                Tokens& tokens) const {
    if (pair.length == 0) return;
    steps().finish_tokens(raw, pair.length, first_head(pair) + h, tokens);
  }

  // By warps 0 and 2, one row in a thread.
  __device__ __forceinline__ void store_token_factors(const Tokens& tokens, int64_t item) const {
    const ChunkFactors& factors = args.factors;
    const FactorSteps<kType, kK> own = steps();
    own.template token_factors<kWithP>(tokens, factors.token + item * chunk_16bit::kTokenFactors<false> * kChunkRows,
                                       factors.total + item * 4);
    if (factors.row == nullptr) return;
    const int i = own.token_row();
    float* row = factors.row + item * chunk_16bit::kRowNumbers * kChunkRows + i;
    row[chunk_16bit::kGamma * kChunkRows] = tokens.gamma[i];
    row[chunk_16bit::kRstdOfQ * kChunkRows] = kWithP ? own.queries().rstd(i) : 0.0f;
    row[chunk_16bit::kRstdOfK * kChunkRows] = s.scratch.rstd_k[i];
  }

  // Until the warpgroup before this one has begun, and by one thread when this one has.
  __device__ __forceinline__ bool one_by_one() const { return order.flags != nullptr && order.before == 0; }
  __device__ __forceinline__ void wait_to_begin() const {
    if (one_by_one() && group > 0) all.begun[group - 1].wait(0);
  }
  __device__ __forceinline__ void let_next_begin() const {
    if (one_by_one() && is_chosen()) all.begun[group].arrive();
  }

  // The factors of the value heads of pair `at`. The tokens of the first head are there, and `turn` tells where.
  __device__ __forceinline__ void run_pair(int at, uint32_t parity, bool begins, int& turn) const {
    const int heads = args.problem.group;
    const Pair &pair = s.pair[at], &next = s.pair[(at + 1) % 3];
    Gram kk, qk;
    s.filled.wait(parity);
    steps().template multiply_keys<kWithP>(s.k, s.q, kk, qk);
    if constexpr (kWithP) fence_async_proxy();  // q has been read: the next one may come
#pragma unroll 1
    for (int h = 0; h < heads; ++h, turn ^= 1) {
      const Tokens& tokens = s.scratch.tokens[turn];
      const int item = pair.item + h;
      const GlobalResults<kType> results{args.factors.J(item), opaque_below<kWarpSize>(lane)};
      barrier();  // tokens and norms are there, and all have left the head before
      const bool more = h + 1 < heads;
      const Pair& following = more ? pair : next;
      chunk_16bit::RawGates raw;
      if (warp % 2 == 0) raw = load_tokens(following, more ? h + 1 : 0);
      if (is_chosen() && h == 0) {
        publish_made();
        if (order.flags != nullptr) s.made = order.flags + pair.number;
        load_keys(next);
        find_next(next, s.pair[(at + 2) % 3]);
      }
      steps().template apply_decays<kWithP>(tokens, kk, qk, results);
      steps().inverse().invert_diagonal();
      if (begins && h == 0) let_next_begin();
      barrier();
      if (warp % 2 == 1) {
        steps().inverse().merge_16(results);
      } else {
        steps().inverse().store_diagonal(results);
        store_token_factors(tokens, item);
        finish_tokens(raw, following, more ? h + 1 : 0, s.scratch.tokens[turn ^ 1]);
      }
      barrier();
      steps().inverse().multiply_Z();
      barrier();
      steps().inverse().merge_32(results);
    }
  }

  // A warpgroup's share of pairs [begin, end), of which `blocks` blocks have some. No other one touches their flags.
  __device__ __forceinline__ Stride stride_of(int begin, int end, int blocks) const {
    const int block = static_cast<int>(blockIdx.x), first = begin + group * blocks + block, step = kGroups * blocks;
    if (block >= blocks || first >= end) return no_pairs();
    return {first, end, place_of(first), step, place_of(step)};
  }
  __device__ __forceinline__ void clear_flags(const Stride& stride) const {
    for (int n = stride.first + (kWarpSize * warp + lane) * stride.step; n < stride.end;
         n += kGroupThreads * stride.step) {
      order.flags[n] = 0;
    }
  }
  // After a barrier of the warpgroup that follows the last result of a pair.
  __device__ __forceinline__ void publish_made() const {
    if (s.made != nullptr) all.publisher.hand_over(group, s.made);
  }

  __device__ __forceinline__ void begin() const {
    if (is_chosen()) {
      s.filled.init(1);
      fence_barrier_init();
      s.heads = args.problem.num_value_heads / args.problem.group;
      s.made = nullptr;
      s.stride = stride_of(0, order.before, static_cast<int>(gridDim.x));
      s.beside = order.beside > 0 ? stride_of(order.before, order.pairs, order.beside) : no_pairs();
    }
    barrier();
    if (order.flags == nullptr) return;
    clear_flags(s.stride);
    clear_flags(s.beside);
    fence_all_blocks();
  }

  __device__ __forceinline__ void run() const {
    barrier();  // all have read the strides
    if (is_chosen()) {
      if (s.stride.first >= order.before) begin_beside();
      find_pair(s.stride.first, s.stride.place, s.pair[0]);
      load_keys(s.pair[0]);
      find_next(s.pair[0], s.pair[1]);
    }
    barrier();
    if (warp % 2 == 0) finish_tokens(load_tokens(s.pair[0], 0), s.pair[0], 0, s.scratch.tokens[0]);
    wait_to_begin();
    int turn = 0, at = 0;
    bool begins = true;
    for (uint32_t parity = 0; s.pair[at].length > 0; parity ^= 1, at = (at + 1) % 3, begins = false) {
      run_pair(at, parity, begins, turn);
    }
    if (begins) let_next_begin();  // there was no pair
    barrier();
    if (order.flags != nullptr && is_chosen()) {
      publish_made();
      all.publisher.hand_over(group, nullptr);
    }
  }
};

template <DType kType, int kK, bool kWithP>
__global__ void __launch_bounds__(kThreadsWithPublisher<factor_groups(kK, kWithP)>, 1)
    factors_kernel(const __grid_constant__ ChunkArgs args, const __grid_constant__ ScanMaps maps, FactorOrder order) {
  constexpr int kGroups = FactorShape<kK, kWithP>::kGroups;
  wait_for_previous_kernels();
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % kWarpSize, number = warp / kGroupWarps;
  auto& s = aligned_shared<typename FactorShape<kK, kWithP>::BlockShared>();
  const bool works = number < kGroups;
  const FactorGroup<kType, kK, kWithP> group{
      args, maps, order, s.groups[works ? number : 0], s, number, warp % kGroupWarps, lane};
  if (works) group.begin();
  if (order.flags != nullptr) {
    if (threadIdx.x == kGroups * kGroupThreads) {
      for (TransactionBarrier& begun : s.begun) begun.init(1);
      s.publisher.init();
    }
    __syncthreads();
    let_next_kernel_start();
  }
  if (works) {
    take_registers<kRegistersBesidePublisher<kGroups>>();
    group.run();
  } else {
    give_registers<kPublisherRegisters>();
    if (order.flags != nullptr && warp == kGroups * kGroupWarps && elect_one()) s.publisher.run();
  }
}

template <int kK>
size_t bytes_of(bool with_sP) {
  return with_sP ? sizeof(typename FactorShape<kK, true>::BlockShared)
                 : sizeof(typename FactorShape<kK, false>::BlockShared);
}

template <DType kType, int kK, bool kWithP>
void launch_factors_of(const ChunkArgs& args, const ScanMaps& maps, const FactorOrder& order, const Context& context) {
  constexpr int kThreads = kThreadsWithPublisher<factor_groups(kK, kWithP)>;
  const LaunchShape shape{static_cast<unsigned>(order.blocks), kThreads, bytes_of<kK>(kWithP), true};
  launch<factors_kernel<kType, kK, kWithP>>("delta_rule chunk_sm90 factors", context, shape, args, maps, order);
}

}  // namespace

size_t factors_bytes(int padded_k, bool with_sP) {
  size_t bytes = 0;
  with_padded_k(padded_k, [&]<int kK>() { bytes = bytes_of<kK>(with_sP || kK == 256); });
  return bytes;
}

void launch_factors(const ChunkArgs& args, const ScanMaps& maps, const FactorOrder& order, const Context& context) {
  chunk_16bit::with_tile(args.problem.k.dtype, padded_k(args.problem.head_dim_k), [&]<DType kType, int kK>() {
    if constexpr (kK == 256) {  // no scan of theirs makes sP
      launch_factors_of<kType, kK, true>(args, maps, order, context);
    } else {
      order.with_sP ? launch_factors_of<kType, kK, true>(args, maps, order, context)
                    : launch_factors_of<kType, kK, false>(args, maps, order, context);
    }
  });
}

FactorOrder factor_order(const ChunkArgs& args, bool with_sP, int multiprocessors) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int groups = factor_groups(padded_k(p.head_dim_k), with_sP);
  const auto pairs = static_cast<int>(chunk_16bit::chunks_in_window(args) * (p.num_value_heads / p.group));
  const int rows = p.sequences.offsets == nullptr ? static_cast<int>(p.sequences.count) : 1;
  return {with_sP, pairs, rows, std::min((pairs + groups - 1) / groups, multiprocessors), pairs};
}

bool takes_head_factors(const DeltaRuleInputs& in, const DeltaRuleSizes& sizes) {
  const int device = in.q.device.index;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2 - kChunkRows;  // places are 32-bit numbers
  const int64_t most_chunks = sizes.batch * sizes.tokens + sizes.num_sequences;
  return device_attribute(cudaDevAttrComputeCapabilityMajor, device) == 9 && sizes.head_dim_k <= kMostScanK &&
         has_token_map(in.q) && has_token_map(in.k) && sizes.tokens <= kMost &&
         most_chunks * sizes.num_value_heads <= kMost &&
         lacks_shared_memory(factors_bytes(padded_k(sizes.head_dim_k), true), device).empty();
}

void launch_head_factors(const DeltaRuleInputs& in, const ChunkArgs& args, const Context& context) {
  ScanMaps maps{};
  maps.k = token_map(in.k, kChunkRows, 64, Swizzle::k128);
  maps.q = token_map(in.q, kChunkRows, 64, Swizzle::k128);
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount, in.q.device.index);
  launch_factors(args, maps, factor_order(args, true, multiprocessors), context);
}

}  // namespace fastweight::cuda::chunk_sm90
