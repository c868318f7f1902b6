// Forward token by token: a block walks over all tokens of its sequence with the state in registers. See recurrent.cuh
// for the equations and for who holds what. Every layout; step.cu launches it too, but has a kernel of its own for one
// token whose tensors lie in vec4s.
//
// One barrier per token. The rows of the next token are loaded while the current one is computed.
#include <algorithm>

#include "core/workspace.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/first_chunks.h"
#include "cuda/common/launch.h"
#include "cuda/delta_rule/device_problem.h"
#include "cuda/delta_rule/kernels.h"
#include "cuda/delta_rule/recurrent/recurrent.cuh"
#include "cuda/delta_rule/recurrent/rows.cuh"
#include "cuda/delta_rule/state_address.cuh"

namespace fastweight::cuda::recurrent {
namespace {

template <int kPlaces, DType kType, bool kAlongK>
__device__ __forceinline__ void load_state_vec4s(const DeviceStates& states, int64_t offset, const Part& part, int K,
                                                 int V, StateTile& S) {
  RawVec4 raw[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int key = key_of<kPlaces>(part, i / 4) + (kAlongK ? 0 : i % 4);
    const int column = part.column + (kAlongK ? i % 4 : 0);
    raw[i] = {};
    if (key < K && column < V) {
      raw[i] =
          load_vec4<kType>(element_at(states.data, kType, offset + key * states.k_stride + column * states.v_stride));
    }
  }
  decode_state<kType, kAlongK>(raw, S);
}

template <int kPlaces, DType kType, bool kAlongK>
__device__ __forceinline__ void store_state_vec4s(const DeviceStates& states, int64_t offset, const Part& part, int K,
                                                  int V, const StateTile& S) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int key = key_of<kPlaces>(part, i / 4) + (kAlongK ? 0 : i % 4);
    const int column = part.column + (kAlongK ? i % 4 : 0);
    float values[4];
    vec4_of<kAlongK>(S, i, values);
    if (key < K && column < V) {
      store_vec4<kType>(element_at(states.data, kType, offset + key * states.k_stride + column * states.v_stride),
                        values);
    }
  }
}

// vec4s(type, along_k) for fp32 and bf16 states with vec4s, each() for all others.
template <class Vec4s, class Each>
__device__ __forceinline__ void with_layout(const DeviceStates& states, const Vec4s& vec4s, const Each& each) {
  if ((!states.k_aligned_vec4 && !states.v_aligned_vec4) || states.dtype == DType::kF16) {
    each();
  } else if (states.dtype == DType::kF32) {
    constexpr std::integral_constant<DType, DType::kF32> kType;
    states.k_aligned_vec4 ? vec4s(kType, std::true_type()) : vec4s(kType, std::false_type());
  } else {
    constexpr std::integral_constant<DType, DType::kBF16> kType;
    states.k_aligned_vec4 ? vec4s(kType, std::true_type()) : vec4s(kType, std::false_type());
  }
}

template <int kPlaces>
__device__ __forceinline__ void load_state(const DeviceStates& states, int64_t offset, const Part& part, int K, int V,
                                           StateTile& S) {
  const auto vec4s = [&](auto type, auto along_k) {
    load_state_vec4s<kPlaces, type.value, along_k.value>(states, offset, part, K, V, S);
  };
  with_layout(states, vec4s, [&] {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = key_of<kPlaces>(part, i / 4) + i % 4;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int column = part.column + j;
        const bool inside = key < K && column < V;
        const int64_t element = offset + key * states.k_stride + column * states.v_stride;
        S.s[i][j] = inside ? load_float(states.data, states.dtype, element) : 0.0f;
      }
    }
  });
}

template <int kPlaces>
__device__ __forceinline__ void store_state(const DeviceStates& states, int64_t offset, const Part& part, int K, int V,
                                            const StateTile& S) {
  const auto vec4s = [&](auto type, auto along_k) {
    store_state_vec4s<kPlaces, type.value, along_k.value>(states, offset, part, K, V, S);
  };
  with_layout(states, vec4s, [&] {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = key_of<kPlaces>(part, i / 4) + i % 4;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int column = part.column + j;
        const int64_t element = offset + key * states.k_stride + column * states.v_stride;
        if (key < K && column < V) store_float(states.data, states.dtype, element, S.s[i][j]);
      }
    }
  });
}

// The rows of one token of one head. Absent tensors are null.
struct TokenRows {
  const char *q, *k, *v, *g, *beta;
  char* o;
};

