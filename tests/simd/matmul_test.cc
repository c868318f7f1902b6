// The register tiles on every instruction set of this processor, against loops in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/simd/targets.h"
#include "support/random.h"
#include "tests/testing.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/simd/matmul_test.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/simd/matmul-inl.h"
#include "hwy/tests/hwy_gtest.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace {

using Floats = std::vector<float>;

Floats normals(int64_t count, uint64_t stream) {
  support::Random random(1, stream);
  Floats x(static_cast<size_t>(count));
  for (float& value : x) value = static_cast<float>(random.normal());
  return x;
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct Shape {
  int64_t rows, columns, depth, segments;
  int64_t decay_stride = 1;
};

// Where element (m, r) of a segment of the left factor lies.
template <class Left>
int64_t left_index(const Product& p, int64_t m, int64_t r) {
  if constexpr (std::is_same_v<Left, Columns>) {
    return m + r * p.a_stride;
  } else {
    return m * kRowStride<Left> + r;
  }
}

// Whether a segment fits between two rows.
template <class Left>
bool fits(int64_t depth) {
  return std::is_same_v<Left, Columns> || depth <= kRowStride<Left>;
}

// A product with gaps between the rows of every matrix and between segments. The gaps hold NaN, and so does what a
// product that starts from zero may not read.
template <class Left, Start kStart>
class Matrices {
 public:
  explicit Matrices(const Shape& shape) {
    const auto& [rows, columns, depth, segments, decay_stride] = shape;
    p_ = {.rows = rows, .columns = columns, .depth = depth, .segments = segments};
    p_.a_stride = rows + 3;
    p_.a_segment = (std::is_same_v<Left, Columns> ? depth * p_.a_stride : rows * kRowStride<Left>)+5;
    p_.b_stride = columns + 3;
    p_.c_stride = columns + 7;
    p_.decay_stride = decay_stride;

    const Floats drawn = normals(segments * rows * depth, 1);
    a_.resize(static_cast<size_t>(segments * p_.a_segment), kNan);
    for (int64_t s = 0; s < segments; ++s) {
      for (int64_t m = 0; m < rows; ++m) {
        for (int64_t r = 0; r < depth; ++r) {
          a_[static_cast<size_t>(s * p_.a_segment + left_index<Left>(p_, m, r))] =
              drawn[static_cast<size_t>((s * rows + m) * depth + r)];
        }
      }
    }
    b_ = spread(segments * depth, columns, p_.b_stride, 2);
    c_in_ = spread(rows, columns, p_.c_stride, 3);
    if (kStart == Start::kZero) c_in_.assign(c_in_.size(), kNan);
    c_out_.resize(c_in_.size(), kNan);
    decay_ = normals(decay_stride * (rows - 1) + 1, 4);
    p_.a = a_.data();
    p_.b = b_.data();
    p_.c_in = c_in_.data();
    p_.c_out = c_out_.data();
    p_.decay = decay_.data();
  }
  Matrices(const Matrices&) = delete;
  Matrices& operator=(const Matrices&) = delete;

  const Product& whole() const { return p_; }

  // Rows [row, row + rows) and columns [column, column + columns) of the product.
  Product part(int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    Product p = p_;
    p.rows = rows;
    p.columns = columns;
    p.a += left_index<Left>(p_, row, 0);
    p.b += column;
    p.c_in += row * p.c_stride + column;
    p.c_out += row * p.c_stride + column;
    p.decay += row * p.decay_stride;
    return p;
  }

  const Floats& c_in() const { return c_in_; }
  Floats take_result() {
    Floats result(c_out_.size(), kNan);
    std::memcpy(result.data(), c_out_.data(), result.size() * sizeof(float));
    std::fill(c_out_.begin(), c_out_.end(), kNan);
    return result;
  }

  // Elements of the result outside their rounding error, and gaps that were written.
  int64_t wrong_elements(const Floats& result) const {
    const double roundings = static_cast<double>(p_.depth * p_.segments + 1);
    int64_t wrong = 0;
    for (int64_t m = 0; m < p_.rows; ++m) {
      std::vector<double> sum(static_cast<size_t>(p_.columns)), size(static_cast<size_t>(p_.columns));
      for (int64_t n = 0; n < p_.columns && kStart != Start::kZero; ++n) {
        const double start = c_in_[static_cast<size_t>(m * p_.c_stride + n)];
        sum[static_cast<size_t>(n)] = kStart == Start::kDecay ? start * p_.decay[m * p_.decay_stride] : start;
        size[static_cast<size_t>(n)] = std::fabs(sum[static_cast<size_t>(n)]);
      }
      for (int64_t s = 0; s < p_.segments; ++s) {
        for (int64_t r = 0; r < p_.depth; ++r) {
          const double left = p_.a[s * p_.a_segment + left_index<Left>(p_, m, r)];
          const float* right = p_.b + (s * p_.depth + r) * p_.b_stride;
          for (int64_t n = 0; n < p_.columns; ++n) {
            const double term = left * static_cast<double>(right[n]);
            sum[static_cast<size_t>(n)] += term;
            size[static_cast<size_t>(n)] += std::fabs(term);
          }
        }
      }
      for (int64_t n = 0; n < p_.columns; ++n) {
        const double error = std::fabs(result[static_cast<size_t>(m * p_.c_stride + n)] - sum[static_cast<size_t>(n)]);
        wrong += !(error <= roundings * 0x1p-23 * size[static_cast<size_t>(n)]);
      }
      for (int64_t n = p_.columns; n < p_.c_stride; ++n) {
        wrong += !std::isnan(result[static_cast<size_t>(m * p_.c_stride + n)]);
      }
    }
    return wrong;
  }

 private:
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

  static Floats spread(int64_t rows, int64_t columns, int64_t stride, uint64_t stream) {
    const Floats drawn = normals(rows * columns, stream);
    Floats x(static_cast<size_t>(rows * stride), kNan);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        x[static_cast<size_t>(i * stride + j)] = drawn[static_cast<size_t>(i * columns + j)];
      }
    }
    return x;
  }

  Product p_;
  Floats a_, b_, c_in_, c_out_, decay_;
};

