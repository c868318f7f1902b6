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
#include "cpu/simd/triangle-inl.h"
#include "hwy/tests/hwy_gtest.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace {

using Floats = std::vector<float>;

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct Shape {
  int64_t rows, columns, depth, segments;
  int64_t decay_stride = 1;
};

std::string describe(const Shape& shape) {
  std::ostringstream out;
  out << "rows " << shape.rows << " columns " << shape.columns << " depth " << shape.depth << " segments "
      << shape.segments << " decay_stride " << shape.decay_stride;
  return out.str();
}

// A product with gaps between the rows of every matrix and between segments. The gaps hold NaN, and so does what a
// product that starts from zero may not read.
class Matrices {
 public:
  // `row_stride` of the left factor's rows; 0: its columns lie in memory.
  Matrices(const Shape& shape, int64_t row_stride, Start start)
      : row_stride_(row_stride),
        start_(start),
        p_{.rows = shape.rows, .columns = shape.columns, .depth = shape.depth, .segments = shape.segments} {
    p_.a_stride = p_.rows + 3;
    p_.a_segment = (row_stride == 0 ? p_.depth * p_.a_stride : p_.rows * row_stride) + 5;
    p_.b_stride = p_.columns + 3;
    p_.c_stride = p_.columns + 7;
    p_.decay_stride = start == Start::kStep ? 0 : shape.decay_stride;  // a step has one number

    support::Random random(1, 1);
    a_.assign(p_.segments * p_.a_segment, kNan);
    for (int64_t s = 0; s < p_.segments; ++s) {
      for (int64_t m = 0; m < p_.rows; ++m) {
        for (int64_t r = 0; r < p_.depth; ++r) {
          a_[s * p_.a_segment + left_index(m, r)] = static_cast<float>(random.normal());
        }
      }
    }
    b_ = rows_with_gaps(p_.segments * p_.depth, p_.b_stride, random);
    c_in_ = rows_with_gaps(p_.rows, p_.c_stride, random);
    if (start == Start::kZero) c_in_.assign(c_in_.size(), kNan);
    c_out_.assign(c_in_.size(), kNan);
    decay_.resize(p_.decay_stride * (p_.rows - 1) + 1);
    for (float& value : decay_) value = static_cast<float>(random.normal());
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
    p.a += left_index(row, 0);
    p.b += column;
    p.c_in += row * p.c_stride + column;
    p.c_out += row * p.c_stride + column;
    p.decay += row * p.decay_stride;
    return p;
  }

  const Floats& c_in() const { return c_in_; }

  // The result, gaps included; afterwards it is NaN again.
  Floats take_result() {
    Floats result(c_out_.size(), kNan);
    result.swap(c_out_);
    p_.c_out = c_out_.data();
    return result;
  }

  // Elements of a result outside their rounding error, and gaps that were written.
  int64_t wrong_elements(const Floats& result) const {
    const double allowed = static_cast<double>(p_.depth * p_.segments + 1) * 0x1p-23;
    int64_t wrong = 0;
    std::vector<double> sum(p_.columns), size(p_.columns);
    for (int64_t m = 0; m < p_.rows; ++m) {
      for (int64_t n = 0; n < p_.columns; ++n) {
        const double addend = c_in_[m * p_.c_stride + n];
        const double decay = p_.decay[m * p_.decay_stride];
        sum[n] = start_ == Start::kZero ? 0 : start_ == Start::kDecay ? decay * addend : addend;
        size[n] = std::fabs(sum[n]);
      }
      for (int64_t s = 0; s < p_.segments; ++s) {
        for (int64_t r = 0; r < p_.depth; ++r) {
          const double step = start_ == Start::kStep ? -p_.decay[0] : 1;
          const double left = step * a_[s * p_.a_segment + left_index(m, r)];
          const float* right = p_.b + (s * p_.depth + r) * p_.b_stride;
          for (int64_t n = 0; n < p_.columns; ++n) {
            const double term = left * static_cast<double>(right[n]);
            sum[n] += term;
            size[n] += std::fabs(term);
          }
        }
      }
      const float* row = result.data() + m * p_.c_stride;
      for (int64_t n = 0; n < p_.columns; ++n) wrong += !(std::fabs(row[n] - sum[n]) <= allowed * size[n]);
      for (int64_t n = p_.columns; n < p_.c_stride; ++n) wrong += !std::isnan(row[n]);
    }
    return wrong;
  }

