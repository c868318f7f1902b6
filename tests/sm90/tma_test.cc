// TMA copies against plain loops: boxes that reach over the edges of a tensor, every rank, pattern and step, parts of
// sequences.
#include "tests/sm90/tma_kernels.h"

#include <cstring>

#include "tests/sm90/testing.h"

namespace fastweight::test {
namespace {

using cuda::BoxPlace;
using cuda::Swizzle;
using cuda::TensorMap;
using cuda::TensorMapSpec;
using support::DeviceCopy;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Elements 1, 2, .. of a type with 16 bits that has all of them as integers up to 2048.
Tensor counting(std::vector<int64_t> shape) {
  Tensor x(DType::kF16, std::move(shape));
  for (int64_t i = 0; i < x.size(); ++i) x.set(i, static_cast<double>(i % 2048 + 1));
  return x;
}

// A dense tensor, its last axis the fastest.
TensorMapSpec dense_spec(const DeviceCopy& x, std::vector<int> box, Swizzle swizzle) {
  const TensorView view = x.view();
  TensorMapSpec spec;
  spec.data = view.data;
  spec.dtype = view.dtype;
  spec.rank = view.rank;
  for (int i = 0; i < view.rank; ++i) {
    const auto axis = static_cast<size_t>(view.rank - 1 - i);
    spec.sizes[i] = view.shape[axis];
    spec.strides[i] = view.strides[axis];
    spec.box[i] = box[static_cast<size_t>(i)];
  }
  spec.swizzle = swizzle;
  return spec;
}

// Along every dimension the places of the box's elements in the tensor, the first dimension fastest; -1 outside.
std::vector<int64_t> elements_of_box(const TensorMapSpec& spec, const BoxPlace& place) {
  std::vector<int64_t> all{0};
  for (int i = spec.rank - 1; i >= 0; --i) {
    std::vector<int64_t> next;
    for (int64_t outer : all) {
      for (int b = 0; b < spec.box[i]; b += spec.steps[i]) {
        const int64_t at = place.at[i] + b;
        next.push_back(outer < 0 || at < 0 || at >= spec.sizes[i] ? -1 : outer + at * spec.strides[i]);
      }
    }
    all = next;
  }
  return all;
}

// Where element `index` of a box lies in shared memory, in elements of 16 bits, for boxes that begin at 1024 bytes.
int64_t swizzled_index(Swizzle swizzle, int64_t index) {
  const int64_t segment = index / 8, row_of_128 = index / 64;
  const int64_t mask = swizzle == Swizzle::k128 ? 7 : swizzle == Swizzle::k64 ? 3 : 0;
  return (segment ^ (row_of_128 & mask)) * 8 + index % 8;
}

void expect_loads(const Tensor& x, const TensorMapSpec& spec, const BoxPlace& place, const std::string& what) {
  const std::vector<int64_t> elements = elements_of_box(spec, place);
  const auto count = static_cast<int64_t>(elements.size());
  const DeviceCopy out(Tensor(DType::kF16, {count}), kCuda);
  cuda::load_one_box(cuda::tensor_map(spec), spec.rank, place, static_cast<uint32_t>(2 * count), out.view().data);
  const Tensor box = out.get();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t from = elements[static_cast<size_t>(i)];
    ASSERT_EQ(box[swizzled_index(spec.swizzle, i)], from < 0 ? 0.0 : x[from]) << what << ", element " << i;
  }
}

TEST(Tma, BoxesOverTheEdges) {
  struct Case {
    std::vector<int64_t> shape;  // the fastest last
    std::vector<int> box;        // the fastest first
    std::vector<BoxPlace> places;
  };
  const Case cases[] = {
      {{70, 96}, {64, 64}, {{{0, 0}}, {{64, 10}}, {{32, 69}}, {{88, 0}}, {{0, 66}}}},
      {{5, 20, 72}, {64, 16, 2}, {{{0, 0, 0}}, {{16, 10, 4}}}},
      {{2, 9, 3, 64}, {64, 1, 8, 1}, {{{0, 2, 0, 1}}, {{0, 1, 5, 0}}}},
      {{2, 3, 4, 2, 64}, {64, 2, 3, 2, 2}, {{{0, 0, 0, 0, 0}}, {{0, 1, 2, 2, 1}}}},
      {{40, 24}, {64, 16}, {{{0, 0}}, {{0, 30}}, {{16, 10}}}},  // boxes wider than the tensor
      {{2, 9, 3, 8}, {64, 1, 8, 1}, {{{0, 2, 0, 1}}, {{0, 1, 5, 0}}}},
  };
  for (const Case& c : cases) {
    const Tensor x = counting(c.shape);
    const DeviceCopy copy(x, kCuda);
    for (const BoxPlace& place : c.places) {
      expect_loads(x, dense_spec(copy, c.box, Swizzle::k128), place,
                   "rank " + std::to_string(c.shape.size()) + " at " + std::to_string(place.at[0]) + ", " +
                       std::to_string(place.at[1]));
    }
  }
}

TEST(Tma, Patterns) {
  const Tensor x = counting({40, 64});
  const DeviceCopy copy(x, kCuda);
  for (int row : {0, 3, 20}) {
    expect_loads(x, dense_spec(copy, {64, 32}, Swizzle::k128), {{0, row}}, "rows of 128 bytes");
    expect_loads(x, dense_spec(copy, {32, 32}, Swizzle::k64), {{32, row}}, "rows of 64 bytes");
    expect_loads(x, dense_spec(copy, {8, 32}, Swizzle::kNone), {{8, row}}, "rows of 16 bytes");
    expect_loads(x, dense_spec(copy, {48, 16}, Swizzle::kNone), {{8, row}}, "rows of 96 bytes");
  }
}

TEST(Tma, Steps) {
  const Tensor x = counting({40, 64});
  const DeviceCopy copy(x, kCuda);
  for (int step : {2, 3}) {
    TensorMapSpec spec = dense_spec(copy, {64, 24}, Swizzle::k128);
    spec.steps[1] = step;
    for (int row : {0, 5, 30}) expect_loads(x, spec, {{0, row}}, "every " + std::to_string(step) + " rows");
  }
}

TEST(Tma, StoresStayInside) {
  struct Case {
    int64_t width;  // of the tensor
    BoxPlace place;
  };
  const Tensor box = counting({64 * 32});
  const DeviceCopy in(box, kCuda);
  for (const auto& [width, place] :
       {Case{96, {{0, 0}}}, {96, {{64, 15}}}, {96, {{0, 39}}}, {40, {{0, 15}}}, {40, {{32, 4}}}, {8, {{0, 4}}}}) {
    Tensor x(DType::kF16, {40, width});
    x.fill(kNaN);
    const DeviceCopy copy(x, kCuda);
    const TensorMapSpec spec = dense_spec(copy, {64, 32}, Swizzle::k128);
    cuda::store_one_box(cuda::tensor_map(spec), 2, place, 2 * 64 * 32, in.view().data);
    const std::vector<int64_t> elements = elements_of_box(spec, place);
    for (int64_t i = 0; i < box.size(); ++i) {
      const int64_t to = elements[static_cast<size_t>(i)];
      if (to >= 0) x.set(to, box[swizzled_index(Swizzle::k128, i)]);
    }
    EXPECT_TRUE(support::same_bits(copy.get(), x)) << width << ": " << place.at[0] << ", " << place.at[1];
  }
}

TEST(Tma, TilesAsFragmentsFindThem) {
  const Tensor x = counting({100, 136});
  const DeviceCopy copy(x, kCuda), out(Tensor(DType::kF16, {64, 128}), kCuda);
  cuda::read_tile(cuda::tensor_map(dense_spec(copy, {64, 64}, Swizzle::k128)), {{8, 50}},
                  static_cast<uint16_t*>(out.view().data));
  const Tensor tile = out.get();
  for (int64_t i = 0; i < 64; ++i) {
    for (int64_t j = 0; j < 128; ++j) {
      ASSERT_EQ(tile[i * 128 + j], i + 50 < 100 ? x[(i + 50) * 136 + j + 8] : 0.0) << i << ", " << j;
    }
  }
}

// Rows of tokens [token, token + count) and zeros, whatever the tokens after them hold: NaNs here.
TEST(Tma, TokensOfASequence) {
  constexpr int64_t kB = 2, kT = 150, kH = 3, kD = 128;
  for (int64_t count : {1, 17, 63, 64}) {
    for (int64_t token : {int64_t{0}, int64_t{5}, kT - count}) {
      Tensor x = counting({kB, kT, kH, kD});
      for (int64_t b = 0; b < kB; ++b) {
        for (int64_t t = 0; t < kT; ++t) {
          if (b == 1 && t >= token && t < token + count) continue;
          for (int64_t i = 0; i < kH * kD; ++i) x.set((b * kT + t) * kH * kD + i, kNaN);
        }
      }
      const DeviceCopy copy(x, kCuda), out(Tensor(DType::kF16, {64, 64}), kCuda);
      const TensorMap map = cuda::token_map(copy.view(), 64, 64, Swizzle::k128);
      const BoxPlace place{{64, 2, static_cast<int>(64 - count), static_cast<int>(token + count), 1}};
      cuda::load_one_box(map, 5, place, 64 * 64 * 2, out.view().data);
      const Tensor box = out.get();
      for (int64_t i = 0; i < 64; ++i) {
        for (int64_t j = 0; j < 64; ++j) {
          const double expected = i < count ? x[((kT + token + i) * kH + 2) * kD + 64 + j] : 0.0;
          ASSERT_EQ(box[swizzled_index(Swizzle::k128, i * 64 + j)], expected) << count << " tokens from " << token;
        }
      }
      // The way back: other tokens, heads and columns keep what they held.
      Tensor y(DType::kF16, {kB, kT, kH, kD});
      y.fill(kNaN);
      const DeviceCopy target(y, kCuda);
      cuda::store_one_box(cuda::token_map(target.view(), 64, 64, Swizzle::k128), 5, place, 64 * 64 * 2,
                          out.view().data);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t j = 0; j < 64; ++j) {
          const int64_t at = ((kT + token + i) * kH + 2) * kD + 64 + j;
          y.set(at, x[at]);
        }
      }
      ASSERT_TRUE(support::same_bits(target.get(), y)) << count << " tokens from " << token;
    }
  }
}

