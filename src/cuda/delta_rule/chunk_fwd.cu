// Forward in the chunk form: the scan over the chunks of a sequence. See chunk.cuh for the equations and the factors.
//
// A block has one (sequence, value head) and up to 128 value columns, a warp 16 of them. Everything on the value side
// is transposed, so that the state, S^T [16 x K], stays in the warp's registers as fp32 accumulators, and every result
// is the next product's left operand as it lies:
//
//     X = S^T k^T,  O = S^T q^T      W = beta v^T - (..) X      N = W T^T      O = (..) O + N P^T      S^T = (..) S^T +
//     N k
//
// The right operands come from shared memory: k, q, v, T and P of one chunk, while those of the next are copied. Warps
// share them and nothing else; one barrier per chunk. Value columns do not touch each other, so the number of warps of
// a block is free, and has no influence on the result.
#include <algorithm>
#include <string>

#include "cuda/common/first_chunks.h"
#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk.cuh"
#include "cuda/delta_rule/chunk_scan.cuh"
#include "cuda/delta_rule/implementations.h"
#include "ops/workspace.h"

namespace fastweight::cuda {
namespace {

constexpr int kMostWarps = kColumnsOfV / kColumnsOfWarp;
constexpr int kRowTiles = kChunkRows / 8;  // C tiles along the tokens of a chunk

// One chunk's operands. Per channel, reads and writes have keys of their own.
template <int kK, bool kPerChannel>
struct Stage {
  alignas(128) uint16_t keys[(kPerChannel ? 3 : 2) * kChunkRows * kK];
  alignas(128) uint16_t v[kChunkRows * kColumnsOfV];
  alignas(128) uint16_t T[kChunkRows * kChunkRows];
  alignas(128) uint16_t P[kChunkRows * kChunkRows];
  alignas(16) float token[4 * kChunkRows];
  alignas(16) float total[kPerChannel ? kK : 4];

  __device__ SharedTile<kK> read_keys() { return {keys}; }
  __device__ SharedTile<kK> queries() { return {keys + kChunkRows * kK}; }
  __device__ SharedTile<kK> write_keys() { return {kPerChannel ? keys + 2 * kChunkRows * kK : keys}; }
};

template <int kK, bool kPerChannel>
__device__ __forceinline__ void load_stage(const ChunkArgs& args, const ScanPart& part, const SequenceSpan& span,
                                           int64_t position, Stage<kK, kPerChannel>& stage) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int64_t first = position * args.chunked.chunk_size;
  const int64_t token = span.begin + first;
  const int rows = static_cast<int>(min(span.length - first, args.chunked.chunk_size));
  const int64_t item = (part.first_chunk + position) * p.num_value_heads + part.head;
  if constexpr (kPerChannel) {
    const uint16_t* keys = args.factors.keys + item * 3 * kChunkRows * kK;
    copy_tile(stage.read_keys(), keys);
    copy_tile(stage.queries(), keys + kChunkRows * kK);
    copy_tile(stage.write_keys(), keys + 2 * kChunkRows * kK);
  } else {
    load_tile<kChunkRows>(stage.read_keys(), p.k, row_offset(p.k, span.batch, token, part.key_head), rows, 0,
                          p.head_dim_k, args.vector_keys);
    load_tile<kChunkRows>(stage.queries(), p.q, row_offset(p.q, span.batch, token, part.key_head), rows, 0,
                          p.head_dim_k, args.vector_keys);
  }
  load_tile<kChunkRows, kColumnsOfV>({stage.v}, p.v, row_offset(p.v, span.batch, token, part.head), rows, part.column,
                                     min(p.head_dim_v, part.column + static_cast<int>(blockDim.x) / 2),
                                     args.vector_values);
  copy_lower({stage.T}, args.factors.T + item * kChunkRows * kChunkRows);
  copy_lower({stage.P}, args.factors.P + item * kChunkRows * kChunkRows);
  copy_floats(stage.token, args.factors.token + item * 4 * kChunkRows, 4 * kChunkRows);
  copy_floats(stage.total, args.factors.total + item * args.factors.total_width, args.factors.total_width);
}

// The columns of a C tile are tokens: its elements 0 and 2 belong to one, 1 and 3 to the next.
__device__ __forceinline__ float2 token_pair(const float* token, int factor, int tile, int lane) {
  return *reinterpret_cast<const float2*>(token + factor * kChunkRows + 8 * tile + 2 * (lane % 4));
}

// sum += left right^T, where left [16 x 64] is given as A fragments and right is lower triangular [64 x 64].
template <DType kType>
__device__ __forceinline__ void multiply_lower(const uint32_t (&left)[4][4], const SharedTile<kChunkRows>& right,
                                               int lane, float (&sum)[kRowTiles][4]) {
#pragma unroll
  for (int m = 0; m < kChunkRows / 16; ++m) {
#pragma unroll
    for (int n = m; n < kChunkRows / 16; ++n) {
      uint32_t b[4];
      right.load_b(16 * n, m, lane, b);
      mma<kType>(sum[2 * n], left[m], b[0], b[1]);
      mma<kType>(sum[2 * n + 1], left[m], b[2], b[3]);
    }
  }
}

// One chunk: advances S^T and leaves o^T in O.
template <DType kType, int kK, bool kPerChannel>
__device__ __forceinline__ void advance(Stage<kK, kPerChannel>& stage, int warp, int lane, float (&S)[kK / 8][4],
                                        float (&O)[kRowTiles][4]) {
  float X[kRowTiles][4];
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) X[n][e] = O[n][e] = 0;
  }
  const SharedTile<kK> keys = stage.read_keys(), queries = stage.queries(), writes = stage.write_keys();
