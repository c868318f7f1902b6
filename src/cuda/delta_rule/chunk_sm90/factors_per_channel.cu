// The factors of the chunk form with one decay per key channel, for K <= 128: what chunk_16bit/factors_per_channel.cu
// makes, with fewer instructions. See ../chunk.cuh for the equations.
//
// A team of eight warps has a pair of a chunk and a value head, three of them on a multiprocessor, or of four warps and four of
// them where K <= 64: what binds are instructions, and the time until TMA has brought the gates, where it can, and the rows of k
// and q behind them. A team is a block, or, where the factors are made beside a scan (beside.h), a third or a quarter of one that
// has a multiprocessor for itself. A thread has four channels of half a tile of 16 rows. With c_i, the running sums of log2 of
// the decays in a tile, and c of the whole tile,
//
//     A  = beta rising_k falling^T,     sP = scale rising_q falling^T     (k and q with the factors of their norms)
//
// where rising and falling rows hold their decays from, and to, an anchor between them:
//
//     all tiles mild    the start of the chunk:    rising_i = k_i 2^(before + c_i)    falling_j = k_j 2^-(before + c_j)
//     otherwise         two for a tile:            rising_i = k_i 2^(before + c_i - n)
//                                                  falling_j = k_j 2^(n' - before - c_j)
//
// With one anchor the rising rows are the scan's copies of k and q, and products are wgmma's: of two warpgroups one
// makes A, and J of it, the other sP. With two anchors they are made tile by tile, A and sP by one warp, so that
// falling rows are read and made ready once for both. n and n' are the sums before and behind the tile, rounded to
// integers, so that anchors differ by powers of two: pairs of bf16 take them without unpacking, and without another
// rounding. The scan's copies of rising rows are 2^n of them; tiles below the diagonal have 2^n of the anchors between
// them as a factor per channel, those on it 2^(n - n'), which falling rows take in registers. Strong tiles, which 2^-c is
// too large for, have products of their own on the diagonal (factor_strong.cuh). So nothing overflows for g <= 0.
//
// Sums of logarithms are short of digits only where their power is short of anything: log2 of a decay is at least -150,
// so c - c_j has an error below 2^-12, a sixteenth of the rounding of what it multiplies; so has the sum of the tiles
// before one, unless these decay by more than 2^-8192.
#include "cuda/delta_rule/chunk_sm90/factors_per_channel.h"

#include <algorithm>
#include <limits>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_sm90/factor_strong.cuh"
#include "cuda/delta_rule/chunk_sm90/publisher.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

// By one thread, before the pair that begins.
template <int kK>
__device__ __forceinline__ void clear_marks(Shared<kK>& s) {
  s.apart = s.strong[0] = s.strong[1] = s.strong[2] = s.strong[3] = false;
}
template <int kK>
__device__ __forceinline__ void begin_team(Shared<kK>& s) {
  clear_marks(s);
  s.gates_filled.init(2);  // the thread that starts the loads, and the warp that knows the gate numbers
  s.keys_filled.init(1);
  s.rows_read.init(kWarps<kK>);
  fence_barrier_init();
}