// Rows of blocks of lower triangular matrices: zeros from the end of a diagonal block on, whatever is there.
TEST(Tma, BlocksUpToADiagonal) {
  constexpr int64_t kCount = 3, kSize = 64;
  Tensor x = counting({kCount, kSize, kSize});
  for (int64_t i = 0; i < x.size(); ++i) {
    if (i % kSize / 16 > i / kSize % kSize / 16) x.set(i, kNaN);
  }
  const DeviceCopy copy(x, kCuda);
  const TensorMap map = cuda::tensor_map({.data = static_cast<const uint16_t*>(copy.view().data) - 48,
                                          .dtype = DType::kF16,
                                          .rank = 4,
                                          .sizes = {kSize, 4, kSize, kCount},
                                          .strides = {1, 16, kSize, kSize * kSize},
                                          .box = {kSize, 1, 16, 1}});
  for (int block = 0; block < 4; ++block) {
    for (int item = 0; item < kCount; ++item) {
      const DeviceCopy out(Tensor(DType::kF16, {16, kSize}), kCuda);
      cuda::load_one_box(map, 4, {{48 - 16 * block, block, 16 * block, item}}, 16 * 64 * 2, out.view().data);
      const Tensor box = out.get();
      for (int64_t i = 0; i < 16 * kSize; ++i) {
        const double value = x[item * kSize * kSize + 16 * block * kSize + i];
        ASSERT_EQ(box[swizzled_index(Swizzle::k128, i)], i % kSize < 16 * (block + 1) ? value : 0.0) << block;
      }
    }
  }
}