#pragma unroll
  for (int m = 0; m < kK / 16; ++m) {
    uint32_t s[4];
    pack_a<kType>(S[2 * m], S[2 * m + 1], s);
#pragma unroll
    for (int n = 0; n < kChunkRows / 16; ++n) {
      uint32_t b[4];
      keys.load_b(16 * n, m, lane, b);
      mma<kType>(X[2 * n], s, b[0], b[1]);
      mma<kType>(X[2 * n + 1], s, b[2], b[3]);
      queries.load_b(16 * n, m, lane, b);
      mma<kType>(O[2 * n], s, b[0], b[1]);
      mma<kType>(O[2 * n + 1], s, b[2], b[3]);
    }
  }

  // W = beta v - (beta E(gamma)) X, and O's own factor
  uint32_t left[4][4];
  const SharedTile<kColumnsOfV> values{stage.v};
#pragma unroll
  for (int m = 0; m < kChunkRows / 16; ++m) {
    uint32_t v[4];
    values.load_c_transposed(16 * m, warp, lane, v);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = 2 * m + h;
      const float2 on_v = token_pair(stage.token, kOnValue, n, lane);
      const float2 on_x = token_pair(stage.token, kOnKeyRead, n, lane);
      const float2 on_o = token_pair(stage.token, kOnQueryRead, n, lane);
      const float2 low = unpack<kType>(v[2 * h]), high = unpack<kType>(v[2 * h + 1]);
      X[n][0] = fmaf(on_v.x, low.x, -on_x.x * X[n][0]);
      X[n][1] = fmaf(on_v.y, low.y, -on_x.y * X[n][1]);
      X[n][2] = fmaf(on_v.x, high.x, -on_x.x * X[n][2]);
      X[n][3] = fmaf(on_v.y, high.y, -on_x.y * X[n][3]);
      O[n][0] *= on_o.x;
      O[n][1] *= on_o.y;
      O[n][2] *= on_o.x;
      O[n][3] *= on_o.y;
    }
    pack_a<kType>(X[2 * m], X[2 * m + 1], left[m]);
  }

  // N = W T^T into X, then O += N P^T
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) X[n][0] = X[n][1] = X[n][2] = X[n][3] = 0;
  multiply_lower<kType>(left, {stage.T}, lane, X);
#pragma unroll
  for (int m = 0; m < kChunkRows / 16; ++m) pack_a<kType>(X[2 * m], X[2 * m + 1], left[m]);
  multiply_lower<kType>(left, {stage.P}, lane, O);

  // S^T = E(gamma_L) S^T + (E(gamma_L - gamma) N) k
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
    const float2 total = kPerChannel ? *reinterpret_cast<const float2*>(stage.total + 8 * n + 2 * (lane % 4))
                                     : make_float2(stage.total[0], stage.total[0]);
    S[n][0] *= total.x;
    S[n][1] *= total.y;
    S[n][2] *= total.x;
    S[n][3] *= total.y;
  }