// The factors of the item, whose rows are on their way, by a team, whose leader stores the copies. read(apart) follows each
// thread's last access to k, q and falling, but for what the leader stores. kAlone: the copies of the keys alone, where the other
// factors were kept.
template <DType kType, class Team, bool kAlone, int kK, class Read>
__device__ __forceinline__ void make_factors(const ChunkArgs& args, const FactorMaps& maps, Shared<kK>& s,
                                             const Read& read) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const Item& item = s.item;
  const int thread = Team::thread();
  const Place<kK> own(Team::warp());
  if (Team::warp() == kWarps<kK> - 1) {
    store_gate_numbers(s, p, lane_anew());
    __syncwarp();
    if (elect_one()) s.gates_filled.arrive();
  }
  if (!kAlone && thread < kChunkRows) s.beta[thread] = chunk_beta(p, item.span, item.head, thread);
  Sums sums;
  const auto wait_for_gates = [&] { s.gates_filled.wait(Team::kAlone ? 0 : s.parity); };
  if (maps.has_g) {
    wait_for_gates();
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) sums.c[i] = unpack<kType>(four_at(s.falling, key_offset(own, i)));
  } else {
    load_gates(p.g, item.span, item.head, p.head_dim_k, own, sums.c);
    wait_for_gates();
  }
  const bool rises = sum_gates(p, GateNumbers(s, p, own), tokens_from(own, item.tokens, p.head_dim_k), sums);
  const float4 total = sums.total() + other_half(sums.total());
  if (own.half == 0) four_at(s.total + own.tile * kK + own.channel) = total;
  if (rises || !(least(total) >= kMild<kType>)) s.apart = true;
  if (!kAlone && least(total) < kStrong<kType>) s.strong[own.tile] = true;
  s.keys_filled.wait(Team::kAlone ? 0 : s.parity);
  norms<kType>(s, p, Team::warp(), lane_anew());
  Team::barrier();
  const bool apart = s.apart;
  if (!apart) {
    scale_rows<kType, kAlone>(s, args, item.copies, Place<kK>(Team::warp()), sums);
    fence_async_proxy();
    Team::barrier();
    if (Team::leads()) store_copies(s, maps, static_cast<int>(item.copies));
  } else {
    if constexpr (!kAlone) {
      if (s.strong[0] || s.strong[1] || s.strong[2] || s.strong[3]) {
        make_strong<kType, Team>(s, args, Team::warp(), lane_anew(), sums);
      }
    }
    scale_rows_apart<kType, kAlone>(s, args, item.copies, Place<kK>(Team::warp()), sums);
    if constexpr (!kAlone) Team::barrier();
  }
  if constexpr (kAlone) return;
  const int warp = Team::warp(), lane = lane_anew();
  const GlobalResults<kType> results = results_of<kType>(args, item.factors, lane);
  const InverseSteps steps{s.inverse, warp % kGroupWarps, lane};
  const bool of_A = warp < kGroupWarps;
  if (apart) {
    make_lower_apart<kType>(s, warp, steps, results);
    Team::barrier();
  } else {
    if constexpr (kWarps<kK> == kGroupWarps) make_lower<kType>(s, false, steps, results);
    make_lower<kType>(s, of_A, steps, results);
  }
  read(apart);
  if (Team::warp() < kGroupWarps) invert_A<kType, Team>(s, args);
}

