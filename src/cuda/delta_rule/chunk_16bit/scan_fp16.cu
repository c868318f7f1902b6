#include "cuda/delta_rule/chunk_16bit/scan.cuh"

namespace fastweight::cuda {

template void launch_scan<DType::kF16>(const ChunkArgs& args, int padded_k, bool per_channel, const Context& context);

}  // namespace fastweight::cuda