#pragma unroll
  for (int m = 0; m < kChunkRows / 16; ++m) {
    if constexpr (!kPerChannel) {
#pragma unroll
      for (int n = 2 * m; n < 2 * m + 2; ++n) {
        const float2 on_n = token_pair(stage.token, kOnWrite, n, lane);
        X[n][0] *= on_n.x;
        X[n][1] *= on_n.y;
        X[n][2] *= on_n.x;
        X[n][3] *= on_n.y;
      }
      pack_a<kType>(X[2 * m], X[2 * m + 1], left[m]);
    }
#pragma unroll
    for (int n = 0; n < kK / 16; ++n) {
      uint32_t b[4];
      writes.load_b_transposed(16 * m, n, lane, b);
      mma<kType>(S[2 * n], left[m], b[0], b[1]);
      mma<kType>(S[2 * n + 1], left[m], b[2], b[3]);
    }
  }
}

// The warp's columns of o into a tile, from the transposed C tiles.
template <DType kType>
__device__ __forceinline__ void put_outputs(const SharedTile<kColumnsOfV>& tile, int warp, int lane,
                                            const float (&O)[kRowTiles][4]) {
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t pair = transpose_8x8(pack<kType>(O[n][2 * h], O[n][2 * h + 1]));
      *reinterpret_cast<uint32_t*>(&tile.at(8 * n + lane / 4, 16 * warp + 8 * h + 2 * (lane % 4))) = pair;
    }
  }
}

// A complete tile of o to the caller.
__device__ __forceinline__ void store_outputs(const ChunkArgs& args, const SharedTile<kColumnsOfV>& tile,
                                              int64_t offset, int rows, int first) {
  const DeviceTensor& o = args.o;
  auto* data = static_cast<uint16_t*>(o.data) + offset;
  const int V = args.problem.head_dim_v;
  const int segments = static_cast<int>(blockDim.x) / 16;  // of a row of the block
  for (int at = threadIdx.x; at < rows * segments; at += blockDim.x) {
    const int row = at / segments, segment = at % segments, column = first + 8 * segment;
    if (column >= V) continue;
    const uint16_t* from = tile.segment(row, segment);
    uint16_t* to = data + row * o.strides[1] + column * o.strides[3];
    if (args.vector_outputs) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < 8 && column + e < V; ++e) to[e * o.strides[3]] = from[e];
    }
  }
}

template <DType kType, int kK, bool kPerChannel>
__device__ __forceinline__ void run_part(const ChunkArgs& args, const ScanPart& part, int stages,
                                         uint16_t* output_tiles, Stage<kK, kPerChannel>* stage) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int K = p.head_dim_k, V = p.head_dim_v, column = part.column + kColumnsOfWarp * warp;
  const SequenceSpan span = sequence_at(p.sequences, part.sequence);
  const int64_t C = args.chunked.chunk_size;
  // Offsets out of order may claim more chunks than there is scratch memory for.
  const int64_t chunks = max(min(chunks_of(span.length, C), args.num_chunks - part.first_chunk), int64_t{0});
  if (chunks > 0) load_stage(args, part, span, 0, stage[0]);
  commit_copies();

  float S[kK / 8][4] = {};
  if (args.initial_state.present()) {
    load_state<kK>(args.initial_state, state_offset(args.initial_state, part), column, K, V, lane, S);
  }
  const auto output_tile = [&](int64_t c) {
    return SharedTile<kColumnsOfV>{output_tiles + c % 2 * kChunkRows * kColumnsOfV};
  };
  // Outputs are stored a chunk later, when the barrier has made the tile complete; the tile after it is the other one.
  const auto store_chunk = [&](int64_t c) {
    store_outputs(args, output_tile(c), row_offset(args.o, span.batch, span.begin + c * C, part.head),
                  static_cast<int>(min(span.length - c * C, C)), part.column);
  };
  for (int64_t c = 0; c < chunks; ++c) {
    if (args.chunk_states.present()) {
      const DeviceStates& states = args.chunk_states;
      const int64_t chunk = first_chunk_of(args.chunked, part.sequence) + c;
      const int64_t base =
          span.batch * states.outer_strides[0] + chunk * states.outer_strides[1] + part.head * states.outer_strides[2];
      if (chunk < args.state_chunks) store_state<kK>(states, base, column, K, V, lane, S);
    }
    // After the barrier everybody's copies of this chunk are there, and nobody reads the last chunk's stage any more.
    wait_copies<0>();
    __syncthreads();
    Stage<kK, kPerChannel>& current = stage[c % stages];
    if (stages > 1 && c + 1 < chunks) load_stage(args, part, span, c + 1, stage[(c + 1) % stages]);
    commit_copies();
    if (c > 0) store_chunk(c - 1);
    float O[kRowTiles][4];
    advance<kType, kK, kPerChannel>(current, warp, lane, S, O);
    put_outputs<kType>(output_tile(c), warp, lane, O);
    if (stages == 1) {
      __syncthreads();
      if (c + 1 < chunks) load_stage(args, part, span, c + 1, stage[0]);
      commit_copies();
    }
  }
  if (chunks > 0) {
    __syncthreads();
    store_chunk(chunks - 1);
  }
  if (args.final_state.present()) {
    store_state<kK>(args.final_state, state_offset(args.final_state, part), column, K, V, lane, S);
  }
}

