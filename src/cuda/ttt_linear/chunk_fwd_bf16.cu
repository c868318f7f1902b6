#include "cuda/ttt_linear/chunk_fwd.cuh"

namespace fastweight::cuda::ttt {

template void launch_chunk<DType::kBF16>(const ChunkArgs& args, const Context& context);

}  // namespace fastweight::cuda::ttt
