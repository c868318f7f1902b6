#include "cuda/delta_rule/chunk_sm90/gradients_per_channel.cuh"

namespace fastweight::cuda::chunk_sm90 {

size_t channel_gradients_bytes(int padded_k) {
  return padded_k == 64 ? sizeof(ChannelGradientBlock<64>::Shared) : sizeof(ChannelGradientBlock<128>::Shared);
}

template void launch_channel_gradients<DType::kBF16>(const GradientArgs& args, const ChannelGradientMaps& maps,
                                                     int64_t blocks, const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
