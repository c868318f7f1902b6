#include "cuda/delta_rule/chunk_sm90/scan_per_channel.cuh"

namespace fastweight::cuda::chunk_sm90 {

size_t channel_scan_bytes() {
  return std::max(sizeof(ChannelBlock<1, false>::Shared), sizeof(ChannelBlock<2, false>::Shared));
}

template void launch_channel_scan<DType::kBF16>(const ForwardArgs& args, const ChannelScanMaps& maps, int columns,
                                                const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
