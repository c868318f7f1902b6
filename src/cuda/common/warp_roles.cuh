// Warps of one block that have different work, and what they tell each other. The words are those of producers and
// consumers; here they are spoken through named barriers (instructions.cuh), of which a block has 15.
//
// Contract of every signal:
//
//   - Some warps arrive, some wait, in whole warps. `threads` counts both kinds, and each of these threads arrives or
//     waits exactly once per turn. Who arrives goes on at once; who waits continues when all have arrived or wait, and
//     then sees what they wrote to shared memory before.
//   - Those that wait do so at one place of the program: compute-sanitizer asks for it. Two kinds of warps that wait
//     for each other so need two signals, one in each direction.
//   - A warp may arrive for the next turn only when this turn is complete, else it is counted twice in one turn. It
//     knows so if it has itself waited, since it arrived, for something that every warp of the other kind says later.
//     Where it has not, but is never more than one turn ahead, an AlternatingSignal keeps the two turns apart.
#pragma once

#include "cuda/common/instructions.cuh"

namespace fastweight::cuda {

// One fact that some warps of a block tell others, once per turn. A barrier among warps of one kind is a signal for
// which all of them wait.
template <int kId>
struct WarpSignal {
  int threads;

  __device__ __forceinline__ void arrive() const { arrive_at_named_barrier<kId>(threads); }
  __device__ __forceinline__ void wait() const { named_barrier<kId>(threads); }
};

// The same where those that arrive may be a turn ahead of those that wait: barrier kId for even turns, kId + 1 for odd
// ones. Both kinds count the turns from 0.
template <int kId>
struct AlternatingSignal {
  int threads;

  __device__ __forceinline__ void arrive(int turn) const {
    turn % 2 == 0 ? arrive_at_named_barrier<kId>(threads) : arrive_at_named_barrier<kId + 1>(threads);
  }
  __device__ __forceinline__ void wait(int turn) const {
    turn % 2 == 0 ? named_barrier<kId>(threads) : named_barrier<kId + 1>(threads);
  }
};

// The buffers through which producers hand operands to consumers, one after the other. Buffer `turn` is filled, read
// and free again in this order:
//
//     producers   fill it, wait for their own copies,  producer_commit()
//     consumers   consumer_wait()  read it  consumer_release(turn)
//     producers   producer_acquire(turn)  fill the same buffer for a later turn
//
// One barrier serves all commits: before a producer commits again, it has waited for something that every consumer says
// after its consumer_wait, a release or a signal of the kernel's own. Consumers may release the next buffer before all
// producers have acquired this one, but not the one after, which is not filled before: releases alternate, on kReleased
// and kReleased + 1. What nobody fills again is not released.
template <int kFilled, int kReleased>
struct StagePipeline {
  int threads;

  __device__ __forceinline__ void producer_acquire(int turn) const { AlternatingSignal<kReleased>{threads}.wait(turn); }
  __device__ __forceinline__ void producer_commit() const { WarpSignal<kFilled>{threads}.arrive(); }
  // Where there is one buffer, producers that also read it wait for each other's copies along with the consumers: the
  // one case of two places that wait, both of which every thread of its kind reaches once per turn.
  __device__ __forceinline__ void producer_commit_and_wait() const { WarpSignal<kFilled>{threads}.wait(); }
  __device__ __forceinline__ void consumer_wait() const { WarpSignal<kFilled>{threads}.wait(); }
  __device__ __forceinline__ void consumer_release(int turn) const {
    AlternatingSignal<kReleased>{threads}.arrive(turn);
  }
};

}  // namespace fastweight::cuda
