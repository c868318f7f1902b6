// Decoding, with states in place. The kernel here is for a step of one token per sequence, where q, k, v, o and the
// states lie in vec4s: what decoding does. Other steps are fwd.cu's, with the same bits. See recurrent.cuh for the
// equations and for who holds what.
//
// It moves the states and does little else, so the code is short, without run-time choices around the states: their
// type and order are template parameters. Their loads are the first of all; the token's rows arrive meanwhile.
#include <cstdint>
#include <limits>

#include "cuda/common/elements.cuh"
#include "cuda/common/instructions.cuh"
#include "cuda/common/launch.h"
#include "cuda/delta_rule/kernels.h"
#include "cuda/delta_rule/recurrent/recurrent.cuh"

namespace fastweight::cuda::recurrent {
namespace {

// Rows of a token, or matrices, [sequence, head, ..], strides in bytes.
struct StepTensor {
  char* data;
  uint64_t sequence, head;
  uint32_t element;  // along the last axis; between the rows of a state's vec4s

  __device__ __forceinline__ char* at(uint64_t n, uint32_t h) const { return data + n * sequence + h * head; }
  __device__ __forceinline__ char* at(uint64_t n, uint32_t h, uint32_t i) const {
    return at(n, h) + static_cast<uint64_t>(i) * element;
  }
};

struct StepArgs {
  DeltaRuleDeviceProblem problem;  // of which the tensors' places are here:
  StepTensor q, k, v, g, beta, o;
  StepTensor states;
  Slots slots;
  DType o_type;
};

// The lane's vec4s of a state: four rows with two vec4s in each (kAlongK), or two groups of four rows.
template <int kPlaces, DType kType, bool kAlongK>
struct StateVec4s {
  char* first;
  uint32_t row;  // bytes

  __device__ __forceinline__ char* at(int i) const {
    const uint32_t rows = i % 4 + (kAlongK ? 0 : i / 4 * 4 * kPlaces), elements = kAlongK ? i / 4 * 4 * kPlaces : 0;
    return first + static_cast<uint64_t>(row) * rows + byte_offset(kType, elements);
  }
};

// Which of the lane's channels and columns exist. All of a vec4 or none.
struct Inside {
  bool keys[kKeys / 4], columns;
};

template <int kPlaces, DType kType, bool kAlongK>
__device__ __forceinline__ void store_state(const StateVec4s<kPlaces, kType, kAlongK>& vec4s, const Inside& inside,
                                            const StateTile& S) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    float values[4];
    vec4_of<kAlongK>(S, i, values);
    if (inside.keys[i / 4] && inside.columns) store_vec4<kType>(vec4s.at(i), values);
  }
}

// From where the lane's share of the rows begins.
template <int kPlaces>
__device__ __forceinline__ void load_token(DType dtype, const Inside& inside, const char* q, const char* k,
                                           const char* v, Token& token) {
  with_type(dtype, [&](auto type) {
    constexpr DType kType = type.value;
    RawVec4 raw_q[kKeys / 4] = {}, raw_k[kKeys / 4] = {}, raw_v = {};
#pragma unroll
    for (int vec4 = 0; vec4 < kKeys / 4; ++vec4) {
      const int64_t offset = byte_offset(kType, vec4 * 4 * kPlaces);
      if (inside.keys[vec4]) raw_k[vec4] = load_vec4<kType>(k + offset);
      if (inside.keys[vec4]) raw_q[vec4] = load_vec4<kType>(q + offset);
    }
    if (inside.columns) raw_v = load_vec4<kType>(v);
#pragma unroll
    for (int vec4 = 0; vec4 < kKeys / 4; ++vec4) {
      decode_vec4<kType>(raw_k[vec4], token.k + vec4 * 4);
      decode_vec4<kType>(raw_q[vec4], token.q + vec4 * 4);
    }
    decode_vec4<kType>(raw_v, token.v);
  });
}

