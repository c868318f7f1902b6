// The instructions of the tensor cores, compiled with optimization, which kernels are not.
#pragma once

#include <cstdint>

#include "grid.h"

namespace emulator {

enum class Element { kBF16, kFP16 };

// A lane's part of c[16][8] += a[16][inner] b[inner][8]: its fragments.
struct Product {
  float* c;           // 4
  const uint32_t* a;  // 4
  uint32_t b[2];
};

// Inner index 16, elements of 16 bits; inner index 8, tf32.
template <Element kElement>
void multiply(void* const* lanes);
void multiply_tf32(void* const* lanes);

// An operand of a product of a warpgroup, in shared memory. Rows of a and columns of b are its outer index, which lies
// together or the inner one does.
struct Descriptor {
  uint64_t bits = 0;
  bool outer_together = false;

  bool operator==(const Descriptor&) const = default;
};

// A thread's part of c[64][columns] += a[64][16] b[16][columns].
struct GroupProduct {
  Element element;
  int columns;        // at most 128
  float (*c)[4];      // columns / 8
  const uint32_t* a;  // 4; null: from shared memory
  Descriptor a_shared, b;
  bool accumulate;
  AsyncWork* work;
};

void multiply_group(void* const* lanes);

}  // namespace emulator
