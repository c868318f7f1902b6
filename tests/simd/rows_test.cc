// Rows to and from fp32 on every instruction set of this processor, against the conversions of single elements.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cpu/scalar_types.h"
#include "cpu/simd/targets.h"
#include "fastweight/tensor.h"
#include "tests/testing.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/simd/rows_test.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/simd/rows-inl.h"
#include "hwy/tests/hwy_gtest.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace {

int64_t lanes() { return kLanes; }

}  // namespace
}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {
namespace {

class Rows : public hwy::TestWithParamTarget {};
HWY_TARGET_INSTANTIATE_TEST_SUITE_P(Rows);

HWY_EXPORT(lanes);
HWY_EXPORT(load_row);
HWY_EXPORT(store_row);
HWY_EXPORT(transpose);

using Floats = std::vector<float>;
using Bytes = std::vector<std::byte>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr std::byte kSentinel{0x5a};

int64_t padded(int64_t n) {
  const int64_t width = HWY_DYNAMIC_DISPATCH(lanes)();
  return (n + width - 1) / width * width;
}

// Bytes of a row of n elements and nothing more.
size_t row_bytes(DType dtype, int64_t stride, int64_t n) {
  return static_cast<size_t>(((n - 1) * stride + 1) * element_size(dtype));
}

// Equal, signs of zeros and of NaNs included.
bool same_value(double a, double b) {
  return std::signbit(a) == std::signbit(b) && (a == b || (std::isnan(a) && std::isnan(b)));
}

// Zeros, subnormals, limits, infinities, NaNs, and ties of both 16-bit types.
const Floats& special_values() {
  static const Floats values = [] {
    Floats x = {0.0f, 1.0f, 1.5f, kNan, kInfinity, std::bit_cast<float>(0x7f800001)};
    x.insert(x.end(), {0x1p-149f, 0x1.8p-140f, 0x1p-126f, 0x1.fffffep127f, 0x1.fep127f, 0x1.ffp127f});
    x.insert(x.end(), {0x1.01p0f, 0x1.03p0f, 0x1.010002p0f, 0x1.00fffep0f, 0x1.01p-130f, 0x1.04p-130f});
    x.insert(x.end(), {0x1.002p0f, 0x1.006p0f, 0x1.002002p0f, 0x1.001ffep0f, 65504.0f, 65519.0f, 65520.0f, 65536.0f});
    x.insert(x.end(), {0x1p-14f, 0x1p-24f, 0x1p-25f, 0x1.000002p-25f, 0x1.8p-24f, 0x1.ffep-15f, 0x1.fffp-15f, 1e-10f});
    for (size_t i = 0, positive = x.size(); i < positive; ++i) x.push_back(-x[i]);
    return x;
  }();
  return values;
}

// Element `index` of an endless row of special values.
float special_value(int64_t index) { return special_values()[static_cast<size_t>(index) % special_values().size()]; }

// Loads n elements of src. What is wrong first in dst[0, n) and the zeros up to `width`; empty: nothing.
std::string wrong_in_load(const Bytes& src, DType dtype, int64_t stride, int64_t n, int64_t width) {
  Floats dst(static_cast<size_t>(width), kNan);
  HWY_DYNAMIC_DISPATCH(load_row)(src.data(), dtype, stride, n, dst.data(), width);
  for (int64_t i = 0; i < width; ++i) {
    const double expected = i < n ? load_as_double(src.data(), dtype, i * stride) : 0;
    const float actual = dst[static_cast<size_t>(i)];
    if (!same_value(actual, expected)) {
      std::ostringstream out;
      out << test::name_of(dtype) << " n " << n << " stride " << stride << ": element " << i << " is " << actual
          << " for " << expected;
      return out.str();
    }
  }
  return {};
}

TEST_P(Rows, Loads) {
  for (DType dtype : kTypes) {
    for (int64_t stride : {1, 2, 0}) {
      for (int64_t n = 1; n <= 40; ++n) {
        // A block of the exact size: the address sanitizer sees what is read outside.
        Bytes src(row_bytes(dtype, stride, n), kSentinel);
        for (int64_t i = 0; i < n; ++i) store_double(src.data(), dtype, i * stride, special_value(n + i));
        ASSERT_EQ(wrong_in_load(src, dtype, stride, n, padded(n)), "");
        ASSERT_EQ(wrong_in_load(src, dtype, stride, n, padded(n) + padded(1)), "");
      }
    }
  }
}

TEST_P(Rows, LoadsOfEveryValue) {
  constexpr int64_t kCount = 1 << 16;
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (int64_t stride : {1, 2}) {
      Bytes src(row_bytes(dtype, stride, kCount), kSentinel);
      for (int64_t i = 0; i < kCount; ++i) {
        const uint16_t bits = static_cast<uint16_t>(i);
        std::memcpy(src.data() + i * stride * 2, &bits, sizeof(bits));
      }
      ASSERT_EQ(wrong_in_load(src, dtype, stride, kCount, kCount), "");
    }
  }
}

// Stores n elements of src. What is wrong first in them and in the bytes around them; empty: nothing.
std::string wrong_in_store(const Floats& src, DType dtype, int64_t stride, int64_t n) {
  const int64_t size = element_size(dtype), guard = 64 * size;
  Bytes buffer(row_bytes(dtype, stride, n) + static_cast<size_t>(2 * guard), kSentinel);
  HWY_DYNAMIC_DISPATCH(store_row)(src.data(), buffer.data() + guard, dtype, stride, n);

  std::ostringstream out;
  out << test::name_of(dtype) << " n " << n << " stride " << stride << ": ";
  for (int64_t i = 0; i < n; ++i) {
    const float value = src[static_cast<size_t>(i)];
    float converted;
    store_double(&converted, dtype, 0, value);
    const double expected = load_as_double(&converted, dtype, 0);
    std::byte* const element = buffer.data() + guard + i * stride * size;
    const double actual = load_as_double(element, dtype, 0);
    if (!same_value(actual, expected)) {
      out << "element " << i << ", " << std::hexfloat << value << ", became " << actual << " for " << expected;
      return out.str();
    }
    std::fill_n(element, size, kSentinel);
  }
  if (buffer == Bytes(buffer.size(), kSentinel)) return {};
  out << "written outside the row";
  return out.str();
}

TEST_P(Rows, Stores) {
  for (DType dtype : kTypes) {
    for (int64_t stride : {1, 2}) {
      for (int64_t n = 1; n <= 40; ++n) {
        Floats src(static_cast<size_t>(padded(n)));
        for (size_t i = 0; i < src.size(); ++i) src[i] = special_value(n + static_cast<int64_t>(i));
        ASSERT_EQ(wrong_in_store(src, dtype, stride, n), "");
      }
    }
  }
}

// Around every finite value of the type: itself, the tie between it and the next, and the neighbours of both.
TEST_P(Rows, StoresRoundToNearestEven) {
  for (const auto& [dtype, format] : {std::pair{DType::kBF16, kBF16Format}, std::pair{DType::kF16, kF16Format}}) {
    Floats src;
    for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
      const double value = decode_bits16(static_cast<uint16_t>(bits), format);
      if (!std::isfinite(value)) continue;
      const int smallest = 2 - (1 << (format.exponent_bits - 1));
      const int exponent = value == 0 ? smallest : std::max(std::ilogb(value), smallest);
      const double tie = value + std::copysign(std::ldexp(0.5, exponent - format.mantissa_bits), value);
      for (double center : {value, tie}) {
        const float x = static_cast<float>(center);
        src.insert(src.end(), {x, std::nextafter(x, kInfinity), std::nextafter(x, -kInfinity)});
      }
    }
    const int64_t n = static_cast<int64_t>(src.size());
    src.resize(static_cast<size_t>(padded(n)));
    ASSERT_EQ(wrong_in_store(src, dtype, 1, n), "");
  }
}

TEST_P(Rows, Transposes) {
  for (int64_t rows = 4; rows <= 40; rows += 4) {
    for (int64_t columns = 4; columns <= 40; columns += 4) {
      const int64_t src_stride = columns + 3, dst_stride = rows + 5;
      Floats src(static_cast<size_t>(rows * src_stride));
      for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<float>(i);
      Floats expected(static_cast<size_t>(columns * dst_stride), -1.0f);
      Floats actual = expected;
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
          expected[static_cast<size_t>(j * dst_stride + i)] = src[static_cast<size_t>(i * src_stride + j)];
        }
      }
      HWY_DYNAMIC_DISPATCH(transpose)(src.data(), src_stride, rows, columns, actual.data(), dst_stride);
      EXPECT_TRUE(actual == expected) << rows << " by " << columns;
    }
  }
}

}  // namespace
}  // namespace fastweight::cpu
#endif
