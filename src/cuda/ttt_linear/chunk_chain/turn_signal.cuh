// A fact that is told of one mini-batch after the other.
#pragma once

#include "cuda/common/warp_roles.cuh"

namespace fastweight::cuda::ttt {
namespace {

constexpr int kTurns = 4;

// By the number of the mini-batch: four barriers from kFirst on, which go round.
template <int kFirst>
struct TurnSignal {
  int threads;

  __device__ __forceinline__ void arrive(int turn) const {
    const int i = turn % kTurns;
    i < 2 ? AlternatingSignal<kFirst>{threads}.arrive(i) : AlternatingSignal<kFirst + 2>{threads}.arrive(i);
  }
  __device__ __forceinline__ void wait(int turn) const {
    const int i = turn % kTurns;
    i < 2 ? AlternatingSignal<kFirst>{threads}.wait(i) : AlternatingSignal<kFirst + 2>{threads}.wait(i);
  }
};

}  // namespace
}  // namespace fastweight::cuda::ttt
