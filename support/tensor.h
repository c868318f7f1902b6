// An owning tensor for tests, benches and the command-line tool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fastweight/tensor.h"
#include "support/pages.h"

namespace fastweight::support {

// Dense, row-major, on the heap (64-byte aligned). Values are read and written as doubles through the flat index,
// converted with round-to-nearest-even. A default-constructed tensor is absent.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::vector<int64_t> shape);  // filled with zeros
  Tensor(DType dtype, std::vector<int64_t> shape, std::span<const double> values);

  bool present() const { return !shape_.empty(); }
  DType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t size() const;

  double operator[](int64_t index) const;
  void set(int64_t index, double value);
  void fill(double value);
  Tensor to(DType dtype) const;  // a converted copy
  std::vector<double> values() const;

  void* data() const { return bytes_.data(); }
  TensorView view() const;  // absent for an absent tensor

 private:
  DType dtype_ = DType::kF32;
  std::vector<int64_t> shape_;
  Pages bytes_;
};

// err(a, b) = rms(a - b) / (rms(b) + 1e-8) and the largest |a - b|; both infinite if either tensor holds a NaN or the
// shapes differ. Equal infinities differ by 0.
struct Difference {
  double relative_rms = 0;
  double max_abs = 0;
};
Difference compare(const Tensor& result, const Tensor& expected);

// Same type, shape and bits.
bool same_bits(const Tensor& a, const Tensor& b);

}  // namespace fastweight::support
