#include "core/check.h"

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <set>

namespace fastweight {
namespace {

TEST(DistinctElements, StridesDecide) {
  std::array<float, 64> buffer;
  TensorView view = TensorView::dense(buffer.data(), {2, 3, 4});
  EXPECT_TRUE(check::has_distinct_elements(view));
  view.strides = {1, 2, 6};  // another order of the axes
  EXPECT_TRUE(check::has_distinct_elements(view));
  view.strides = {12, 4, 0};
  EXPECT_FALSE(check::has_distinct_elements(view));
  view.strides = {12, 3, 1};
  EXPECT_FALSE(check::has_distinct_elements(view));
  view.shape = {2, 1, 3};  // apart, but interleaved: refused
  view.strides = {3, 1, 2};
  EXPECT_FALSE(check::has_distinct_elements(view));
  view.shape = {2, 1, 4};  // the stride of a single row is not used
  view.strides = {4, 0, 1};
  EXPECT_TRUE(check::has_distinct_elements(view));
  view.shape[2] = 0;
  view.strides = {};
  EXPECT_TRUE(check::has_distinct_elements(view));
}

TEST(Apart, SlicesOfPackedBuffers) {
  std::array<float, 2 * 5 * 3 * 4 * 8> buffer;
  const auto slice = [&](int64_t first, int64_t row, int64_t head) {
    TensorView view = TensorView::dense(buffer.data() + first, {2, 5, 4, 8});
    view.strides = {5 * row, row, head, 1};
    return view;
  };
  // [B, T, 3, H, K]
  EXPECT_TRUE(check::are_apart(slice(0, 96, 8), slice(32, 96, 8)));
  EXPECT_TRUE(check::are_apart(slice(64, 96, 8), slice(32, 96, 8)));
  EXPECT_FALSE(check::are_apart(slice(0, 96, 8), slice(31, 96, 8)));
  // [B, T, H, 3, K]
  EXPECT_TRUE(check::are_apart(slice(0, 96, 24), slice(8, 96, 24)));
  EXPECT_TRUE(check::are_apart(slice(8, 96, 24), slice(16, 96, 24)));
  EXPECT_FALSE(check::are_apart(slice(8, 96, 24), slice(12, 96, 24)));
  // One after the other, and a view with itself.
  EXPECT_TRUE(check::are_apart(slice(0, 32, 8), slice(320, 32, 8)));
  EXPECT_FALSE(check::are_apart(slice(0, 32, 8), slice(0, 32, 8)));
}

std::set<uintptr_t> bytes_of(const TensorView& view) {
  std::set<uintptr_t> bytes;
  const int64_t size = check::element_size(view.dtype);
  for (int64_t i = 0; i < view.shape[0]; ++i) {
    for (int64_t j = 0; j < view.shape[1]; ++j) {
      for (int64_t k = 0; k < view.shape[2]; ++k) {
        const int64_t offset = (i * view.strides[0] + j * view.strides[1] + k * view.strides[2]) * size;
        for (int64_t b = 0; b < size; ++b) {
          bytes.insert(reinterpret_cast<uintptr_t>(view.data) + static_cast<uintptr_t>(offset + b));
        }
      }
    }
  }
  return bytes;
}

// Whatever the tests accept is true, whichever way the views lie.
TEST(Apart, NeverAcceptsAnOverlap) {
  std::array<double, 512> buffer;
  std::mt19937 random(7);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  const auto draw_view = [&] {
    TensorView view = TensorView::dense(buffer.data() + draw(0, 20), DType::kF32, {draw(1, 3), draw(1, 3), draw(1, 4)});
    view.strides = {draw(0, 24), draw(0, 12), draw(0, 2)};
    if (draw(0, 1) == 1) view.dtype = DType::kF64;
    return view;
  };
  int accepted = 0;
  for (int round = 0; round < 5000; ++round) {
    const TensorView a = draw_view(), b = draw_view();
    const std::set<uintptr_t> bytes_a = bytes_of(a), bytes_b = bytes_of(b);
    if (check::has_distinct_elements(a)) {
      ASSERT_EQ(bytes_a.size(),
                static_cast<size_t>(a.shape[0] * a.shape[1] * a.shape[2] * check::element_size(a.dtype)));
    }
    if (!check::are_apart(a, b)) continue;
    ++accepted;
    for (uintptr_t byte : bytes_a) ASSERT_FALSE(bytes_b.contains(byte));
  }
  EXPECT_GT(accepted, 500);
}

}  // namespace
}  // namespace fastweight