// A block per part; a smaller grid goes round.
template <DType kType, int kK, bool kPerChannel>
__global__ void __launch_bounds__(kMostWarps* kWarpSize)
    scan_kernel(const __grid_constant__ ChunkArgs args, int stages, int ranges, int64_t parts) {
  auto* tiles = &dynamic_shared<uint16_t>();
  auto* stage = reinterpret_cast<Stage<kK, kPerChannel>*>(tiles + 2 * kChunkRows * kColumnsOfV);
  for (int64_t at = blockIdx.x; at < parts; at += gridDim.x) {
    const ScanPart part = scan_part_at(args.problem, args.chunked, at, ranges);
    run_part<kType, kK, kPerChannel>(args, part, stages, tiles, stage);
    __syncthreads();  // before the next part's first copies
  }
}

// Shared memory of the scan.
template <int kK, bool kPerChannel>
constexpr size_t scan_bytes(int stages) {
  return 2 * kChunkRows * kColumnsOfV * sizeof(uint16_t) + static_cast<size_t>(stages) * sizeof(Stage<kK, kPerChannel>);
}

template <DType kType, int kK, bool kPerChannel>
void launch_scan(const ChunkArgs& args, const Context& context) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int64_t rows = p.sequences.count * p.num_value_heads;
  // Blocks of 128 columns share their operands best; blocks of 64 fill the device when there are few heads.
  const int wide = (p.head_dim_v + kColumnsOfV - 1) / kColumnsOfV;
  const bool narrow =
      p.head_dim_v <= 64 || rows * wide * 2 <= device_attribute(cudaDevAttrMultiProcessorCount, context.device.index);
  const int columns = narrow ? kColumnsOfV / 2 : kColumnsOfV;
  const int ranges = (p.head_dim_v + columns - 1) / columns;
  const auto most =
      static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, context.device.index));
  const int stages = scan_bytes<kK, kPerChannel>(2) <= most ? 2 : 1;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(rows * ranges, 1 << 30));
  launch<scan_kernel<kType, kK, kPerChannel>>(
      "delta_rule chunk", context, {blocks, static_cast<unsigned>(columns * 2), scan_bytes<kK, kPerChannel>(stages)},
      args, stages, ranges, rows * ranges);
}

// What a block of either kernel needs at least.
size_t shared_bytes(const DeltaRuleForwardProblem& problem) {
  const bool per_channel = problem.args.options.gate == Gate::kPerChannel;
  const int width = padded_k(problem.sizes.head_dim_k);
  size_t bytes = per_channel ? chunk_factors_channels_bytes(width) : chunk_factors_bytes(width);
  with_tile<64, 128, 256>(DType::kBF16, width, [&]<DType, int kK>() {
    bytes = std::max(bytes, per_channel ? scan_bytes<kK, true>(1) : scan_bytes<kK, false>(1));
  });
  return bytes;
}

