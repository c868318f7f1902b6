// How the teams of a block of factors beside a scan (beside.h) publish what they have made: by a warp of its own. Who publishes
// waits until all that the block has written can be seen by others, which takes long where memory is busy, and the team would
// wait with it.
#pragma once

#include "cuda/delta_rule/chunk_sm90/tiles.cuh"
#include "cuda/sm90/barriers.cuh"

namespace fastweight::cuda::chunk_sm90 {

// A warp comes with a warpgroup beside the kGroups of the teams, which gives registers back: all have as many at first.
template <int kGroups>
inline constexpr int kThreadsWithPublisher = (kGroups + 1) * kGroupThreads;
inline constexpr int kPublisherRegisters = 24;
template <int kGroups>
inline constexpr int kEvenRegisters = 65536 / kThreadsWithPublisher<kGroups> / 8 * 8;
template <int kGroups>
inline constexpr int kRegistersBesidePublisher =
    ((kGroups + 1) * kEvenRegisters<kGroups> - kPublisherRegisters) / kGroups / 8 * 8;

// In shared memory. Of each team, one pair after the other:
//
//     team         told.wait       the flag of the pair, null after the last one       made.arrive()
//     publisher    made.wait       one fence, also for teams behind this one that have made theirs        told.arrive()
//
// The publisher takes the teams in turn: one that gets ahead of another one by two pairs waits for it.
template <int kTeams>
struct Publisher {
  TransactionBarrier made[kTeams], told[kTeams];
  uint32_t* flags[kTeams];
  uint32_t turns[kTeams];  // of the teams

  // By one thread, before a barrier of the block.
  __device__ __forceinline__ void init() {
    for (int team = 0; team < kTeams; ++team) {
      made[team].init(1);
      told[team].init(1);
      turns[team] = 0;
    }
    fence_barrier_init();
  }

  // By one thread of a team, after a barrier that all who made the pair have passed.
  __device__ __forceinline__ void hand_over(int team, uint32_t* flag) {
    told[team].wait(turns[team]++ % 2 ^ 1);
    flags[team] = flag;
    made[team].arrive();
  }

  // By one thread, until all teams have ended.
  __device__ __forceinline__ void run() {
    uint32_t working = (1u << kTeams) - 1;
    for (uint32_t parity = 0; working != 0; parity ^= 1) {
      for (int team = 0; team < kTeams;) {
        uint32_t ready = 0;
#pragma unroll 1
        for (; team < kTeams; ++team) {
          if ((working >> team & 1) == 0) continue;
          if (ready == 0) {
            made[team].wait(parity);
          } else if (!made[team].ask(parity)) {
            break;
          }
          ready |= 1u << team;
        }
        fence_all_blocks();
#pragma unroll 1
        for (int i = 0; i < kTeams; ++i) {
          if ((ready >> i & 1) == 0) continue;
          uint32_t* flag = flags[i];
          told[i].arrive();
          flag == nullptr ? void(working &= ~(1u << i)) : set_published(flag);
        }
      }
    }
  }
};

}  // namespace fastweight::cuda::chunk_sm90
