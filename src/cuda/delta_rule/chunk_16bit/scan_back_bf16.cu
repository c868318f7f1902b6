#include "cuda/delta_rule/chunk_16bit/scan_back.cuh"

namespace fastweight::cuda::chunk_16bit {

template void launch_scan_back<DType::kBF16>(const GradientArgs& args, const ScanConfig& config,
                                             const Context& context);

}  // namespace fastweight::cuda::chunk_16bit
