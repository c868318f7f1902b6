#include "cuda/delta_rule/chunk_sm90/scan_per_channel.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

template <ChannelMakes kMakes>
constexpr size_t kWideBytes = std::max(sizeof(typename ChannelBlock<128, 1, kMakes>::Shared),
                                       sizeof(typename ChannelBlock<128, 2, kMakes>::Shared));

// The dimensions of a map of the states before chunks, the fastest first.
struct StatesShape {
  int64_t sizes[5], strides[5];
};

StatesShape states_shape(const ForwardArgs& args) {
  const DeviceStates& S = args.chunk_states;
  const Sequences& sequences = args.problem.sequences;
  return {{args.state_width, args.problem.head_dim_v, args.problem.num_value_heads, args.state_chunks,
           sequences.offsets != nullptr ? 1 : sequences.count},
          {1, S.v_stride, S.outer_strides[2], S.outer_strides[1], S.outer_strides[0]}};
}

}  // namespace

size_t channel_scan_bytes(int padded_k) {
  if (padded_k == 64) return sizeof(ChannelBlock<64, 1, ChannelMakes::kOutputs>::Shared);
  return std::max(kWideBytes<ChannelMakes::kOutputs>, kWideBytes<ChannelMakes::kOutputsAndStates>);
}

bool has_states_map(const ForwardArgs& args) {
  if (args.state_width == 0 || args.num_chunks == 0) return false;
  const StatesShape shape = states_shape(args);
  for (int i = 0; i < 5; ++i) {
    if (shape.sizes[i] == 0 || (shape.sizes[i] > 1 && shape.strides[i] <= 0)) return false;
  }
  return true;
}

TensorMap chunk_states_map(const ForwardArgs& args) {
  const StatesShape shape = states_shape(args);
  TensorMapSpec spec{
      .data = args.chunk_states.data, .dtype = args.chunk_states.dtype, .rank = 5, .box = {64, kGroupColumns, 1, 1, 1}};
  for (int i = 0; i < 5; ++i) {
    spec.sizes[i] = shape.sizes[i];
    // The stride along a dimension of one element may be anything; the map gets one that it can have.
    spec.strides[i] = i == 0 || shape.sizes[i] > 1 ? shape.strides[i] : spec.strides[i - 1] * 8;
  }
  return tensor_map(spec);
}

template void launch_channel_scan<DType::kBF16>(const ForwardArgs& args, const ChannelScanMaps& maps, int columns,
                                                const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