__device__ __forceinline__ TokenRows rows_at(const RecurrentArgs& args, const Part& part, const SequenceSpan& span) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int qk_head = part.head / p.group;
  TokenRows rows;
  rows.q = row_at(p.q, span.batch, span.begin, qk_head);
  rows.k = row_at(p.k, span.batch, span.begin, qk_head);
  rows.v = row_at(p.v, span.batch, span.begin, part.head);
  rows.g = row_at(p.g, span.batch, span.begin, part.head);
  rows.beta = row_at(p.beta, span.batch, span.begin, part.head);
  rows.o = const_cast<char*>(row_at(args.o, span.batch, span.begin, part.head));
  return rows;
}

__device__ __forceinline__ void next_inputs(const DeltaRuleDeviceProblem& p, TokenRows& rows) {
  rows.q += byte_offset(p.q.dtype, p.q.strides[1]);
  rows.k += byte_offset(p.k.dtype, p.k.strides[1]);
  rows.v += byte_offset(p.v.dtype, p.v.strides[1]);
  rows.g += byte_offset(p.g.dtype, p.g.strides[1]);
  rows.beta += byte_offset(p.beta.dtype, p.beta.strides[1]);
}

// A token's rows as they lie in memory: the lane's key channels of q and k, its columns of v.
struct RawToken {
  RawVec4 q[kKeys / 4], k[kKeys / 4], v;
  RawScalars scalars;
};

template <int kPlaces>
__device__ __forceinline__ void load_token(const DeltaRuleDeviceProblem& p, const Part& part, const TokenRows& rows,
                                           RawToken& raw) {
  const int K = p.head_dim_k, V = p.head_dim_v;
  if (p.qkv_aligned_vec4) {
    with_type(p.q.dtype, [&](auto type) {
#pragma unroll
      for (int vec4 = 0; vec4 < kKeys / 4; ++vec4) {
        const int key = key_of<kPlaces>(part, vec4);
        raw.q[vec4] = raw.k[vec4] = {};
        if (key < K) {
          raw.k[vec4] = load_vec4<type.value>(rows.k + byte_offset(type.value, key));
          raw.q[vec4] = load_vec4<type.value>(rows.q + byte_offset(type.value, key));
        }
      }
      raw.v = {};
      if (part.column < V) raw.v = load_vec4<type.value>(rows.v + byte_offset(type.value, part.column));
    });
  } else {
#pragma unroll
    for (int vec4 = 0; vec4 < kKeys / 4; ++vec4) {
      const int key = key_of<kPlaces>(part, vec4);
      raw.k[vec4] = load_part(p.k, rows.k, key, K);
      raw.q[vec4] = load_part(p.q, rows.q, key, K);
    }
    raw.v = load_part(p.v, rows.v, part.column, V);
  }
  raw.scalars = load_scalars<kPlaces>(p, part, rows.g, byte_offset(p.g.dtype, p.g.strides[3]), rows.beta,
                                      byte_offset(p.beta.dtype, p.beta.strides[3]));
}

__device__ __forceinline__ void decode_token(const DeltaRuleDeviceProblem& p, const GateParameters& parameters,
                                             const RawToken& raw, Token& token) {
  with_type(p.q.dtype, [&](auto type) {
#pragma unroll
    for (int vec4 = 0; vec4 < kKeys / 4; ++vec4) {
      decode_vec4<type.value>(raw.k[vec4], token.k + vec4 * 4);
      decode_vec4<type.value>(raw.q[vec4], token.q + vec4 * 4);
    }
    decode_vec4<type.value>(raw.v, token.v);
  });
  decode_scalars(p, parameters, raw.scalars, token);
}

