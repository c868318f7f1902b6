// One element at a time between memory and double, for code that is not in a hurry.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "fastweight/tensor.h"

namespace fastweight::cpu {

// A 16-bit float: one sign bit, then the exponent, then the mantissa.
struct Bits16Format {
  int mantissa_bits;
  int exponent_bits;
};
inline constexpr Bits16Format kBF16Format{7, 8};
inline constexpr Bits16Format kF16Format{10, 5};

// Exact.
inline double decode_bits16(uint16_t bits, Bits16Format format) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int exponent = (bits >> format.mantissa_bits) & ((1 << format.exponent_bits) - 1);
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  double magnitude;
  if (exponent == (1 << format.exponent_bits) - 1) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, 1 - bias - format.mantissa_bits);
  } else {
    magnitude = std::ldexp(mantissa + (1 << format.mantissa_bits), exponent - bias - format.mantissa_bits);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// Rounded once, to nearest even; NaN stays NaN, overflow becomes infinity.
inline uint16_t encode_bits16(double value, Bits16Format format) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const uint32_t infinity = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
  const uint32_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return static_cast<uint16_t>(sign | infinity | (1u << (format.mantissa_bits - 1)));
  if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);

  // Counted in units of the last place. A subnormal has the smallest normal exponent; a normal number's leading one is
  // the carry into the exponent field, and so is a mantissa that rounds up to the next power of two.
  const double magnitude = std::fabs(value);
  const int exponent = magnitude == 0 ? 1 - bias : std::max(std::ilogb(magnitude), 1 - bias);
  if (exponent > bias) return static_cast<uint16_t>(sign | infinity);
  const uint32_t units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent)));
  const uint32_t field = static_cast<uint32_t>(exponent + bias - 1) << format.mantissa_bits;
  return static_cast<uint16_t>(sign | std::min(field + units, infinity));
}

inline double load_as_double(const void* data, DType dtype, int64_t offset) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<double>(static_cast<const float*>(data)[offset]);
    case DType::kF64:
      return static_cast<const double*>(data)[offset];
    case DType::kBF16:
      return decode_bits16(static_cast<const uint16_t*>(data)[offset], kBF16Format);
    case DType::kF16:
      return decode_bits16(static_cast<const uint16_t*>(data)[offset], kF16Format);
    case DType::kI32:
      return static_cast<double>(static_cast<const int32_t*>(data)[offset]);
    case DType::kI64:
      return static_cast<double>(static_cast<const int64_t*>(data)[offset]);
  }
  return 0;
}

inline void store_double(void* data, DType dtype, int64_t offset, double value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[offset] = static_cast<float>(value);
      break;
    case DType::kF64:
      static_cast<double*>(data)[offset] = value;
      break;
    case DType::kBF16:
      static_cast<uint16_t*>(data)[offset] = encode_bits16(value, kBF16Format);
      break;
    case DType::kF16:
      static_cast<uint16_t*>(data)[offset] = encode_bits16(value, kF16Format);
      break;
    case DType::kI32:
      static_cast<int32_t*>(data)[offset] = static_cast<int32_t>(value);
      break;
    case DType::kI64:
      static_cast<int64_t*>(data)[offset] = static_cast<int64_t>(value);
      break;
  }
}

inline int64_t load_integer(const void* data, DType dtype, int64_t offset) {
  return dtype == DType::kI32 ? static_cast<const int32_t*>(data)[offset] : static_cast<const int64_t*>(data)[offset];
}

}  // namespace fastweight::cpu