 private:
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

  // Where element (m, r) of a segment of the left factor lies.
  int64_t left_index(int64_t m, int64_t r) const {
    return row_stride_ == 0 ? m + r * p_.a_stride : m * row_stride_ + r;
  }

  Floats rows_with_gaps(int64_t rows, int64_t stride, support::Random& random) const {
    Floats x(rows * stride, kNan);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < p_.columns; ++j) x[i * stride + j] = static_cast<float>(random.normal());
    }
    return x;
  }

  int64_t row_stride_;
  Start start_;
  Product p_;
  Floats a_, b_, c_in_, c_out_, decay_;
};

// One instance of the product, and the layout and start it is made for.
struct Kind {
  const char* name;
  int64_t row_stride;  // 0: Columns
  Start start;
  void (*run)(const Product& p);
  void (*add)(
      const Product& p);  // the same layout with Start::kAdd; null: the result is not such a chain, or no kernel has it

  bool fits(int64_t depth) const { return row_stride == 0 || depth <= row_stride; }
  int64_t some_depth() const { return fits(16) ? 16 : kDepthStep; }
};

template <class Left, Start kStart>
constexpr Kind kind_of(const char* name, void (*add)(const Product& p)) {
  return {name, std::is_same_v<Left, Columns> ? 0 : Left::kRowStride, kStart, product<Left, kStart>, add};
}

constexpr Kind kKinds[] = {
    kind_of<Columns, Start::kZero>("columns, zero", product<Columns, Start::kAdd>),
    kind_of<Columns, Start::kAdd>("columns, add", product<Columns, Start::kAdd>),
    kind_of<Columns, Start::kDecay>("columns, decay", product<Columns, Start::kAdd>),
    kind_of<Columns, Start::kStep>("columns, step", nullptr),
    kind_of<PanelRows, Start::kZero>("rows of a panel, zero", product<PanelRows, Start::kAdd>),
    kind_of<PanelRows, Start::kAdd>("rows of a panel, add", product<PanelRows, Start::kAdd>),
    kind_of<MatrixRows, Start::kZero>("rows of a matrix, zero", nullptr),
};

void products() {
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(kind.name);
    for (int64_t depth : {kDepthStep, int64_t{12}, int64_t{16}, int64_t{64}, int64_t{256}}) {
      for (int64_t segments : {int64_t{1}, int64_t{2}, 256 / depth}) {
        if (!kind.fits(depth) || depth * segments > 256) continue;
        for (int64_t rows = 4; rows <= 40; rows += test::reduced() ? 12 : 4) {
          for (int64_t vectors : {1, 2, 3}) {
            const Shape shape{rows, vectors * kLanes, depth, segments, rows % 8 == 0 ? 1 : 0};
            Matrices matrices(shape, kind.row_stride, kind.start);
            const Floats c_in = matrices.c_in();
            kind.run(matrices.whole());
            EXPECT_EQ(matrices.wrong_elements(matrices.take_result()), 0) << describe(shape);
            EXPECT_TRUE(same_bits(matrices.c_in(), c_in)) << "the addend was written: " << describe(shape);
          }
        }
      }
    }
  }
}

// An element's bits do not depend on the tile it falls into.
void blocks() {
  const int64_t columns = 5 * kLanes;
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(kind.name);
    for (int64_t rows = 4; rows <= 40; rows += 4) {
      Matrices matrices({rows, columns, kind.some_depth(), 3}, kind.row_stride, kind.start);
      kind.run(matrices.whole());
      const Floats whole = matrices.take_result();
      for (int64_t height = 4; height <= rows; height += 4) {
        for (int64_t width = kLanes; width <= columns; width += kLanes) {
          for (int64_t row = 0; row < rows; row += height) {
            for (int64_t column = 0; column < columns; column += width) {
              kind.run(matrices.part(row, std::min(height, rows - row), column, std::min(width, columns - column)));
            }
          }
          EXPECT_TRUE(same_bits(matrices.take_result(), whole))
              << rows << " rows in blocks of " << height << " by " << width;
        }
      }
    }
  }
}

