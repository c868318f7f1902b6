#include "cuda/delta_rule/chunk_sm90/scan.cuh"

namespace fastweight::cuda::chunk_sm90 {

template void launch_scan<DType::kF16>(const ForwardArgs& args, const ScanMaps& maps, int columns, bool order,
                                       const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
