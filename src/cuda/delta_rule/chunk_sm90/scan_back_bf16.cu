#include "cuda/delta_rule/chunk_sm90/scan_back.cuh"

namespace fastweight::cuda::chunk_sm90 {

size_t scan_back_bytes(int padded_k) {
  return padded_k == 64    ? sizeof(BackBlock<64, 1>::Shared)
         : padded_k == 128 ? sizeof(BackBlock<128, 2>::Shared)
                           : sizeof(BackBlock<256, 1>::Shared);
}

template void launch_scan_back<DType::kBF16>(const GradientArgs& args, const ScanBackMaps& maps, int columns,
                                             const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
