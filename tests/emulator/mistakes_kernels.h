// Kernels with one mistake each, for mistakes_test.cc.
#pragma once

#include "cuda/sm90/tensor_map.h"

namespace fastweight::cuda {

enum class Mistake {
  kNone,
  // of products
  kSumsReadEarly,
  kSumsWrittenEarly,
  kFragmentWrittenEarly,
  kOperandWrittenEarly,
  kNoFence,
  kThreeWarps,
  kTwoDescriptors,
  kOperandOutside,
  // of copies
  kLoadReadEarly,
  kTooFewBytes,
  kTooManyArrivals,
  kBarrierNotInitialized,
  kLoadNotWaitedFor,
  kSourceWrittenEarly,
  kStoreNotWaitedFor,
  kBoxNotAligned,
  // of kernels that overlap
  kReadBeforeWaiting,
  kNoWait,
  // of registers
  kTooManyRegisters,
};

// c [64 x 64] = a b for dense bf16 matrices of 64 x 64.
void multiply_with(Mistake mistake, const void* a, const void* b, float* c);

// A box of 32 rows of 64 elements from one map to the other.
void copy_with(Mistake mistake, const TensorMap& from, const TensorMap& to);

// c[i] = b[i] = i for 64 numbers of either, by a kernel for each.
void count_with(Mistake mistake, float* b, float* c);

// Warpgroups that share the registers of a block.
void share_registers_with(Mistake mistake);

}  // namespace fastweight::cuda