// A block has one pair. From the end, the scan finds in the second-level cache what was made last, and begins with that.
template <DType kType, int kK, bool kAlone>
__global__ void __launch_bounds__(kThreads<kK>, kTeamsOnOne<kK>)
    channel_factors_kernel(const __grid_constant__ ChunkArgs args, const __grid_constant__ FactorMaps maps) {
  using Team = TeamOf<kK, 1>;
  auto& s = aligned_shared<Shared<kK>>();
  wait_for_previous_kernels();
  let_next_kernel_start();
  if (Team::leads()) {
    begin_team(s);
    s.item = item_of(args, maps.from_the_end ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (s.item.exists()) start_loads(args, maps, s.item, s);
  }
  Team::barrier();
  if (!s.item.exists()) return;
  make_factors<kType, Team, kAlone>(args, maps, s, [](bool) {});
  if (Team::leads()) wait_stores_read<0>();
}

// Pairs [begin, end) beside a scan, and the flags of all.
struct PairsBeside {
  uint32_t begin, end;
  uint32_t* flags;
};

// By a team's leader: pair `number`, if there is one, with its rows on their way.
template <int kK>
__device__ __forceinline__ void find_and_load(const ChunkArgs& args, const FactorMaps& maps, const PairsBeside& pairs,
                                              uint32_t number, Item& item, Shared<kK>& s) {
  item = number < pairs.end ? item_of(args, number) : Item();
  if (item.exists()) start_loads(args, maps, item, s);
}

// By a team: 0 for the pairs that it is to make, which no other one touches; by all teams 1 for those before them, which the
// kernel before this one has made.
template <int kK>
__device__ __forceinline__ void begin_flags(const PairsBeside& pairs, uint32_t first, uint32_t step) {
  const auto thread = static_cast<uint32_t>(TeamOf<kK, kTeamsOnOne<kK>>::thread());
  for (uint32_t n = first + thread * step; n < pairs.end; n += kThreads<kK> * step) pairs.flags[n] = 0;
  constexpr uint32_t kWorkers = kTeamsOnOne<kK> * kThreads<kK>;
  for (uint32_t n = blockIdx.x * kWorkers + threadIdx.x; n < pairs.begin; n += gridDim.x * kWorkers) pairs.flags[n] = 1;
  fence_all_blocks();
}

// Teams, and a warp that publishes what they have made.
template <int kK>
struct BlockBeside {
  static constexpr int kTeams = kTeamsOnOne<kK>, kGroups = kTeams * kThreads<kK> / kGroupThreads;
  static constexpr int kAllThreads = kThreadsWithPublisher<kGroups>;

  struct alignas(1024) Shared {
    chunk_sm90::Shared<kK> teams[kTeams];
    Publisher<kTeams> publisher;
  };
};

// Takes one pair after the other, first, first + step .. What the next one begins with is on its way while J is made of this
// one. Where the team is stands in shared memory: registers are short.
template <DType kType, int kK>
__device__ __forceinline__ void run_team(const ChunkArgs& args, const FactorMaps& maps, const PairsBeside& pairs,
                                         uint32_t step, Publisher<kTeamsOnOne<kK>>& publisher, Shared<kK>& s) {
  using Team = TeamOf<kK, kTeamsOnOne<kK>>;
#pragma unroll 1
  while (s.item.exists()) {
    make_factors<kType, Team, false>(args, maps, s, [&](bool apart) {
      if (apart) fence_async_proxy();  // otherwise only products and stores have read them since the last one
      __syncwarp();
      if (lane_anew() == 0) s.rows_read.arrive();
      if (Team::leads()) {
        s.rows_read.wait(s.parity);
        wait_stores_read<0>();
        clear_marks(s);
        find_and_load(args, maps, pairs, s.item.number + step, s.next, s);
      }
    });
    if (Team::leads()) wait_stores<0>();
    Team::barrier();
    const int number = Team::number();
    if (Team::leads()) {
      publisher.hand_over(number, pairs.flags + s.item.number);
      s.item = s.next;
      s.parity ^= 1;
    }
    Team::barrier();
  }
  const int number = Team::number();
  if (Team::leads()) publisher.hand_over(number, nullptr);
}

template <DType kType, int kK>
__global__ void __launch_bounds__(BlockBeside<kK>::kAllThreads, 1)
    channel_factors_beside_kernel(const __grid_constant__ ChunkArgs args, const __grid_constant__ FactorMaps maps,
                                  PairsBeside pairs) {
  using Block = BlockBeside<kK>;
  using Team = TeamOf<kK, Block::kTeams>;
  auto& block = aligned_shared<typename Block::Shared>();
  wait_for_previous_kernels();
  if (const int team = Team::number(); team < Block::kTeams) {
    const uint32_t first = pairs.begin + team * gridDim.x + blockIdx.x;
    begin_flags<kK>(pairs, first, Block::kTeams * gridDim.x);
    if (Team::leads()) {
      auto& s = block.teams[team];
      begin_team(s);
      s.parity = 0;
      find_and_load(args, maps, pairs, first, s.item, s);
    }
  } else if (threadIdx.x == Block::kGroups * kGroupThreads) {
    block.publisher.init();
  }
  __syncthreads();
  let_next_kernel_start();
  if (const int team = Team::number(); team < Block::kTeams) {
    take_registers<kRegistersBesidePublisher<Block::kGroups>>();
    run_team<kType>(args, maps, pairs, Block::kTeams * gridDim.x, block.publisher, block.teams[team]);
  } else {
    give_registers<kPublisherRegisters>();
    if (uniform_warp() == Block::kGroups * kGroupWarps && elect_one()) block.publisher.run();
  }
}

template <int kK>
inline constexpr size_t kBytesBeside = sizeof(typename BlockBeside<kK>::Shared);

TensorMap rows_map(const TensorView& x) { return token_map(x, kChunkRows, kBoxColumns, Swizzle::k128); }

}  // namespace

TensorMap copies_map(const uint16_t* copies, DType dtype, int padded_k, int64_t items) {
  return tensor_map({.data = copies,
                     .dtype = dtype,
                     .rank = 4,
                     .sizes = {padded_k, kChunkRows, kKeyCopies, items},
                     .strides = {1, padded_k, kChunkRows * padded_k, kKeyCopies * kChunkRows * padded_k},
                     .box = {kBoxColumns, kChunkRows, 1, 1},
                     .swizzle = Swizzle::k128});
}

namespace {

int64_t count_pairs(const ChunkArgs& args, bool of_window) {
  return (of_window ? chunk_16bit::chunks_in_window(args) : args.num_chunks) * args.problem.num_value_heads;
}

}  // namespace

