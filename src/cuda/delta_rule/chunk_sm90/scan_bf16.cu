#include "cuda/delta_rule/chunk_sm90/scan.cuh"

namespace fastweight::cuda::chunk_sm90 {

size_t scan_bytes() { return sizeof(Block<2>::Shared); }

template void launch_scan<DType::kBF16>(const ChunkArgs& args, const ScanMaps& maps, int columns, const uint32_t* ready,
                                        const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
