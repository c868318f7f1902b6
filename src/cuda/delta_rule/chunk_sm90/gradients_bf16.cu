#include "cuda/delta_rule/chunk_sm90/gradients.cuh"

namespace fastweight::cuda::chunk_sm90 {

size_t gradients_bytes(int padded_k, int columns) {
  if (padded_k == 128) return sizeof(GradientBlock<128, 2>::Shared);
  return columns == 64 ? sizeof(GradientBlock<64, 1>::Shared) : sizeof(GradientBlock<64, 2>::Shared);
}

template void launch_gradients<DType::kBF16>(const GradientArgs& args, const GradientMaps& maps, int64_t blocks,
                                             const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
