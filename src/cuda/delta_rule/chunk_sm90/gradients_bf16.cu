#include "cuda/delta_rule/chunk_sm90/gradients.cuh"

namespace fastweight::cuda::chunk_sm90 {

size_t gradients_bytes() { return sizeof(GradientShared); }

template void launch_gradients<DType::kBF16>(const GradientArgs& args, const GradientMaps& maps, int64_t blocks,
                                             const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
