#include "cuda/delta_rule/chunk_sm90/gradients_per_channel.cuh"

namespace fastweight::cuda::chunk_sm90 {

template void launch_channel_gradients<DType::kF16>(const GradientArgs& args, const ChannelGradientMaps& maps,
                                                    int64_t blocks, const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
