#include <algorithm>

#include "cuda/delta_rule/chunk_sm90/scan_per_channel.cuh"

namespace fastweight::cuda::chunk_sm90 {
namespace {

template <ChannelMakes kMakes>
constexpr size_t kWideBytes = std::max(sizeof(typename ChannelBlock<128, 1, kMakes>::Shared),
                                       sizeof(typename ChannelBlock<128, 2, kMakes>::Shared));

}  // namespace

size_t channel_scan_bytes(int padded_k) {
  if (padded_k == 64) return sizeof(ChannelBlock<64, 1, ChannelMakes::kOutputs>::Shared);
  if (padded_k == 256) return sizeof(ChannelBlock<256, 1, ChannelMakes::kOutputs>::Shared);
  return std::max(kWideBytes<ChannelMakes::kOutputs>, kWideBytes<ChannelMakes::kOutputsAndStates>);
}

template void launch_channel_scan<DType::kBF16>(const ForwardArgs& args, const ChannelScanMaps& maps, int columns,
                                                const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
