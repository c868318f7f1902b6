#include "support/tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "src/cpu/scalar_types.h"

namespace fastweight::support {
namespace {

int64_t count_of(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
  return count;
}

}  // namespace

Tensor::Tensor(DType dtype, std::vector<int64_t> shape)
    : dtype_(dtype),
      shape_(std::move(shape)),
      bytes_(static_cast<size_t>(count_of(shape_)) * static_cast<size_t>(element_size(dtype))) {
  if (shape_.empty() || shape_.size() > static_cast<size_t>(kMaxRank)) {
    throw std::invalid_argument("Tensor: expected 1 to 5 axes, got " + std::to_string(shape_.size()));
  }
}

Tensor::Tensor(DType dtype, std::vector<int64_t> shape, std::span<const double> values)
    : Tensor(dtype, std::move(shape)) {
  if (static_cast<int64_t>(values.size()) != size()) {
    throw std::invalid_argument("Tensor: expected " + std::to_string(size()) + " values, got " +
                                std::to_string(values.size()));
  }
  for (int64_t i = 0, count = size(); i < count; ++i) set(i, values[static_cast<size_t>(i)]);
}

int64_t Tensor::size() const { return present() ? count_of(shape_) : 0; }

double Tensor::operator[](int64_t index) const { return cpu::load_as_double(bytes_.data(), dtype_, index); }

void Tensor::set(int64_t index, double value) { cpu::store_double(bytes_.data(), dtype_, index, value); }

void Tensor::fill(double value) {
  for (int64_t i = 0, count = size(); i < count; ++i) set(i, value);
}

Tensor Tensor::to(DType dtype) const {
  if (!present() || dtype == dtype_) return *this;
  Tensor result(dtype, shape_);
  for (int64_t i = 0, count = size(); i < count; ++i) result.set(i, (*this)[i]);
  return result;
}

std::vector<double> Tensor::values() const {
  std::vector<double> result(static_cast<size_t>(size()));
  for (int64_t i = 0, count = size(); i < count; ++i) result[static_cast<size_t>(i)] = (*this)[i];
  return result;
}

TensorView Tensor::view() const {
  TensorView view;
  if (!present()) return view;
  view.data = data();
  view.dtype = dtype_;
  view.rank = static_cast<int32_t>(shape_.size());
  int64_t stride = 1;
  for (size_t axis = shape_.size(); axis-- > 0;) {
    view.shape[axis] = shape_[axis];
    view.strides[axis] = stride;
    stride *= shape_[axis];
  }
  return view;
}

Difference compare(const Tensor& result, const Tensor& expected) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (result.shape() != expected.shape()) return {kInfinity, kInfinity};
  double squares = 0, expected_squares = 0, largest = 0;
  for (int64_t i = 0; i < expected.size(); ++i) {
    const double a = result[i], b = expected[i];
    if (std::isnan(a) || std::isnan(b)) return {kInfinity, kInfinity};
    const double difference = a == b ? 0 : std::fabs(a - b);
    squares += difference * difference;
    expected_squares += b * b;
    largest = std::max(largest, difference);
  }
  if (expected.size() == 0) return {};
  const double count = static_cast<double>(expected.size());
  return {std::sqrt(squares / count) / (std::sqrt(expected_squares / count) + 1e-8), largest};
}

bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.dtype() != b.dtype() || a.shape() != b.shape()) return false;
  const size_t bytes = static_cast<size_t>(a.size() * element_size(a.dtype()));
  return bytes == 0 || std::memcmp(a.data(), b.data(), bytes) == 0;
}

}  // namespace fastweight::support