std::string describe(const Shape& shape) {
  std::ostringstream out;
  out << "rows " << shape.rows << " columns " << shape.columns << " depth " << shape.depth << " segments "
      << shape.segments << " decay_stride " << shape.decay_stride;
  return out.str();
}

// check.operator()<Left, kStart>(..) for every layout and start.
template <class Left, class Check>
void for_each_start(const char* layout, const Check& check) {
  SCOPED_TRACE(layout);
  check.template operator()<Left, Start::kZero>();
  check.template operator()<Left, Start::kAdd>();
  check.template operator()<Left, Start::kDecay>();
}
template <class Check>
void for_each_kind(const Check& check) {
  for_each_start<Columns>("Columns", check);
  for_each_start<Rows<16>>("Rows<16>", check);
  for_each_start<Rows<kPanel>>("Rows<kPanel>", check);
  for_each_start<Rows<256>>("Rows<256>", check);
}

template <class Left, Start kStart>
void check_product(const Shape& shape) {
  SCOPED_TRACE(describe(shape));
  Matrices<Left, kStart> matrices(shape);
  const Floats c_in = matrices.c_in();
  product<Left, kStart>(matrices.whole());
  const Floats result = matrices.take_result();
  EXPECT_EQ(matrices.wrong_elements(result), 0) << "start " << static_cast<int>(kStart);
  EXPECT_TRUE(same_bits(matrices.c_in(), c_in)) << "the addend was written";
}

