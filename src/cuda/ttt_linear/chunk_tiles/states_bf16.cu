#include "cuda/ttt_linear/chunk_tiles/keep_states.cuh"

namespace fastweight::cuda::ttt {

template void launch_tile_states<DType::kBF16>(const TilesConfig& config, const ChunkArgs& args, const KeptTiles& kept,
                                               const Context& context);

}  // namespace fastweight::cuda::ttt
