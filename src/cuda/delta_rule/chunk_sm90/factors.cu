// The factors of the chunk form with no decay or one per head on Hopper, for K <= 128. See ../chunk.cuh for the equations
// and chunk_16bit/chunk.cuh for what is written.
//
// A block fills a multiprocessor with warpgroups, each of which takes one pair of a chunk and a key head after the other:
//
//     k k^T and q k^T by wgmma into registers; the norms of k are the diagonal of the former
//     then for every value head of the key head: A and sP, whose decays are the same; J by lower_inverse.cuh
//
// q and k of the next pair come by TMA as soon as both products have been made, its gates and beta while two warps of the
// four have nothing to do.
//
// Where the scan leaves multiprocessors idle, it may begin early (FactorOrder): blocks that it needs the room of leave
// after their share of the first pairs, the others go on, and a flag tells the scan of every pair of a chunk and a value
// head that is there. The scan begins when all blocks of this kernel have begun; so it never waits for one that has not.
#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_16bit/gate_sums.cuh"
#include "cuda/delta_rule/chunk_sm90/lower_inverse.cuh"
#include "cuda/delta_rule/chunk_sm90/scan.h"
#include "cuda/sm90/barriers.cuh"
#include "cuda/sm90/panel_tile.cuh"
#include "cuda/sm90/tma.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

using chunk_16bit::ChunkArgs;
using chunk_16bit::ChunkFactors;
using chunk_16bit::kChunkRows;

constexpr int kGroups = kFactorGroups, kGroupThreads = 128, kThreads = kGroups * kGroupThreads;
constexpr int kKeySteps = kWidth / 16, kTiles = kChunkRows / 8;

using KeyTile = PanelTile<kChunkRows, kWidth>;
using Gram = float[kTiles][4];  // rows of x k^T of a warp, as C tiles

// A chunk and a key head.
struct Pair {
  int number;                // in the order of all
  int item;                  // of the key head's first value head
  int batch, begin, length;  // tokens of the chunk; none: there is no such pair
  int key_head;
};

// The numbers of the tokens of a chunk for a value head.
struct Tokens {
  float gamma[kChunkRows];  // in log2
  float beta[kChunkRows];
};

struct alignas(1024) GroupShared {
  unsigned char k[KeyTile::kBytes], q[KeyTile::kBytes];
  float4 A[kTiles / 2 * 3][kWarpSize];               // C tiles below the diagonal blocks, each for its own thread
  float diagonal[4 * TransposedBlock::kFloats];  // blocks of A, then of J
  float below[2 * TransposedBlock::kFloats];     // J_10 and J_32
  float product[4 * TransposedBlock::kFloats];   // Z X^-1: those of 16 rows in blocks 0 and 2, then all four of 32
  Tokens tokens[2];                                  // of this value head and of the next
  float rstd_k[kChunkRows];
  float squares_q[2][kChunkRows];  // sums over a panel each
  Pair pair[2];                    // this one and the next
  int written;                     // the last item, of which the scan is to be told; -1: none
  TransactionBarrier filled;
};

// In which block J_ij lies, i and j less than two blocks apart.
__device__ __forceinline__ TransposedBlock block_of_J(GroupShared& s, int i, int j) {
  return i == j ? TransposedBlock(s.diagonal, i) : TransposedBlock(s.below, i / 2);
}

struct Shared {
  GroupShared group[kGroups];
};

// A barrier among the threads of a warpgroup.
__device__ __forceinline__ void group_barrier(int group) {
  if (group == 0) {
    named_barrier<1>(kGroupThreads);
  } else if (group == 1) {
    named_barrier<2>(kGroupThreads);
  } else if (group == 2) {
    named_barrier<3>(kGroupThreads);
  } else {
    named_barrier<4>(kGroupThreads);
  }
}