void products() {
  for_each_kind([]<class Left, Start kStart>() {
    for (int64_t depth : {kDepthStep, int64_t{12}, int64_t{16}, int64_t{64}, int64_t{256}}) {
      if (!fits<Left>(depth)) continue;
      for (int64_t segments : {int64_t{1}, int64_t{2}, 256 / depth}) {
        if (segments > 1 && depth * segments > 256) continue;
        for (int64_t rows = 4; rows <= 40; rows += test::reduced() ? 12 : 4) {
          for (int64_t vectors : {1, 2, 3}) {
            check_product<Left, kStart>({rows, vectors * kLanes, depth, segments, rows % 8 == 0 ? 1 : 0});
          }
        }
      }
    }
  });
}

// An element's bits do not depend on the tile it falls into.
void blocks() {
  for_each_kind([]<class Left, Start kStart>() {
    const int64_t depth = fits<Left>(16) ? 16 : kDepthStep;
    const int64_t columns = 5 * kLanes;
    for (int64_t rows = 4; rows <= 40; rows += 4) {
      Matrices<Left, kStart> matrices({rows, columns, depth, 3});
      product<Left, kStart>(matrices.whole());
      const Floats whole = matrices.take_result();
      for (int64_t height = 4; height <= rows; height += 4) {
        for (int64_t width = kLanes; width <= columns; width += kLanes) {
          for (int64_t row = 0; row < rows; row += height) {
            for (int64_t column = 0; column < columns; column += width) {
              product<Left, kStart>(
                  matrices.part(row, std::min(height, rows - row), column, std::min(width, columns - column)));
            }
          }
          EXPECT_TRUE(same_bits(matrices.take_result(), whole))
              << rows << " rows in blocks of " << height << " by " << width << ", start " << static_cast<int>(kStart);
        }
      }
    }
  });
}

// One chain in the order of the inner index: the bits of adding one segment after the other.
void segments() {
  for_each_kind([]<class Left, Start kStart>() {
    const int64_t depth = fits<Left>(16) ? 16 : kDepthStep;
    Matrices<Left, kStart> matrices({36, 3 * kLanes, depth, 4});
    product<Left, kStart>(matrices.whole());
    const Floats whole = matrices.take_result();

    Product one = matrices.whole();
    one.segments = 1;
    product<Left, kStart>(one);
    one.c_in = one.c_out;
    for (int64_t s = 1; s < 4; ++s) {
      one.a += one.a_segment;
      one.b += depth * one.b_stride;
      product<Left, Start::kAdd>(one);
    }
    EXPECT_TRUE(same_bits(matrices.take_result(), whole)) << "start " << static_cast<int>(kStart);
  });
}

void in_place() {
  for_each_kind([]<class Left, Start kStart>() {
    const int64_t depth = fits<Left>(16) ? 16 : kDepthStep;
    Matrices<Left, kStart> matrices({28, 3 * kLanes, depth, 2});
    product<Left, kStart>(matrices.whole());
    const Floats apart = matrices.take_result();

    Product p = matrices.whole();
    std::memcpy(p.c_out, p.c_in, apart.size() * sizeof(float));
    p.c_in = p.c_out;
    product<Left, kStart>(p);
    EXPECT_TRUE(same_bits(matrices.take_result(), apart)) << "start " << static_cast<int>(kStart);
  });
}

}  // namespace
}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {
namespace {

class Matmul : public hwy::TestWithParamTarget {};
HWY_TARGET_INSTANTIATE_TEST_SUITE_P(Matmul);

HWY_EXPORT(products);
TEST_P(Matmul, Products) { HWY_DYNAMIC_DISPATCH(products)(); }

HWY_EXPORT(blocks);
TEST_P(Matmul, Blocks) { HWY_DYNAMIC_DISPATCH(blocks)(); }

HWY_EXPORT(segments);
TEST_P(Matmul, Segments) { HWY_DYNAMIC_DISPATCH(segments)(); }

HWY_EXPORT(in_place);
TEST_P(Matmul, InPlace) { HWY_DYNAMIC_DISPATCH(in_place)(); }

}  // namespace
}  // namespace fastweight::cpu
#endif
