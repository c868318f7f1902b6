#include "cuda/delta_rule/chunk_sm90/scan_back_per_channel.cuh"

namespace fastweight::cuda::chunk_sm90 {

size_t channel_scan_back_bytes(int padded_k) {
  return padded_k == 64    ? sizeof(ChannelBackBlock<64, 1>::Shared)
         : padded_k == 128 ? sizeof(ChannelBackBlock<128, 2>::Shared)
                           : sizeof(ChannelBackBlock<256, 1>::Shared);
}

template void launch_channel_scan_back<DType::kBF16>(const GradientArgs& args, const ChannelScanBackMaps& maps,
                                                     int columns, const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
