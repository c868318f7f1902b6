// The sums of the tensor cores' instructions, compiled with optimization, which kernels are not.
#pragma once

namespace emulator {

// c[16][8] += a[16][inner] b[inner][8]
void add_product(double* c, const double* a, const double* b, int inner);

}  // namespace emulator