// 16 x 16 elements, rounded, of a matrix of 64 columns, from C tiles. Neighbouring lanes exchange pairs: four lanes then
// have 32 bytes of a row.
template <DType kType>
__device__ __forceinline__ void store_block(const float (&c)[2][4], int lane, uint16_t* to) {
  const bool odd = lane % 2 == 1;
  const int first = 2 * (lane % 4) + (odd ? 6 : 0);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t low = pack<kType>(c[0][2 * h], c[0][2 * h + 1]), high = pack<kType>(c[1][2 * h], c[1][2 * h + 1]);
    const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? low : high, 1);
    *reinterpret_cast<uint2*>(to + (lane / 4 + 8 * h) * kChunkRows + first) =
        odd ? make_uint2(other, high) : make_uint2(low, other);
  }
}

template <DType kType>
struct FactorGroup {
  const ChunkArgs& args;
  const ScanMaps& maps;
  const FactorOrder& order;
  GroupShared& s;
  int group, warp, lane;  // the warp within the warpgroup

  __device__ __forceinline__ int thread() const { return kWarpSize * warp + lane; }
  __device__ __forceinline__ void barrier() const { group_barrier(group); }

  // Which pair this warpgroup takes after number n.
  __device__ __forceinline__ int pair_after(int n) const {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    if (n >= order.first) return n + kGroups * order.late_blocks;
    if (n + kGroups * blocks < order.first) return n + kGroups * blocks;
    return block < order.late_blocks ? order.first + group * order.late_blocks + block : order.pairs;
  }

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

  // Pair number n, and its q and k on their way; by one thread. Chunks come in the order in which the scan needs them: the
  // first ones of all rows, then the next ones.
  __device__ __forceinline__ void begin_pair(int n, Pair& pair) const {
    pair.number = n;
    pair.length = 0;
    if (n >= order.pairs) return;
    const int heads = args.problem.num_value_heads / args.problem.group, turn = n / heads, position = turn / order.rows;
    find_chunk(turn - position * order.rows, position, pair);
    if (pair.length == 0) return;  // chunks are numbered without gaps: none follows
    pair.key_head = n - turn * heads;
    pair.item = pair.item * args.problem.num_value_heads + pair.key_head * args.problem.group;
    s.filled.arrive_expecting(2 * KeyTile::kBytes);
    const int missing = kChunkRows - pair.length, end = pair.begin + pair.length;
    const KeyTile k(s.k), q(s.q);
#pragma unroll
    for (int p = 0; p < KeyTile::kPanels; ++p) {
      const int column = p * KeyTile::kPanelColumns;
      load_box(k.panel(p), maps.k, {column, pair.key_head, missing, end, pair.batch}, s.filled);
      load_box(q.panel(p), maps.q, {column, pair.key_head, missing, end, pair.batch}, s.filled);
    }
  }

  // Of value head h of a pair's key head, by warps 0 and 2.
  __device__ __forceinline__ void load_tokens(const Pair& pair, int h, Tokens& tokens) const {
    if (pair.length == 0) return;
    const int head = pair.key_head * args.problem.group + h;
    const ChunkSpan span{0, pair.batch, pair.begin, pair.length, 0};
    if (warp == 0) {
      chunk_16bit::sum_gates(args.problem, span, head, lane, tokens.gamma);
    } else {
#pragma unroll
      for (int row = lane; row < kChunkRows; row += kWarpSize) {
        tokens.beta[row] = chunk_beta(args.problem, span, head, row);
      }
    }
  }

  // Sums of squares of a row's panel, by a thread. The eight rows that lanes read at once are in different banks.
  __device__ __forceinline__ void sum_squares_of_q() const {
    const int row = thread() % kChunkRows, panel = thread() / kChunkRows;
    const unsigned char* start = s.q + panel * KeyTile::kPanelBytes + row * KeyTile::kRowBytes;
    float sum[2] = {0, 0};
#pragma unroll
    for (int segment = 0; segment < 8; ++segment) {
      const uint4 words = *reinterpret_cast<const uint4*>(start + (segment ^ row % 8) * 16);
      for (const uint32_t word : {words.x, words.y, words.z, words.w}) {
        const float2 x = unpack<kType>(word);
        sum[0] = fmaf(x.x, x.x, sum[0]);
        sum[1] = fmaf(x.y, x.y, sum[1]);
      }
    }
    s.squares_q[panel][row] = sum[0] + sum[1];
  }

