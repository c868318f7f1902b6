#include "cuda/delta_rule/chunk_16bit/gradients.cuh"

namespace fastweight::cuda::chunk_16bit {

template void launch_gradients_of<DType::kF16>(const GradientArgs& args, int padded_k, int64_t blocks,
                                               const Context& context);

}  // namespace fastweight::cuda::chunk_16bit
