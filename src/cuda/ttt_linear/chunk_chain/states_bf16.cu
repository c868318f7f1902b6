#include "cuda/ttt_linear/chunk_chain/keep_states.cuh"

namespace fastweight::cuda::ttt {

template void launch_keep_states<DType::kBF16>(const ChainConfig& config, const ChunkArgs& args,
                                               const Context& context);

}  // namespace fastweight::cuda::ttt
