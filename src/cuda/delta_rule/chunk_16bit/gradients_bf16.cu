#include "cuda/delta_rule/chunk_16bit/gradients.cuh"

namespace fastweight::cuda::chunk_16bit {

template void launch_gradients_of<DType::kBF16>(const GradientArgs& args, int padded_k, int64_t blocks,
                                                const Context& context);

size_t gradients_bytes(int padded_k) {
  size_t bytes = 0;
  with_padded_k(padded_k, [&]<int kK>() { bytes = sizeof(Shared<kK>); });
  return bytes;
}

int gradients_columns(int padded_k) {
  int columns = 0;
  with_padded_k(padded_k, [&]<int kK>() { columns = Shape<kK>::kColumns; });
  return columns;
}

}  // namespace fastweight::cuda::chunk_16bit
