#include "cuda/ttt_linear/chunk_chain/kernel_solo.cuh"

namespace fastweight::cuda::ttt {

template void launch_chain<DType::kBF16>(const ChainConfig& config, const ChunkArgs& args, const Context& context);

}  // namespace fastweight::cuda::ttt