TEST(Tma, OneTokenOfOneHead) {
  const Tensor x = counting({1, 1, 1, 72});
  const DeviceCopy copy(x, kCuda), out(Tensor(DType::kF16, {64, 64}), kCuda);
  cuda::load_one_box(cuda::token_map(copy.view(), 64, 64, Swizzle::k128), 5, {{64, 0, 63, 1, 0}}, 64 * 64 * 2,
                     out.view().data);
  const Tensor box = out.get();
  for (int64_t i = 0; i < box.size(); ++i) {
    ASSERT_EQ(box[swizzled_index(Swizzle::k128, i)], i < 8 ? x[64 + i] : 0.0) << i;
  }
}

TEST(Tma, WhoHasATokenMap) {
  const Tensor x(DType::kBF16, {2, 5, 3, 72});
  EXPECT_TRUE(cuda::has_token_map(x.view()));
  TensorView odd = x.view();
  odd.strides[1] += 4;
  EXPECT_FALSE(cuda::has_token_map(odd)) << "tokens that are not aligned to 16 bytes";
  odd = x.view();
  odd.strides[2] = 0;
  EXPECT_FALSE(cuda::has_token_map(odd)) << "one head for all";
  odd = x.view();
  odd.strides[3] = 2;
  EXPECT_FALSE(cuda::has_token_map(odd)) << "every second element";
  EXPECT_FALSE(cuda::has_token_map(Tensor(DType::kF32, {2, 5, 3, 72}).view())) << "fp32";
  EXPECT_TRUE(cuda::has_token_map(Tensor(DType::kF32, {2, 5, 3, 72}).view(), sizeof(float)));
  EXPECT_FALSE(cuda::has_token_map(Tensor(DType::kF64, {2, 5, 3, 72}).view(), sizeof(double))) << "fp64";
}

TEST(Tma, WhatTheDriverRefuses) {
  const DeviceCopy copy(counting({40, 64}), kCuda);
  TensorMapSpec spec = dense_spec(copy, {64, 32}, Swizzle::k128);
  spec.box[0] = 72;
  expect_refused(ErrorCode::kDevice, "cuTensorMapEncodeTiled", [&] { cuda::tensor_map(spec); });
  spec = dense_spec(copy, {64, 32}, Swizzle::k128);
  spec.strides[1] = 60;
  expect_refused(ErrorCode::kDevice, "cuTensorMapEncodeTiled", [&] { cuda::tensor_map(spec); });
}

TEST(Tma, RingOfLoadsAndStores) {
  for (int tiles : {1, 2, 3, 11}) {
    const Tensor x = counting({tiles * 32, 64});
    Tensor y(DType::kF16, {tiles * 32 - 3, 64});  // the last box reaches over the edge
    y.fill(kNaN);
    const DeviceCopy from(x, kCuda), to(y, kCuda);
    cuda::copy_through_ring(from.view().data, tiles, cuda::tensor_map(dense_spec(to, {64, 32}, Swizzle::kNone)));
    EXPECT_TRUE(support::same_bits(to.get(), slice(x, 0, 0, tiles * 32 - 3))) << tiles << " tiles";
  }
}

}  // namespace
}  // namespace fastweight::test
