// Kernels around single products of a warpgroup, for wgmma_test.cc.
#pragma once

#include "cuda/sm90/swizzle.h"
#include "fastweight/tensor.h"

namespace fastweight::cuda {

enum class OperandPlace { kRegisters, kAlongRows, kAlongColumns };

struct ProductCase {
  DType dtype;
  int n;
  Swizzle swizzle;
  OperandPlace a;
  bool b_along_columns;
};

inline constexpr int kInner = 64;

// c [64 x n] = a [64 x 64] b [64 x n] through the operands that the case names; c is fp32, all are dense in device
// memory. False for a case that is not compiled.
bool multiply(const ProductCase& which, const void* a, const void* b, float* c);

// c = (a b) d for [64 x 64] matrices of bf16: the rounded sums of the first product are fragments of the second.
void multiply_twice(const void* a, const void* b, const void* d, float* c);

// c [64 x 128] = a b, its halves as two groups, of which the first is used while the second is on its way: `first` is
// what it held then.
void multiply_halves(const void* a, const void* b, float* c, float* first);

}  // namespace fastweight::cuda
