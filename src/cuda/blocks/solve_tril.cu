// J = (I + A)^-1 for the chunk matrices of a call, by forward substitution from A itself (common/unit_lower.cuh).
//
// A block of four warps takes 64 / C matrices, C / 16 warps to each.
#include <algorithm>

#include "cuda/blocks/chunks.h"
#include "cuda/blocks/kernels.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/unit_lower.cuh"

namespace fastweight::cuda {
namespace {

constexpr int kThreads = 128;
template <int kC>
constexpr int kMatricesPerBlock = 64 / kC;
template <int kC>
constexpr int kThreadsPerMatrix = kThreads / kMatricesPerBlock<kC>;

struct Args {
  DeviceTensor a, j;  // [B, T, HV, C]
  ChunkedSequences chunked;
  int64_t num_chunks = 0;  // at most
  int64_t heads = 0;
};

template <int kC>
struct Shared {
  alignas(16) float A[kC * kPitchOfLower<kC>];
  alignas(16) float T[kC * kC];
};

// A transposed; 0 on and above the diagonal, and in rows beyond the chunk. A warp reads 8 rows of 64 bytes, which its
// stores spread over the banks.
template <int kC>
__device__ __forceinline__ void load_lower(const Args& args, const ChunkSpan& span, int64_t head, int thread,
                                           float* A) {
  constexpr int kVec4s = kC / 4, kAcross = kC / 16;
  const DeviceTensor& a = args.a;
  for (int at = thread; at < kC * kVec4s; at += kThreadsPerMatrix<kC>) {
    const int tile = at / kWarpSize, row = tile / kAcross * 8 + at % 8;
    const int column = tile % kAcross * 16 + at / 8 % 4 * 4;
    float values[4] = {};
    if (row < span.length && column < row) {
      const int64_t offset = row_offset(a, span.batch, span.begin + row, head) + column * a.strides[3];
      with_type(a.dtype, [&](auto type) {
        decode_vec4<type.value>(a.aligned_vec4 ? load_vec4<type.value>(element_at(a.data, type.value, offset))
                                               : gather_vec4(a.data, type.value, offset, a.strides[3], row - column),
                                values);
      });
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) A[(column + e) * kPitchOfLower<kC> + row] = column + e < row ? values[e] : 0.0f;
  }
}

template <int kC>
__device__ __forceinline__ void store_rows(const Args& args, const ChunkSpan& span, int64_t head, int thread,
                                           const float* T) {
  constexpr int kVec4s = kC / 4;
  const DeviceTensor& j = args.j;
  for (int at = thread; at < static_cast<int>(span.length) * kVec4s; at += kThreadsPerMatrix<kC>) {
    const int row = at / kVec4s, column = 4 * (at % kVec4s);
    const int64_t offset = row_offset(j, span.batch, span.begin + row, head) + column * j.strides[3];
    const float* values = T + row * kC + column;
    if (j.aligned_vec4) {
      with_type(j.dtype, [&](auto type) { store_vec4<type.value>(element_at(j.data, type.value, offset), values); });
    } else {
      scatter_vec4(j.data, j.dtype, offset, j.strides[3], 4, values);
    }
  }
}

template <int kC>
__global__ void __launch_bounds__(kThreads) solve_kernel(const __grid_constant__ Args args) {
  constexpr int kMatrices = kMatricesPerBlock<kC>;
  __shared__ Shared<kC> shared[kMatrices];
  const int place = threadIdx.x / kThreadsPerMatrix<kC>, thread = threadIdx.x % kThreadsPerMatrix<kC>;
  Shared<kC>& s = shared[place];
  const int64_t items = args.num_chunks * args.heads;
  for (int64_t first = int64_t{blockIdx.x} * kMatrices; first < items; first += int64_t{gridDim.x} * kMatrices) {
    const int64_t item = first + place < items ? first + place : items - 1, chunk = item / args.heads;
    const int64_t head = item - chunk * args.heads;
    ChunkSpan span = chunk_at(args.chunked, chunk);
    if (first + place >= items || span.sequence < 0) span.length = 0;  // substitutes zeros and stores nothing
    load_lower<kC>(args, span, head, thread, s.A);
    __syncthreads();
    solve_unit_lower<kC>(s.A, s.T, thread / kWarpSize, threadIdx.x % kWarpSize);
    __syncthreads();
    store_rows<kC>(args, span, head, thread, s.T);
    __syncthreads();  // before the next matrices overwrite these
  }
}

}  // namespace

void blocks::direct(const BlockProblem<SolveTrilForward>& problem, const Context& context) {
  const SolveTrilForward& forward = problem.args;
  const BlockSizes& sizes = problem.sizes;
  const NumberedChunks chunks = number_chunks(sizes, forward.cu_seqlens, context);
  Args args;
  args.a = device_tensor(forward.a);
  args.j = device_tensor(forward.j);
  args.chunked = chunks.chunked();
  args.num_chunks = chunks.count();
  args.heads = sizes.num_value_heads;
  const int64_t items = args.num_chunks * args.heads;
  if (items == 0) return;
  const auto launch_for = [&]<int kC>() {
    const int64_t blocks = (items + kMatricesPerBlock<kC> - 1) / kMatricesPerBlock<kC>;
    launch<solve_kernel<kC>>("solve_tril", context,
                             {static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 30)), kThreads}, args);
  };
  switch (sizes.chunk_size) {
    case 16:
      return launch_for.template operator()<16>();
    case 32:
      return launch_for.template operator()<32>();
    default:
      return launch_for.template operator()<64>();
  }
}

}  // namespace fastweight::cuda
