#include "cuda/delta_rule/chunk_16bit/gradients_per_channel.cuh"

namespace fastweight::cuda::chunk_16bit {

template void launch_gradients_per_channel<DType::kF16>(const GradientArgs& args, int padded_k, int64_t blocks,
                                                        const Context& context);

}  // namespace fastweight::cuda::chunk_16bit
