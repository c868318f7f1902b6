#include "cuda/delta_rule/chunk_sm90/scan_per_channel.cuh"

namespace fastweight::cuda::chunk_sm90 {

size_t channel_scan_bytes(int padded_k) {
  if (padded_k == 64) return sizeof(ChannelBlock<64, 1, false>::Shared);
  return std::max(sizeof(ChannelBlock<128, 1, false>::Shared), sizeof(ChannelBlock<128, 2, false>::Shared));
}

template void launch_channel_scan<DType::kBF16>(const ForwardArgs& args, const ChannelScanMaps& maps, int columns,
                                                const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