int64_t count_items(const ChunkArgs& args) { return count_pairs(args, args.factors_of_window); }
int64_t count_copies(const ChunkArgs& args) { return count_pairs(args, args.copies_of_window); }

bool takes_channel_factors(const DeltaRuleInputs& in, const DeltaRuleSizes& sizes) {
  const int device = in.q.device.index;
  // Of boxes, tokens and chunks, places are 32-bit numbers; so are those of blocks.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - kChunkRows;
  const int64_t most_chunks = sizes.batch * sizes.tokens + sizes.num_sequences;
  return device_attribute(cudaDevAttrComputeCapabilityMajor, device) == 9 && sizes.head_dim_k <= kMostK &&
         has_token_map(in.q) && has_token_map(in.k) && sizes.tokens <= kMost &&
         most_chunks * sizes.num_value_heads <= kMost && lacks_shared_memory(sizeof(Shared<kMostK>), device).empty();
}

bool makes_channel_factors_beside(const DeltaRuleInputs& in, const DeltaRuleSizes& sizes) {
  constexpr size_t kMostBytes = std::max(kBytesBeside<64>, kBytesBeside<128>);
  return takes_channel_factors(in, sizes) && lacks_shared_memory(kMostBytes, in.q.device.index).empty();
}

namespace {

FactorMaps factor_maps(const DeltaRuleInputs& in, const ChunkArgs& args) {
  FactorMaps maps;
  maps.k = rows_map(in.k);
  maps.q = rows_map(in.q);
  maps.has_g = in.g.dtype == in.k.dtype && has_token_map(in.g);
  if (maps.has_g) maps.g = rows_map(in.g);
  maps.copies = copies_map(args.factors.keys, in.k.dtype, padded_k(args.problem.head_dim_k), count_copies(args));
  return maps;
}

// The type of the keys, and the padded K.
template <class Body>
void with_kernel(const ChunkArgs& args, const Body& body) {
  const auto of_type = [&]<DType kType>() {
    padded_k(args.problem.head_dim_k) == 64 ? body.template operator()<kType, 64>()
                                            : body.template operator()<kType, 128>();
  };
  args.problem.k.dtype == DType::kBF16 ? of_type.template operator()<DType::kBF16>()
                                       : of_type.template operator()<DType::kF16>();
}

void launch_pairs(const ChunkArgs& args, const FactorMaps& maps, int64_t pairs, const Context& context) {
  with_kernel(args, [&]<DType kType, int kK>() {
    const LaunchShape shape{static_cast<unsigned>(pairs), kThreads<kK>, sizeof(Shared<kK>), true};
    const auto of = [&]<bool kAlone>() {
      launch<channel_factors_kernel<kType, kK, kAlone>>("delta_rule chunk_sm90 factors per channel", context, shape,
                                                        args, maps);
    };
    args.copies_alone ? of.template operator()<true>() : of.template operator()<false>();
  });
}

}  // namespace

void launch_channel_factors(const DeltaRuleInputs& in, const ChunkArgs& args, bool from_the_end,
                            const Context& context) {
  FactorMaps maps = factor_maps(in, args);
  maps.from_the_end = from_the_end;
  launch_pairs(args, maps, chunk_16bit::chunks_in_window(args) * args.problem.num_value_heads, context);
}

void launch_channel_factors_beside(const DeltaRuleInputs& in, const ChunkArgs& args, const BesidePlan& plan,
                                   uint32_t* flags, const Context& context) {
  FactorMaps maps = factor_maps(in, args);
  maps.from_the_end = true;
  launch_pairs(args, maps, plan.before, context);
  const int64_t pairs = chunk_16bit::chunks_in_window(args) * args.problem.num_value_heads;
  const PairsBeside beside{static_cast<uint32_t>(plan.before), static_cast<uint32_t>(pairs), flags};
  with_kernel(args, [&]<DType kType, int kK>() {
    const LaunchShape shape{static_cast<unsigned>(plan.beside), BlockBeside<kK>::kAllThreads, kBytesBeside<kK>, true};
    launch<channel_factors_beside_kernel<kType, kK>>("delta_rule chunk_sm90 factors per channel beside the scan",
                                                     context, shape, args, maps, beside);
  });
}

}  // namespace fastweight::cuda::chunk_sm90