// One chain in the order of the inner index: the bits of adding one segment after the other.
void segments() {
  for (const Kind& kind : kKinds) {
    if (kind.add == nullptr) continue;
    SCOPED_TRACE(kind.name);
    Matrices matrices({36, 3 * kLanes, kind.some_depth(), 4}, kind.row_stride, kind.start);
    kind.run(matrices.whole());
    const Floats whole = matrices.take_result();

    Product one = matrices.whole();
    one.segments = 1;
    kind.run(one);
    one.c_in = one.c_out;
    for (int64_t s = 1; s < 4; ++s) {
      one.a += one.a_segment;
      one.b += one.depth * one.b_stride;
      kind.add(one);
    }
    EXPECT_TRUE(same_bits(matrices.take_result(), whole));
  }
}

void in_place() {
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(kind.name);
    Matrices matrices({28, 3 * kLanes, kind.some_depth(), 2}, kind.row_stride, kind.start);
    kind.run(matrices.whole());
    const Floats apart = matrices.take_result();

    Product p = matrices.whole();
    std::copy(matrices.c_in().begin(), matrices.c_in().end(), p.c_out);
    p.c_in = p.c_out;
    kind.run(p);
    EXPECT_TRUE(same_bits(matrices.take_result(), apart));
  }
}

struct RowMatrix {
  const float* values;
  int64_t rows;
  int64_t size() const { return rows; }
  float operator()(int64_t i, int64_t j) const { return values[i * rows + j]; }
};

// y + L x and y + L^T x. The part of L above the diagonal is NaN and not read; a row of x that is NaN reaches the rows
// of y from it on, or up to it, alone.
void triangles() {
  const int64_t columns = 3 * kLanes, x_stride = columns + 3, y_stride = columns + 5;
  for (int64_t size : {4, 16, 36}) {
    const auto drawn = [size](int64_t width, uint64_t stream) {
      const support::Tensor values = support::normals(DType::kF32, {size, width}, 7, stream);
      const float* data = static_cast<const float*>(values.data());
      return Floats(data, data + values.size());
    };
    Floats L = drawn(size, 1), x = drawn(x_stride, 2);
    for (int64_t i = 0; i < size; ++i) {
      for (int64_t j = i + 1; j < size; ++j) L[static_cast<size_t>(i * size + j)] = std::nanf("");
    }
    for (Triangle triangle : {Triangle::kLower, Triangle::kUpper}) {
      for (int64_t spoiled : {int64_t{-1}, int64_t{0}, size / 2 + 1, size - 1}) {
        Floats given = x, y = drawn(y_stride, 3);
        const Floats start = y;
        for (int64_t c = 0; c < columns && spoiled >= 0; ++c) {
          given[static_cast<size_t>(spoiled * x_stride + c)] = std::nanf("");
        }
        const RowMatrix matrix{L.data(), size};
        if (triangle == Triangle::kLower) {
          add_triangular<Triangle::kLower>(matrix, given.data(), x_stride, y.data(), y_stride, columns);
        } else {
          add_triangular<Triangle::kUpper>(matrix, given.data(), x_stride, y.data(), y_stride, columns);
        }
        for (int64_t m = 0; m < size; ++m) {
          for (int64_t c = 0; c < y_stride; ++c) {
            const size_t at = static_cast<size_t>(m * y_stride + c);
            double expected = static_cast<double>(start[at]);
            for (int64_t r = 0; r < size && c < columns; ++r) {
              if (triangle == Triangle::kLower ? r > m : r < m) continue;
              const float l = triangle == Triangle::kLower ? matrix(m, r) : matrix(r, m);
              expected += static_cast<double>(l) * static_cast<double>(given[static_cast<size_t>(r * x_stride + c)]);
            }
            const double error = std::abs(static_cast<double>(y[at]) - expected);
            EXPECT_TRUE(std::isnan(expected) ? std::isnan(y[at]) : error <= 1e-5 * (1 + std::abs(expected)))
                << size << " row " << m << " column " << c << " spoiled " << spoiled;
          }
        }
      }
    }
  }
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

HWY_EXPORT(triangles);
TEST_P(Matmul, Triangles) { HWY_DYNAMIC_DISPATCH(triangles)(); }

}  // namespace
}  // namespace fastweight::cpu
#endif
