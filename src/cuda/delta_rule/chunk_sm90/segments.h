// The segments of segment_plan.h, as the host gives them to the kernels.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/common/launch.h"
#include "cuda/delta_rule/chunk_16bit/chunk.cuh"
#include "cuda/delta_rule/chunk_sm90/segment_plan.h"

namespace fastweight::cuda::chunk_sm90 {

// h and M are 128 x 128: only K padded to 128, with V up to 128, is cut.
inline constexpr int kMapWidth = 128, kMapFloats = kMapWidth * kMapWidth;

template <class Problem>
int segment_chunks_of(const Problem& problem, const Context& context) {
  if (padded_k(problem.sizes.head_dim_k) != kMapWidth || problem.sizes.head_dim_v > kMapWidth) return 0;
  const int64_t some = problem.sizes.num_value_heads, all = problem.args.options.total_value_heads;
  return segment_chunks(some > all ? some : all, device_attribute(cudaDevAttrMultiProcessorCount, context.device.index),
                        context.segment_chunks);
}

// For the verbose line.
inline std::string segments_text(int64_t chunks) {
  return chunks > 0 ? ", segments of " + std::to_string(chunks) + " chunks" : "";
}

// Matrices of a segment, [128 value columns, 128 channels] each.
//
//     kAlone     h, in whose place comes the state after the segment; on the way back e
//     kOnState   M^T; on the way back M
//     kBehind    on the way back: the gradient of the state after the segment
enum MapPart { kAlone, kOnState, kBehind };
inline constexpr int kForwardMapParts = kBehind, kBackMapParts = kBehind + 1;

// What a scan knows of them.
struct Segments {
  int64_t chunks = 0;            // of a segment; 0: no sequence is cut
  int64_t first = 0, count = 0;  // the numbers of those that a window may meet in a row
  // [N + 1] with offsets: how many segments there are before the sequences.
  const int64_t* before = nullptr;
  float* maps = nullptr;  // [B, count, HV, parts, 128, 128], by MapPart
  int parts = kForwardMapParts;
  chunk_16bit::WindowStates carried;  // [B, HV, 2]: maps of a segment that is cut by windows, as registers
  // [B, HV, 128, 128]: the state after the last segment that a window ends; on the way back the gradient of the state after
  // the last segment that begins before the window.
  chunk_16bit::WindowStates composed;
};

struct ScanArgs : chunk_16bit::ChunkArgs {
  Segments segments;
};

struct ForwardArgs : ScanArgs {
  // A number for every pair of a chunk of the window and a value head, or more; and the flags of the pairs, where the scan takes
  // them as they come (beside.h).
  uint32_t* flags = nullptr;
  const uint32_t* published = nullptr;
};

// The states after all segments, from their maps; or the gradients of these states, and that of the initial one.
void launch_compose(const ForwardArgs& args, const Context& context);
void launch_compose_back(const ScanArgs& args, const DeviceStates& d_final_state, const DeviceStates& d_initial_state,
                         const Context& context);

}  // namespace fastweight::cuda::chunk_sm90
