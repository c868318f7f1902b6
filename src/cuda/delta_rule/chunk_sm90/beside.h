// A scan of fewer blocks than there are multiprocessors leaves the others idle, while its factors, which come first, would
// have filled them all. So the factors are made in two parts: those of the first chunks, of all rows and heads, by all
// multiprocessors, the rest by those that the scan does not need, beside the scan. With one decay per head one launch makes
// both, by blocks that go from pair to pair (factors.cu). With decays per channel (factors_per_channel.cu) such blocks make the
// second part, and a launch before them the first: several blocks of one pair each on a multiprocessor, which is faster.
//
// The factors' blocks beside the scan let it start when they all run, and what was made before is there
// (let_next_kernel_start): no block of the scan can keep one of theirs from running. They wait for nothing but earlier kernels,
// and leave the scan a multiprocessor for each of its blocks, which run at once. A warp of each publishes
// every pair of a chunk and a head by a flag (publisher.cuh); what brings operands to the scan waits for the flag, not for the end
// of the kernel. Copies that left by TMA have been written before that, as far as the thread that hands the pair over sees it. No
// bit depends on how the work is divided.
//
// With R pairs at a place in the row, a cost of f for a pair on a multiprocessor and of t for a chunk in the scan, in
// cycles, m multiprocessors beside it make the factors of N places while it goes over them, if
//
//     R f / m <= t        otherwise all have to make x = 1 - t m / (R f) of them before
//
// and the whole takes about x N R f / multiprocessors + N t.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fastweight::cuda::chunk_sm90 {

// How the factors of `pairs` pairs are divided: [0, before) by all multiprocessors, the others by `beside` blocks. Such a block
// has a multiprocessor for itself.
struct BesidePlan {
  int before = 0, beside = 0;
  int64_t cycles = 0;  // of everything, about
};

struct BesideProblem {
  int64_t pairs = 0;      // in the window, of a chunk and a key head, or with decays per channel a value head
  int64_t at_place = 1;   // R
  int64_t pair_cycles;    // f, before the scan
  int64_t beside_cycles;  // f beside it, where the scan takes most of what memory gives
  int64_t chunk_cycles;   // t
  int64_t scan_blocks;    // each of which has a multiprocessor for itself
  int at_once = 1;        // pairs that a multiprocessor works on
};

inline BesidePlan plan_beside(const BesideProblem& problem, int multiprocessors) {
  if (problem.pairs == 0) return {};
  const int64_t places = problem.pairs / problem.at_place, f = problem.pair_cycles, t = problem.chunk_cycles;
  const int64_t waves = (problem.scan_blocks + multiprocessors - 1) / multiprocessors;
  const auto all = static_cast<int>(problem.pairs);
  const BesidePlan apart{all, 0, problem.pairs * f / multiprocessors + places * t * waves};
  const int64_t idle = multiprocessors - problem.scan_blocks, least = int64_t{multiprocessors} * problem.at_once;
  if (16 * idle < multiprocessors || problem.pairs <= least) return apart;  // nothing to gain
  const int64_t needed = problem.pairs - std::min(places * t * idle / problem.beside_cycles, problem.pairs);
  // A last round that would be less than half full takes longer than it saves the scan.
  const int64_t before = std::min((needed + least / 2) / least * least, problem.pairs);
  const BesidePlan plan{
      static_cast<int>(before), static_cast<int>(idle),
      before * f / multiprocessors + std::max(places * t, (problem.pairs - before) * problem.beside_cycles / idle)};
  return before < problem.pairs && plan.cycles < apart.cycles ? plan : apart;
}

}  // namespace fastweight::cuda::chunk_sm90
