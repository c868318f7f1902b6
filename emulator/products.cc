#include "products.h"

namespace emulator {

void add_product(double* c, const double* a, const double* b, int inner) {
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < inner; ++k) {
      for (int column = 0; column < 8; ++column) c[row * 8 + column] += a[row * inner + k] * b[k * 8 + column];
    }
  }
}

}  // namespace emulator
