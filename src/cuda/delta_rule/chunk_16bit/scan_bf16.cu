#include "cuda/delta_rule/chunk_16bit/scan.cuh"

namespace fastweight::cuda::chunk_16bit {

template void launch_scan<DType::kBF16>(const ChunkArgs& args, const ScanConfig& config, const Context& context);

}  // namespace fastweight::cuda::chunk_16bit
