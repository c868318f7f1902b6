// Products of a warpgroup against plain loops: where the operands lie, their types and widths, groups on their way.
#include "tests/sm90/wgmma_kernels.h"

#include "tests/sm90/testing.h"

namespace fastweight::test {
namespace {

using cuda::kInner;
using cuda::OperandPlace;
using cuda::ProductCase;
using cuda::Swizzle;
using support::DeviceCopy;

constexpr int64_t kM = 64;

Tensor product(const Tensor& a, const Tensor& b) {
  const int64_t rows = a.shape()[0], inner = a.shape()[1], columns = b.shape()[1];
  const std::vector<double> x = a.values(), y = b.values();
  Tensor c(DType::kF32, {rows, columns});
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < inner; ++k) {
        sum += x[static_cast<size_t>(i * inner + k)] * y[static_cast<size_t>(k * columns + j)];
      }
      c.set(i * columns + j, sum);
    }
  }
  return c;
}

DeviceCopy on_device(const Tensor& x) { return DeviceCopy(x, kCuda); }
float* floats(const DeviceCopy& x) { return static_cast<float*>(x.view().data); }

DeviceCopy result(int64_t columns) {
  Tensor c(DType::kF32, {kM, columns});
  c.fill(-1e9);
  return on_device(c);
}

std::vector<ProductCase> cases() {
  std::vector<ProductCase> all;
  const auto add = [&](DType dtype, int n, Swizzle swizzle) {
    for (OperandPlace a : {OperandPlace::kRegisters, OperandPlace::kAlongRows, OperandPlace::kAlongColumns}) {
      for (bool b_along_columns : {false, true}) all.push_back({dtype, n, swizzle, a, b_along_columns});
    }
  };
  for (int n : {64, 128}) {
    for (Swizzle swizzle : {Swizzle::k128, Swizzle::k64, Swizzle::kNone}) add(DType::kBF16, n, swizzle);
  }
  add(DType::kBF16, 32, Swizzle::k128);
  add(DType::kF16, 64, Swizzle::k128);
  return all;
}

std::string text(const ProductCase& which) {
  return std::string(name_of(which.dtype)) + ", n " + std::to_string(which.n) + ", rows of " +
         std::to_string(cuda::row_bytes(which.swizzle)) + " bytes, a " +
         (which.a == OperandPlace::kRegisters   ? "in registers"
          : which.a == OperandPlace::kAlongRows ? "along rows"
                                                : "along columns") +
         (which.b_along_columns ? ", b along columns" : ", b along rows");
}

TEST(Wgmma, OperandsWhereverTheyLie) {
  for (const ProductCase& which : cases()) {
    const Tensor a = draw_integers(which.dtype, {kM, kInner}, 8, 1),
                 b = draw_integers(which.dtype, {kInner, which.n}, 8, 2);
    const DeviceCopy da = on_device(a), db = on_device(b), dc = result(which.n);
    ASSERT_TRUE(cuda::multiply(which, da.view().data, db.view().data, floats(dc))) << text(which);
    EXPECT_TRUE(support::same_bits(dc.get(), product(a, b))) << text(which);
  }
}

TEST(Wgmma, SumsBecomeFragments) {
  const Tensor a = draw_integers(DType::kBF16, {kM, kInner}, 1, 3), b = draw_integers(DType::kBF16, {kInner, kM}, 1, 4);
  const Tensor d = draw_integers(DType::kBF16, {kInner, kM}, 4, 5);
  const DeviceCopy da = on_device(a), db = on_device(b), dd = on_device(d), dc = result(kM);
  cuda::multiply_twice(da.view().data, db.view().data, dd.view().data, floats(dc));
  EXPECT_TRUE(support::same_bits(dc.get(), product(product(a, b), d)));
}

TEST(Wgmma, GroupsCompleteInOrder) {
  const Tensor a = draw_integers(DType::kBF16, {kM, kInner}, 8, 6),
               b = draw_integers(DType::kBF16, {kInner, 128}, 8, 7);
  const DeviceCopy da = on_device(a), db = on_device(b), dc = result(128), first = result(64);
  cuda::multiply_halves(da.view().data, db.view().data, floats(dc), floats(first));
  const Tensor expected = product(a, b);
  EXPECT_TRUE(support::same_bits(dc.get(), expected));
  EXPECT_TRUE(support::same_bits(first.get(), slice(expected, 1, 0, 64)));
}

}  // namespace
}  // namespace fastweight::test