  __device__ __forceinline__ float rstd(float squares) const {
    return args.problem.qk_l2norm ? rsqrt_approx(squares + kL2NormEps) : 1.0f;
  }
  __device__ __forceinline__ float rstd_q(int row) const { return rstd(s.squares_q[0][row] + s.squares_q[1][row]); }

  // Both products of a pair, and the norms.
  __device__ __forceinline__ void multiply_keys(uint32_t parity, Gram& kk, Gram& qk) const {
    const KeyTile k(s.k), q(s.q);
    s.filled.wait(parity);
    wgmma_fence(kk, qk);
#pragma unroll
    for (int m = 0; m < kKeySteps; ++m) wgmma<kType, kChunkRows>(kk, k.along_rows(0, m), k.along_rows(0, m), m > 0);
#pragma unroll
    for (int m = 0; m < kKeySteps; ++m) wgmma<kType, kChunkRows>(qk, q.along_rows(0, m), k.along_rows(0, m), m > 0);
    wgmma_commit();
    if (args.problem.qk_l2norm) sum_squares_of_q();
    wgmma_wait<0>(kk, qk);
    const bool odd = lane / 4 % 2 == 1, on_diagonal = lane % 4 == lane / 8;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n / 2 != warp || !on_diagonal) continue;
      const int e = n % 2 * 2;
      s.rstd_k[8 * n + lane / 4] = rstd(odd ? kk[n][e + 1] : kk[n][e]);
    }
    fence_async_proxy();  // q has been read: the next one may come
  }

  // Tile n of the warp's rows of A, below its diagonal block.
  __device__ __forceinline__ float4& tile_of_A(int n) const { return s.A[warp * (warp - 1) + n][lane]; }

  __device__ __forceinline__ void load_A(int first, LeftBlock& left) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float4 x = tile_of_A(first + m);
      const float c[4] = {x.x, x.y, x.z, x.w};
      left[m] = split_tile(c);
    }
  }

  // A from k k^T, and sP from q k^T to global memory; blocks beyond the diagonal are left alone.
  __device__ __forceinline__ void apply_decays(const Tokens& tokens, const Gram& kk, const Gram& qk,
                                               uint16_t* sP) const {
    const int row = 16 * warp + lane / 4, pair = 2 * (lane % 4);
    float gamma[2], on_A[2], on_P[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = row + 8 * h;
      gamma[h] = tokens.gamma[i];
      on_A[h] = tokens.beta[i] * s.rstd_k[i];
      on_P[h] = args.problem.scale * rstd_q(i);
    }
#pragma unroll
    for (int m = 0; m < kTiles / 2; ++m) {
      if (m > warp) continue;
      float P[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = 2 * m + half, j = 8 * n + pair;
        const float2 from = *reinterpret_cast<const float2*>(tokens.gamma + j);
        const float2 on_j = *reinterpret_cast<const float2*>(s.rstd_k + j);
        float A[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int h = e / 2;
          const float decay =
              exp2_approx(gamma[h] - (e % 2 == 0 ? from.x : from.y)) * (e % 2 == 0 ? on_j.x : on_j.y);
          A[e] = on_A[h] * decay * kk[n][e];
          P[half][e] = on_P[h] * decay * qk[n][e];
        }
        if (m < warp) {
          tile_of_A(n) = make_float4(A[0], A[1], A[2], A[3]);
          continue;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int above = j + e % 2 - (row + 8 * (e / 2));  // the diagonal, if positive
          if (above >= 0) A[e] = 0;
          if (above > 0) P[half][e] = 0;
        }
        TransposedBlock(s.diagonal, warp).store(half, lane, A);
      }
      store_block<kType>(P, lane, sP + 16 * warp * kChunkRows + 16 * m);
    }
  }

  // By warps 0 and 2, one row in a thread.
  __device__ __forceinline__ void store_token_factors(const Tokens& tokens, int item) const {
    const int i = lane + warp / 2 * kWarpSize;
    const ChunkFactors& factors = args.factors;
    float* token = factors.token + int64_t{item} * chunk_16bit::kTokenFactors<false> * kChunkRows + i;
    const float gamma = tokens.gamma[i], last = tokens.gamma[kChunkRows - 1];
    const float read = exp2_approx(gamma), of_q = rstd_q(i), of_k = s.rstd_k[i];
    token[kOnKeyRead * kChunkRows] = read * of_k;
    token[kOnQueryRead * kChunkRows] = args.problem.scale * read * of_q;
    token[kOnWrite * kChunkRows] = exp2_approx(last - gamma) * of_k;
    token[kOnValue * kChunkRows] = tokens.beta[i];
    if (i < 4) factors.total[int64_t{item} * 4 + i] = exp2_approx(last);
    if (factors.row == nullptr) return;
    float* row = factors.row + int64_t{item} * chunk_16bit::kRowNumbers * kChunkRows + i;
    row[chunk_16bit::kGamma * kChunkRows] = gamma;
    row[chunk_16bit::kRstdOfQ * kChunkRows] = of_q;
    row[chunk_16bit::kRstdOfK * kChunkRows] = of_k;
  }

  // J_ij to global memory.
  __device__ __forceinline__ void store_J(const float (&c)[2][4], int i, int j, uint16_t* J) const {
    store_block<kType>(c, lane, J + 16 * i * kChunkRows + 16 * j);
  }

  // The warp's block on the diagonal.
  __device__ __forceinline__ void invert_diagonal(uint16_t* J) const {
    const TransposedBlock block(s.diagonal, warp);
    __syncwarp();
    invert_block(block, lane);
    const int i = lane / 2, j = lane % 2 * 8;
    uint32_t words[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) words[e] = pack<kType>(block.at(i, j + 2 * e), block.at(i, j + 2 * e + 1));
    *reinterpret_cast<uint4*>(J + (16 * warp + i) * kChunkRows + 16 * warp + j) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }

  // J_10 and J_32, by warps 1 and 3.
  __device__ __forceinline__ void merge_16(uint16_t* J) const {
    const TransposedBlock product(s.product, warp - 1);
    LeftBlock left;
    load_A(2 * (warp - 1), left);
    BlockSum sum;
    multiply(sum, left, block_of_J(s, warp - 1, warp - 1), lane);
    float c[2][4];
    totals<1>(sum, c);
#pragma unroll
    for (int n = 0; n < 2; ++n) product.store(n, lane, c[n]);
    __syncwarp();
    BlockSum last;
    load_left(block_of_J(s, warp, warp), lane, left);
    multiply(last, left, product, lane);
    totals<-1>(last, c);
#pragma unroll
    for (int n = 0; n < 2; ++n) block_of_J(s, warp, warp - 1).store(n, lane, c[n]);
    store_J(c, warp, warp - 1, J);
  }

  // Row `warp` of Z X^-1, by warps 2 and 3.
  __device__ __forceinline__ void multiply_Z() const {
    const auto store = [&](const BlockSum& sum, int j) {
      float c[2][4];
      totals<1>(sum, c);
#pragma unroll
      for (int n = 0; n < 2; ++n) TransposedBlock(s.product, 2 * (warp - 2) + j).store(n, lane, c[n]);
    };
    LeftBlock left;
    BlockSum first, second;
    load_A(0, left);
    multiply(first, left, block_of_J(s, 0, 0), lane);
    load_A(2, left);
    multiply(first, left, block_of_J(s, 1, 0), lane);
    store(first, 0);
    multiply(second, left, block_of_J(s, 1, 1), lane);
    store(second, 1);
  }

  // J_30, J_31, J_20 and J_21, by the four warps.
  __device__ __forceinline__ void merge_32(uint16_t* J) const {
    const int i = 3 - warp / 2, j = warp % 2;
    BlockSum sum;
    for (int b = 2; b <= i; ++b) {
      LeftBlock left;
      load_left(block_of_J(s, i, b), lane, left);
      multiply(sum, left, TransposedBlock(s.product, 2 * (b - 2) + j), lane);
    }
    float c[2][4];
    totals<-1>(sum, c);
    store_J(c, i, j, J);
  }

  // The same thread, of whose places in shared memory nothing is known: they are computed where they are needed, not
  // before a loop and kept.
  __device__ __forceinline__ FactorGroup opaque() const {
    return {args, maps, order, s, group, warp, opaque_below<kWarpSize>(lane)};
  }

  // By one thread: all warps have written the factors of an item and met at a barrier since.
  __device__ __forceinline__ void tell_scan() const {
    if (order.ready != nullptr && s.written >= 0) publish(order.ready + s.written);
  }

  // The factors of the value heads of one pair. The tokens of the first head are there, and `turn` tells where.
  __device__ __forceinline__ void run_pair(const Pair& pair, Pair& following, uint32_t parity, int& turn) const {
    const int heads = args.problem.group;
    Gram kk, qk;
    opaque().multiply_keys(parity, kk, qk);
#pragma unroll 1
    for (int h = 0; h < heads; ++h, turn ^= 1) {
      const Tokens& tokens = s.tokens[turn];
      const int item = pair.item + h;
      uint16_t* J = args.factors.J + int64_t{item} * kChunkRows * kChunkRows;
      barrier();  // tokens and norms are there, and all have left the head before
      if (thread() == 0) {
        tell_scan();
        s.written = item;
        if (h == 0) begin_pair(pair_after(pair.number), following);
      }
      opaque().apply_decays(tokens, kk, qk, args.factors.sP + int64_t{item} * kChunkRows * kChunkRows);
      opaque().invert_diagonal(J);
      barrier();  // the diagonal blocks of J, and the next pair
      if (warp % 2 == 1) {
        opaque().merge_16(J);
      } else {
        opaque().store_token_factors(tokens, item);
        const bool more = h + 1 < heads;
        opaque().load_tokens(more ? pair : following, more ? h + 1 : 0, s.tokens[turn ^ 1]);
      }
      barrier();  // J of 32 rows each
      if (warp >= 2) opaque().multiply_Z();
      barrier();
      opaque().merge_32(J);
    }
  }

  __device__ __forceinline__ void run() const {
    const int blocks = static_cast<int>(gridDim.x), n = group * blocks + static_cast<int>(blockIdx.x);
    if (thread() == 0) {
      s.written = -1;
      s.filled.init(1);
      fence_barrier_init();
      begin_pair(n < order.first ? n : pair_after(n - kGroups * blocks), s.pair[0]);
    }
    barrier();
    if (warp % 2 == 0) load_tokens(s.pair[0], 0, s.tokens[0]);
    int turn = 0;
    for (uint32_t parity = 0; s.pair[parity].length > 0; parity ^= 1) {
      run_pair(s.pair[parity], s.pair[parity ^ 1], parity, turn);
    }
    barrier();
    if (thread() == 0) tell_scan();
  }
};

template <DType kType>
__global__ void __launch_bounds__(kThreads, 1)
    factors_kernel(const __grid_constant__ ChunkArgs args, const __grid_constant__ ScanMaps maps, FactorOrder order) {
  wait_for_previous_kernels();
  if (order.ready != nullptr) let_next_kernel_start();
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % kWarpSize;
  GroupShared& s = (&aligned_shared<GroupShared>())[warp / 4];
  FactorGroup<kType>{args, maps, order, s, warp / 4, warp % 4, lane}.run();
}

}  // namespace

size_t factors_bytes() { return sizeof(Shared); }

void launch_factors(const ChunkArgs& args, const ScanMaps& maps, const FactorOrder& order, const Context& context) {
  const LaunchShape shape{static_cast<unsigned>(order.blocks), kThreads, sizeof(Shared), true};
  if (args.problem.k.dtype == DType::kBF16) {
    launch<factors_kernel<DType::kBF16>>("delta_rule chunk_sm90 factors", context, shape, args, maps, order);
  } else {
    launch<factors_kernel<DType::kF16>>("delta_rule chunk_sm90 factors", context, shape, args, maps, order);
  }
}

}  // namespace fastweight::cuda::chunk_sm90