struct Scratch {
  int64_t* first_chunk;
  ChunkFactors factors;
};

// The layout of the scratch memory of a call.
Scratch take_scratch(Carver& carver, const DeltaRuleForwardProblem& problem, int64_t num_chunks) {
  const bool per_channel = problem.args.options.gate == Gate::kPerChannel;
  const int64_t items = num_chunks * problem.sizes.num_value_heads;
  const int width = padded_k(problem.sizes.head_dim_k);
  Scratch scratch;
  scratch.first_chunk =
      carver.take<int64_t>(problem.args.in.cu_seqlens.present() ? problem.sizes.num_sequences + 1 : 0);
  ChunkFactors& factors = scratch.factors;
  factors.total_width = per_channel ? width : 4;
  factors.T = carver.take<uint16_t>(items * kChunkRows * kChunkRows);
  factors.P = carver.take<uint16_t>(items * kChunkRows * kChunkRows);
  factors.token = carver.take<float>(items * 4 * kChunkRows);
  factors.total = carver.take<float>(items * factors.total_width);
  factors.keys = carver.take<uint16_t>(per_channel ? items * 3 * kChunkRows * width : 0);
  return scratch;
}

}  // namespace

bool takes_16_bit_operands(const DeltaRuleForwardProblem& problem) {
  const DeltaRuleInputs& in = problem.args.in;
  const DType dtype = in.q.dtype;
  if (dtype != DType::kBF16 && dtype != DType::kF16) return false;
  return in.k.dtype == dtype && in.v.dtype == dtype && problem.args.o.dtype == dtype && in.beta.rank != 4;
}

std::string declines_chunk_forward_16(const DeltaRuleForwardProblem& problem) {
  return lacks_shared_memory(shared_bytes(problem), problem.args.in.q.device.index);
}

void chunk_forward_16(const DeltaRuleForwardProblem& problem, const Context& context) {
  const DeltaRuleForward& forward = problem.args;
  const bool v_first = forward.options.state_v_first;
  ChunkArgs args;
  args.problem = device_problem(problem);
  args.vector_keys = has_vectors(forward.in.q) && has_vectors(forward.in.k);
  args.vector_values = has_vectors(forward.in.v);
  args.vector_outputs = has_vectors(forward.o);
  args.o = device_tensor(forward.o);
  args.initial_state = device_states(forward.in.initial_state, v_first);
  args.final_state = device_states(forward.final_state, v_first);
  args.chunk_states = device_states(forward.chunk_states, v_first);
  args.state_chunks = problem.sizes.num_chunks;
  args.chunked.sequences = args.problem.sequences;
  args.chunked.chunk_size = forward.options.chunk_size;
  args.num_chunks = max_chunks(args.problem.sequences, forward.options.chunk_size);

  Carver measure;
  take_scratch(measure, problem, args.num_chunks);
  const DeviceWorkspace workspace(context, measure.bytes());
  Carver carver(workspace.data());
  const Scratch scratch = take_scratch(carver, problem, args.num_chunks);
  args.factors = scratch.factors;
  if (forward.in.cu_seqlens.present()) {
    build_first_chunks(args.problem.sequences, forward.options.chunk_size, scratch.first_chunk, context);
    args.chunked.first_chunk = scratch.first_chunk;
  }

  const int width = padded_k(problem.sizes.head_dim_k);
  const bool per_channel = forward.options.gate == Gate::kPerChannel;
  if (args.num_chunks > 0) {
    per_channel ? launch_chunk_factors_channels(args, width, context) : launch_chunk_factors(args, width, context);
  }
  if (per_channel) {
    with_tile<64, 128, 256>(forward.in.k.dtype, width,
                            [&]<DType kType, int kK>() { launch_scan<kType, kK, true>(args, context); });
  } else {
    with_tile<64, 128, 256>(forward.in.k.dtype, width,
                            [&]<DType kType, int kK>() { launch_scan<kType, kK, false>(args, context); });
  }
}

}  // namespace fastweight::cuda