// All tokens of one sequence for the block's columns. The state is written in one place of the code, which its compile
// time asks for. `turn` counts tokens: two exchanges serve in turn, nobody is further ahead than one barrier.
template <int kPlaces>
__device__ __forceinline__ void run_part(const RecurrentArgs& args, const Part& part, Exchange<kPlaces> (&exchanges)[2],
                                         int& turn) {
  const DeltaRuleDeviceProblem& p = args.problem;
  const int K = p.head_dim_k, V = p.head_dim_v;
  const SequenceSpan span = sequence_at(p.sequences, part.sequence);
  const int64_t slot = slot_of(args.slots, part.sequence);
  TokenRows rows = rows_at(args, part, span);
  const int64_t o_step = byte_offset(args.o.dtype, args.o.strides[1]);
  if (slot < 0) {
    const float zeros[kColumns] = {};
    for (int64_t t = 0; t < span.length; ++t, rows.o += o_step) store_columns(args.o, part, V, rows.o, zeros);
    return;
  }
  if (args.in_place && span.length == 0) return;

  RawToken raw{};
  if (span.length > 0) load_token<kPlaces>(p, part, rows, raw);
  StateTile S{};
  if (args.initial_state.present()) {
    const int64_t* strides = args.initial_state.outer_strides;
    load_state<kPlaces>(args.initial_state, slot * strides[0] + part.head * strides[1], part, K, V, S);
  }
  const GateParameters parameters = decode_gate_parameters(p, load_gate_parameters<kPlaces>(p, part));

  for (int64_t t = 0;; ++t, rows.o += o_step) {
    const bool last = t == span.length;
    if (last || (args.chunk_states.present() && t % args.chunked.chunk_size == 0)) {
      const StateAddress place = last ? final_state_address(args, part, slot)
                                      : chunk_state_address(args, part, span.batch, t, args.chunked.chunk_size);
      if (place.exists) store_state<kPlaces>(place.states, place.offset, part, K, V, S);
    }
    if (last) return;
    Token token;
    decode_token(p, parameters, raw, token);
    if (t + 1 < span.length) {
      next_inputs(p, rows);
      load_token<kPlaces>(p, part, rows, raw);
    }
    Exchange<kPlaces>& exchange = exchanges[turn++ % 2];
    send_sums<kPlaces>(p, token, S, exchange);
    __syncthreads();
    float u[kColumns];
    receive_u<kPlaces>(p, token, exchange, u);
    update(token, u, S);
    if (args.o.present() && has_output()) {
      float o[kColumns];
      receive_output<kPlaces>(p, u, exchange, o);
      store_columns(args.o, part, V, rows.o, o);
    }
  }
}

// The warps on a multiprocessor: 12, or 16 where a block alone has eight.
template <int kPlaces>
inline constexpr int kBlocks = (kPlaces == 32 ? 512 : 384) / kThreads<kPlaces>;

// Blocks (columns, head, sequence): neighbours in time read neighbours in memory. A grid with fewer heads or sequences
// than there are goes round.
template <int kPlaces>
__global__ void __launch_bounds__(kThreads<kPlaces>, kBlocks<kPlaces>)
    recurrent_kernel(const __grid_constant__ RecurrentArgs args) {
  __shared__ Exchange<kPlaces> exchanges[2];
  Part part = part_of_thread();
  int turn = 0;
  for (part.sequence = blockIdx.z; part.sequence < args.problem.sequences.count; part.sequence += gridDim.z) {
    for (part.head = blockIdx.y; part.head < args.problem.num_value_heads; part.head += gridDim.y) {
      run_part<kPlaces>(args, part, exchanges, turn);
    }
  }
}

}  // namespace

void launch_tokens(const RecurrentArgs& args, const Context& context) {
  constexpr int64_t kMostBlocks = 65535;  // along y and z
  const DeltaRuleDeviceProblem& p = args.problem;
  with_places(p.head_dim_k, [&]<int kPlaces>() {
    const LaunchShape shape{dim3(static_cast<unsigned>((p.head_dim_v + kColumnsOfBlock - 1) / kColumnsOfBlock),
                                 static_cast<unsigned>(std::min<int64_t>(p.num_value_heads, kMostBlocks)),
                                 static_cast<unsigned>(std::min(p.sequences.count, kMostBlocks))),
                            kThreads<kPlaces>};
    launch<recurrent_kernel<kPlaces>>("delta_rule recurrent", context, shape, args);
  });
}

void forward(const DeltaRuleForwardProblem& problem, const Context& context) {
  const DeltaRuleForward& call = problem.args;
  const bool v_first = call.options.state_v_first;
  RecurrentArgs args;
  args.problem = device_problem(problem);
  args.o = device_tensor(call.o);
  args.initial_state = device_states(call.in.initial_state, v_first);
  args.final_state = device_states(call.final_state, v_first);
  args.chunk_states = device_states(call.chunk_states, v_first);
  args.state_chunks = problem.sizes.num_chunks;
  args.chunked.sequences = args.problem.sequences;
  args.chunked.chunk_size = call.options.chunk_size;

  const bool needs_first_chunks = args.chunk_states.present() && call.in.cu_seqlens.present();
  const auto take_scratch = [&](ScratchLayout& layout) {
    return layout.take<int64_t>(needs_first_chunks ? problem.sizes.num_sequences + 1 : 0);
  };
  ScratchLayout measure;
  take_scratch(measure);
  const DeviceWorkspace workspace(context, measure.bytes());
  if (needs_first_chunks) {
    ScratchLayout layout(workspace.data());
    int64_t* first_chunk = take_scratch(layout);
    build_first_chunks(args.problem.sequences, call.options.chunk_size, first_chunk, context);
    args.chunked.first_chunk = first_chunk;
  }
  launch_tokens(args, context);
}

}  // namespace fastweight::cuda::recurrent
