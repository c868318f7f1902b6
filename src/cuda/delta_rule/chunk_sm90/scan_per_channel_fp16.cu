#include "cuda/delta_rule/chunk_sm90/scan_per_channel.cuh"

namespace fastweight::cuda::chunk_sm90 {

template void launch_channel_scan<DType::kF16>(const ForwardArgs& args, const ChannelScanMaps& maps, int columns,
                                               const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
