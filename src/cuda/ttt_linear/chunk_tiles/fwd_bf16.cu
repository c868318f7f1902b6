#include "cuda/ttt_linear/chunk_tiles/kernel.cuh"

namespace fastweight::cuda::ttt {

template void launch_tiles<DType::kBF16>(const TilesConfig& config, const ChunkArgs& args, const Context& context);

}  // namespace fastweight::cuda::ttt
