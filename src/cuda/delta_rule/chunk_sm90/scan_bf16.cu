#include "cuda/delta_rule/chunk_sm90/scan.cuh"

namespace fastweight::cuda::chunk_sm90 {

size_t scan_bytes(int padded_k) {
  if (padded_k == 256) return sizeof(Block<256, 1, Makes::kOutputs>::Shared);
  if (padded_k == 64) return sizeof(Block<64, 1, Makes::kOutputsAndP>::Shared);
  return std::max({sizeof(Block<128, 1, Makes::kOutputs>::Shared), sizeof(Block<128, 2, Makes::kOutputs>::Shared),
                   sizeof(Block<128, 2, Makes::kOutputsAndP>::Shared),
                   sizeof(Block<128, 2, Makes::kOutputsAndP, true>::Shared)});
}

template void launch_scan<DType::kBF16>(const ForwardArgs& args, const ScanMaps& maps, int columns, bool order,
                                        const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
