// The adjoint of the inverse:  dA = -slower(Z J^T),  Z = J^T dJ, of which the lower part counts.
//
// A block has a chunk of a head.
#include <algorithm>

#include "cuda/blocks/adjoint.cuh"
#include "cuda/blocks/chunks.h"
#include "cuda/blocks/kernels.h"
#include "cuda/common/launch.h"

namespace fastweight::cuda {
namespace {

constexpr int kMostThreads = 256;

struct Args {
  DeviceTensor j, dj, da;  // [B, T, HV, C]
  ChunkedSequences chunked;
  int64_t num_chunks = 0;  // at most
  int64_t heads = 0;       // HV
  int32_t chunk_size = 0;
};

struct Shared {
  alignas(16) float J[kTileRows * kPitch];
  alignas(16) float dJ[kTileRows * kPitch];  // then Z^T
  alignas(16) float J_columns[kTileRows * kTileRows];
};

__global__ void __launch_bounds__(kMostThreads) solve_adjoint_kernel(const __grid_constant__ Args args) {
  __shared__ Shared s;
  const GridPlace at = grid_place();
  const int64_t items = args.num_chunks * args.heads;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t chunk = item / args.heads, head = item - chunk * args.heads;
    const ChunkSpan span = chunk_at(args.chunked, chunk);
    if (span.sequence < 0) return;  // chunks are numbered without gaps: none follows
    read_lower(args.j, span, head, args.chunk_size, true, [&](int row, int column, const float(&v)[4]) {
      vec4_at(s.J, row, column) = make_float4(v[0], v[1], v[2], v[3]);
      put_columns({s.J_columns}, row, column, v);
    });
    read_lower(args.dj, span, head, args.chunk_size, false, [&](int row, int column, const float(&v)[4]) {
      vec4_at(s.dJ, row, column) = make_float4(v[0], v[1], v[2], v[3]);
    });
    __syncthreads();
    float Z[4][4] = {};
    if (at.column <= at.row) transposed_product(s.J, s.dJ, args.chunk_size, at, Z);
    __syncthreads();
    store_inverse_adjoint(args.da, span, head, args.chunk_size, at, Z, {s.J_columns}, {s.dJ});
  }
}

}  // namespace

void blocks::direct(const BlockProblem<SolveTrilBackward>& problem, const Context& context) {
  const SolveTrilBackward& backward = problem.args;
  const BlockSizes& sizes = problem.sizes;
  const NumberedChunks chunks = number_chunks(sizes, backward.cu_seqlens, context);
  Args args;
  args.j = device_tensor(backward.j);
  args.dj = device_tensor(backward.dj);
  args.da = device_tensor(backward.da);
  args.chunked = chunks.chunked();
  args.num_chunks = chunks.count();
  args.heads = sizes.num_value_heads;
  args.chunk_size = static_cast<int32_t>(sizes.chunk_size);
  const int64_t items = args.num_chunks * args.heads;
  if (items == 0) return;
  const LaunchShape shape{static_cast<unsigned>(std::min<int64_t>(items, 1 << 30)),
                          static_cast<unsigned>(args.chunk_size / 4 * kAcross)};
  launch<solve_adjoint_kernel>("solve_tril adjoint", context, shape, args);
}

}  // namespace fastweight::cuda
