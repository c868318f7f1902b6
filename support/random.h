// Random numbers that are the same on every machine: the standard library's distributions differ between platforms.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <utility>
#include <vector>

#include "support/tensor.h"

namespace fastweight::support {

// splitmix64 and Box-Muller. Every stream of a seed is a sequence of its own.
class Random {
 public:
  Random(uint64_t seed, uint64_t stream) : state_(seed * 0x9e3779b97f4a7c15 + stream * 0xd1342543de82ef95) { next(); }

  double uniform() { return (static_cast<double>(next() >> 11) + 0.5) * 0x1p-53; }  // in (0, 1)

  double normal() {
    if (has_spare_) {
      has_spare_ = false;
      return spare_;
    }
    const double radius = std::sqrt(-2 * std::log(uniform()));
    const double angle = 2 * std::numbers::pi * uniform();
    spare_ = radius * std::sin(angle);
    has_spare_ = true;
    return radius * std::cos(angle);
  }

 private:
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  uint64_t state_;
  bool has_spare_ = false;
  double spare_ = 0;
};

template <class Draw>
Tensor drawn(DType dtype, std::vector<int64_t> shape, const Draw& draw_one) {
  Tensor tensor(dtype, std::move(shape));
  for (int64_t i = 0; i < tensor.size(); ++i) tensor.set(i, draw_one());
  return tensor;
}

inline Tensor normals(DType dtype, std::vector<int64_t> shape, uint64_t seed, uint64_t stream) {
  Random random(seed, stream);
  return drawn(dtype, std::move(shape), [&] { return random.normal(); });
}

// sigmoid(N(0,1))
inline Tensor sigmoids(DType dtype, std::vector<int64_t> shape, uint64_t seed, uint64_t stream) {
  Random random(seed, stream);
  return drawn(dtype, std::move(shape), [&] { return 1 / (1 + std::exp(-random.normal())); });
}

// Logarithms of decays: log sigmoid(N(0,1)) / divisor, and -1000 for a share of them.
inline Tensor log_decays(DType dtype, std::vector<int64_t> shape, uint64_t seed, uint64_t stream, double divisor,
                         double hard_fraction) {
  Random random(seed, stream);
  return drawn(dtype, std::move(shape), [&] {
    const double x = random.normal(), lot = random.uniform();
    return lot < hard_fraction ? -1000 : -std::log1p(std::exp(-x)) / divisor;
  });
}

// Every row of the last axis divided by its norm.
inline Tensor unit_rows(const Tensor& x) {
  const int64_t width = x.shape().back();
  Tensor result = x;
  for (int64_t row = 0; row < x.size(); row += width) {
    double squares = 0;
    for (int64_t i = row; i < row + width; ++i) squares += x[i] * x[i];
    const double norm = std::sqrt(squares);
    for (int64_t i = row; i < row + width; ++i) result.set(i, norm > 0 ? x[i] / norm : 0);
  }
  return result;
}

// An output before a call: every value is NaN.
inline Tensor poisoned(DType dtype, std::vector<int64_t> shape) {
  Tensor tensor(dtype, std::move(shape));
  tensor.fill(std::numeric_limits<double>::quiet_NaN());
  return tensor;
}

// An output for the gradient of x; absent if x is.
inline Tensor poisoned_like(const Tensor& x) { return x.present() ? poisoned(x.dtype(), x.shape()) : Tensor(); }

// The offsets as an int64 vector; absent if there are none.
inline Tensor offsets_tensor(const std::vector<int64_t>& offsets) {
  if (offsets.empty()) return {};
  return Tensor(DType::kI64, {static_cast<int64_t>(offsets.size())},
                std::vector<double>(offsets.begin(), offsets.end()));
}

// The type of results that accumulate: fp32, or double throughout.
inline DType accumulator_type(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

template <class Spec>
int64_t num_sequences(const Spec& spec) {
  return spec.cu_seqlens.empty() ? spec.B : static_cast<int64_t>(spec.cu_seqlens.size()) - 1;
}

}  // namespace fastweight::support
