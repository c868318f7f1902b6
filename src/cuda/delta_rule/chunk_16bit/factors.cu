// The factors of the chunk form with no decay or one per head. See ../chunk.cuh for the equations.
//
// One block of four warps per (chunk, value head). q and k stay as they are: their norms and the decays go into A, sP
// and three numbers per token. Each warp makes 16 rows of A and sP, only the blocks on and below the diagonal.
#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/delta_rule/chunk_16bit/gate_sums.cuh"

namespace fastweight::cuda::chunk_16bit {
namespace {

constexpr int kThreads = 128;

// For K = 128 the memory of six blocks fits a multiprocessor of Hopper, whose warps hide each other's latencies.
template <int kK>
struct Shared {
  union {
    struct {
      alignas(128) uint16_t k[kChunkRows * kK];
      alignas(128) uint16_t q[kChunkRows * kK];
    };
    struct {  // once q and k have been read
      alignas(16) float A[kChunkRows * kPitchOfA];
      alignas(16) float J[kChunkRows * kPitchOfJ];
    };
  };
  float gamma[kChunkRows];  // in log2
  float beta[kChunkRows];
  float rstd_k[kChunkRows], rstd_q[kChunkRows];

  // One tile serves both roles of the keys.
  __device__ __forceinline__ SharedTile<kK> reader() const { return {const_cast<uint16_t*>(k)}; }
  __device__ __forceinline__ SharedTile<kK> writer() const { return {const_cast<uint16_t*>(k)}; }
  __device__ __forceinline__ SharedTile<kK> queries() const { return {const_cast<uint16_t*>(q)}; }
  __device__ __forceinline__ float rstd_reader(int row) const { return rstd_k[row]; }
  __device__ __forceinline__ float rstd_writer(int row) const { return rstd_k[row]; }
};

// Rows [16 block, +16) of x writer^T as C tiles; tiles beyond the diagonal block are left alone.
template <DType kType, int kK>
__device__ __forceinline__ void gram_rows(const SharedTile<kK>& x, const SharedTile<kK>& writer, int block, int lane,
                                          float (&c)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
#pragma unroll 2
  for (int m = 0; m < kK / 16; ++m) {
    uint32_t a[4];
    x.load_a(16 * block, m, lane, a);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n > block) continue;
      uint32_t b[4];
      writer.load_b(16 * n, m, lane, b);
      mma<kType>(c[2 * n], a, b[0], b[1]);
      mma<kType>(c[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// From rows [16 warp, +16) of reader writer^T.
template <int kK>
__device__ __forceinline__ void make_A(Shared<kK>& s, int warp, int lane, const float (&c)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (n / 2 > warp) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 16 * warp + lane / 4 + e / 2 * 8, j = 8 * n + 2 * (lane % 4) + e % 2;
      const float factor = s.beta[i] * s.rstd_reader(i) * s.rstd_writer(j);
      s.A[j * kPitchOfA + i] = i > j ? factor * exp2_approx(s.gamma[i] - s.gamma[j]) * c[n][e] : 0.0f;
    }
  }
}

template <DType kType, int kK>
__device__ __forceinline__ void make_sP(const Shared<kK>& s, float scale, int block, int lane, uint16_t* sP) {
  float c[8][4];
  gram_rows<kType, kK>(s.queries(), s.writer(), block, lane, c);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (n / 2 > block) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 16 * block + lane / 4 + half * 8, j = 8 * n + 2 * (lane % 4);
      float p[2] = {0, 0};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (i < j + e) continue;
        const float factor = scale * s.rstd_q[i] * s.rstd_writer(j + e);
        p[e] = factor * exp2_approx(s.gamma[i] - s.gamma[j + e]) * c[n][2 * half + e];
      }
      *reinterpret_cast<uint32_t*>(sP + lower_offset(block, lane / 4 + half * 8, j)) = pack<kType>(p[0], p[1]);
    }
  }
}

template <int kK>
__device__ __forceinline__ void store_token_factors(const Shared<kK>& s, float scale, int64_t item,
                                                    const ChunkFactors& factors) {
  const int i = threadIdx.x;
  if (i >= kChunkRows) return;
  float* token = factors.token + item * kTokenFactors<false> * kChunkRows;
  const float read = exp2_approx(s.gamma[i]);
  const float last = s.gamma[kChunkRows - 1];
  token[kOnKeyRead * kChunkRows + i] = read * s.rstd_reader(i);
  token[kOnQueryRead * kChunkRows + i] = scale * read * s.rstd_q[i];
  token[kOnWrite * kChunkRows + i] = exp2_approx(last - s.gamma[i]) * s.rstd_writer(i);
  token[kOnValue * kChunkRows + i] = s.beta[i];
  if (i < 4) factors.total[item * factors.total_width + i] = exp2_approx(last);
  if (factors.row == nullptr) return;
  float* row = factors.row + item * kRowNumbers * kChunkRows;
  row[kGamma * kChunkRows + i] = s.gamma[i];
  row[kRstdOfQ * kChunkRows + i] = s.rstd_q[i];
  row[kRstdOfK * kChunkRows + i] = s.rstd_k[i];
}

template <DType kType, int kK>
__global__ void __launch_bounds__(kThreads, 6) factors_kernel(const __grid_constant__ ChunkArgs args) {
  wait_for_previous_kernels();
  auto& s = dynamic_shared<Shared<kK>>();
  const DeltaRuleDeviceProblem& p = args.problem;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for_each_item(args, [&](int64_t chunk, const ChunkSpan& span, int head) {
    const int64_t item = args.factors_at(chunk) + head;
    const int key_head = head / p.group;
    load_keys<kThreads, kK>(args, p.k, span, key_head, {s.k});
    load_keys<kThreads, kK>(args, p.q, span, key_head, {s.q});
    commit_copies();
    if (warp == 0) sum_gates(p, load_gates(p, span, head, lane), span.length, head, lane, s.gamma);
    if (threadIdx.x >= kThreads - kChunkRows) {
      const int row = threadIdx.x - (kThreads - kChunkRows);
      s.beta[row] = chunk_beta(p, span, head, row);
    }
    wait_copies<0>();
    __syncthreads();
    row_norms<kType, 2, kK>({s.k}, p.qk_l2norm, s.rstd_k);
    row_norms<kType, 2, kK>({s.q}, p.qk_l2norm, s.rstd_q);
    __syncthreads();
    make_sP<kType>(s, p.scale, 3 - warp, lane, args.factors.sP(item));
    float c[8][4];
    gram_rows<kType, kK>(s.reader(), s.writer(), warp, lane, c);
    __syncthreads();
    make_A(s, warp, lane, c);
    __syncthreads();
    invert_unit_lower(s.A, s.J, warp, lane);
    __syncthreads();
    store_lower<kType, kThreads>(s.J, args.factors.J(item));
    store_token_factors(s, p.scale, item, args.factors);
  });
}

}  // namespace

size_t factors_bytes(int padded_k) {
  size_t bytes = 0;
  with_tile(DType::kBF16, padded_k, [&]<DType, int kK>() { bytes = sizeof(Shared<kK>); });
  return bytes;
}

void launch_factors(const ChunkArgs& args, int padded_k, const Context& context) {
  with_tile(args.problem.k.dtype, padded_k, [&]<DType kType, int kK>() {
    launch<factors_kernel<kType, kK>>("delta_rule chunk_16bit factors", context,
                                      {blocks_for_items(args), kThreads, sizeof(Shared<kK>), true}, args);
  });
}

}  // namespace fastweight::cuda::chunk_16bit
