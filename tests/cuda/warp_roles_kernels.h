// Kernels whose warps have different work, for warp_roles_test.cc. They have no race: tools/sanitize_cuda.sh asks
// racecheck first what it says of them.
#pragma once

namespace fastweight::cuda {

inline constexpr int kRoleThreads = 64;  // of each of the two kinds of a block

// The first warps of a block write a buffer and the others read it, `turns` times. Signals at which one kind only
// arrives keep the order: out[block][turn][i] = 1000 block + turn + (i + 32) % kRoleThreads.
void hand_over(int blocks, int turns, int* out);

// The threads of a block take over the number of the thread half a block further on, plus 1, `turns` times. Barriers of
// the whole block keep the order; before some turns the first warps have met among themselves, once or twice.
// out[block][i] = what thread i ends with, which begins with i.
void meet_apart(int blocks, int turns, int* out);

}  // namespace fastweight::cuda