__device__ __forceinline__ void store_output(DType dtype, const Part& part, const Inside& inside, char* o,
                                             const float (&values)[kColumns]) {
  if (part.place != 0 || !inside.columns) return;
  with_type(dtype, [&](auto type) { store_vec4<type.value>(o, values); });
}

// Registers for 24 warps on a multiprocessor.
template <int kPlaces>
inline constexpr int kBlocks = 768 / kThreads<kPlaces>;

template <int kPlaces, DType kType, bool kAlongK>
__global__ void __launch_bounds__(kThreads<kPlaces>, kBlocks<kPlaces>)
    step_kernel(const __grid_constant__ StepArgs args) {
  __shared__ Exchange<kPlaces> exchange;
  const DeltaRuleDeviceProblem& p = args.problem;
  Part part = part_of_thread();
  part.head = static_cast<int>(blockIdx.y);
  const uint32_t sequence = blockIdx.z, head = blockIdx.y, qk_head = p.group == 1 ? head : head / p.group;
  const int key = key_of<kPlaces>(part, 0);
  Inside inside;
#pragma unroll
  for (int vec4 = 0; vec4 < kKeys / 4; ++vec4) inside.keys[vec4] = key_of<kPlaces>(part, vec4) < p.head_dim_k;
  inside.columns = part.column < p.head_dim_v;
  const char* const q = opaque(args.q.at(sequence, qk_head, key));
  const char* const k = opaque(args.k.at(sequence, qk_head, key));
  const char* const v = opaque(args.v.at(sequence, head, part.column));
  const char* const g = opaque(args.g.at(sequence, head));
  const char* const beta = opaque(args.beta.at(sequence, head));
  char* const o = opaque(args.o.at(sequence, head, part.column));
  char* const states =
      opaque(args.states.at(0, head, kAlongK ? part.column : key) + byte_offset(kType, kAlongK ? key : part.column));
  wait_for_previous_kernels();
  let_next_kernel_start();

  const int64_t slot = slot_of(args.slots, sequence);
  if (slot < 0) {
    const float zeros[kColumns] = {};
    store_output(args.o_type, part, inside, o, zeros);
    return;
  }
  const StateVec4s<kPlaces, kType, kAlongK> vec4s{opaque(states + slot * args.states.sequence), args.states.element};
  RawVec4 raw[kKeys] = {};
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    if (inside.keys[i / 4] && inside.columns) raw[i] = load_vec4<kType>(vec4s.at(i));
  }
  const RawScalars scalars = load_scalars<kPlaces>(p, part, g, args.g.element, beta, args.beta.element);
  const RawGateParameters parameters = load_gate_parameters<kPlaces>(p, part);
  Token token;
  load_token<kPlaces>(p.q.dtype, inside, q, k, v, token);
  decode_scalars(p, decode_gate_parameters(p, parameters), scalars, token);
  StateTile S;
  decode_state<kType, kAlongK>(raw, S);

  send_sums<kPlaces>(p, token, S, exchange);
  __syncthreads();
  float u[kColumns];
  receive_u<kPlaces>(p, token, exchange, u);
  update(token, u, S);
  store_state<kPlaces, kType, kAlongK>(vec4s, inside, S);
  if (has_output()) {
    float values[kColumns];
    receive_output<kPlaces>(p, u, exchange, values);
    store_output(args.o_type, part, inside, o, values);
  }
}

struct OneToken {
  DeltaRuleDeviceProblem problem;
  DeviceTensor o;       // [B, 1, HV, V]
  DeviceStates states;  // [slots, HV] matrices
  Slots slots;
};

constexpr int64_t kMostBlocks = 65535;  // along y and z

// All of them are from 0 on; rows of states and elements lie near each other.
uint64_t row_stride(const DeviceStates& states) {
  return static_cast<uint64_t>(byte_offset(states.dtype, states.k_aligned_vec4 ? states.v_stride : states.k_stride));
}
uint64_t element_stride(const DeviceTensor& x) { return static_cast<uint64_t>(byte_offset(x.dtype, x.strides[3])); }

