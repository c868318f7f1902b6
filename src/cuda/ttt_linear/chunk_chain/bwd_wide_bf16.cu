#include "cuda/ttt_linear/chunk_chain/reverse.cuh"

namespace fastweight::cuda::ttt {

template void launch_wide_reverse<DType::kBF16>(const ReverseConfig& config, const ReverseArgs& args,
                                                const Context& context);

}  // namespace fastweight::cuda::ttt