StepTensor step_tensor(const DeviceTensor& x) {
  const auto bytes = [&](int axis) { return static_cast<uint64_t>(byte_offset(x.dtype, x.strides[axis])); };
  return {static_cast<char*>(x.data), bytes(0), bytes(2), static_cast<uint32_t>(element_stride(x))};
}

StepTensor step_tensor(const DeviceStates& x) {
  const auto bytes = [&](int axis) { return static_cast<uint64_t>(byte_offset(x.dtype, x.outer_strides[axis])); };
  return {static_cast<char*>(x.data), bytes(0), bytes(1), static_cast<uint32_t>(row_stride(x))};
}

// What is absent gets the place of q, which is global memory, and is not read.
StepArgs args_of(const OneToken& step) {
  const DeltaRuleDeviceProblem& p = step.problem;
  const auto place = [&](const DeviceTensor& x) { return step_tensor(x.present() ? x : p.q); };
  return {p,          place(p.q),    place(p.k),    place(p.v),
          place(p.g), place(p.beta), place(step.o), step_tensor(step.states),
          step.slots, step.o.dtype};
}

// Whether q, k, v, o and the states lie in vec4s, and the sizes are those of a grid.
bool is_one_token_in_vec4s(const OneToken& step) {
  const DeltaRuleDeviceProblem& p = step.problem;
  const DeviceStates& states = step.states;
  constexpr uint64_t kMostBytes = std::numeric_limits<uint32_t>::max();
  return p.sequences.offsets == nullptr && p.sequences.tokens == 1 && p.qkv_aligned_vec4 && step.o.aligned_vec4 &&
         (states.k_aligned_vec4 || states.v_aligned_vec4) &&
         (states.dtype == DType::kF32 || states.dtype == DType::kBF16) && row_stride(states) <= kMostBytes &&
         element_stride(p.g) <= kMostBytes && element_stride(p.beta) <= kMostBytes &&
         p.sequences.count <= kMostBlocks && p.num_value_heads <= kMostBlocks;
}

void launch_one_token(const OneToken& step, const Context& context) {
  const DeltaRuleDeviceProblem& p = step.problem;
  const StepArgs args = args_of(step);
  with_places(p.head_dim_k, [&]<int kPlaces>() {
    LaunchShape shape{dim3(static_cast<unsigned>((p.head_dim_v + kColumnsOfBlock - 1) / kColumnsOfBlock),
                           static_cast<unsigned>(p.num_value_heads), static_cast<unsigned>(p.sequences.count)),
                      kThreads<kPlaces>};
    shape.overlaps = true;
    const auto launch_for = [&]<DType kType>() {
      constexpr const char* kName = "delta_rule recurrent step";
      if (step.states.k_aligned_vec4) {
        launch<step_kernel<kPlaces, kType, true>>(kName, context, shape, args);
      } else {
        launch<step_kernel<kPlaces, kType, false>>(kName, context, shape, args);
      }
    };
    if (step.states.dtype == DType::kF32) {
      launch_for.template operator()<DType::kF32>();
    } else {
      launch_for.template operator()<DType::kBF16>();
    }
  });
}

}  // namespace

void step(const DeltaRuleStepProblem& problem, const Context& context) {
  const DeltaRuleStep& call = problem.args;
  const OneToken one{device_problem(problem),
                     device_tensor(call.o),
                     device_states(call.state, call.options.state_v_first),
                     {device_tensor(call.state_indices), call.state.shape[0]}};
  if (is_one_token_in_vec4s(one)) {
    launch_one_token(one, context);
    return;
  }
  RecurrentArgs args;
  args.problem = one.problem;
  args.o = one.o;
  args.initial_state = args.final_state = one.states;
  args.in_place = true;
  args.slots = one.slots;
  launch_tokens(args, context);
}

}  // namespace fastweight::cuda::recurrent
