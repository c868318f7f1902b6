#include <cstdint>
#include <type_traits>

#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/matmul.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/simd/matmul-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace {

// Rows of a tile: with two vectors per row, as many accumulators as the register file holds beside the operands. The
// smaller tiles take the rows that are left over.
#if HWY_TARGET <= HWY_AVX3
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif

// A tile of two vectors takes about kTileRows cycles per step. At this pace a block's rows are on their way well before
// its products end (K = V = 128: 560 of 512 lines forward, 1120 of 896 backward; AVX-512 has a quarter of the steps),
// and the miss buffers are never full.
constexpr int64_t kDepthPerLine = kTileRows == 12 ? 4 : 16;

template <int kRows, int kVecs, class Left, Start kStart>
HWY_INLINE void product_tile(const Product& p, int64_t row, int64_t column) {
  Vec acc[kRows][kVecs];
  const float* c_in = p.c_in + row * p.c_stride + column;
  FW_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FW_UNROLL
    for (int n = 0; n < kVecs; ++n) {
      if constexpr (kStart == Start::kZero || kStart == Start::kStep) {
        acc[m][n] = zero();
      } else if constexpr (kStart == Start::kAdd) {
        acc[m][n] = load(c_in + m * p.c_stride + n * kLanes);
      } else {
        acc[m][n] = hn::Mul(broadcast(p.decay[(row + m) * p.decay_stride]), load(c_in + m * p.c_stride + n * kLanes));
      }
    }
  }

  const float* a = p.a + row * Left::kRowStride;
  const float* b = p.b + column;
  for (int64_t s = 0; s < p.segments; ++s) {
    const float* a_s = a + s * p.a_segment;
    for (int64_t r = 0; r < p.depth; r += kDepthStep) {
      FW_UNROLL
      for (int i = 0; i < kDepthStep; ++i) {
        Vec right[kVecs];
        FW_UNROLL
        for (int n = 0; n < kVecs; ++n) right[n] = load(b + n * kLanes);
        b += p.b_stride;
        FW_UNROLL
        for (int m = 0; m < kRows; ++m) {
          const Vec left = broadcast(a_s[m * Left::kRowStride]);
          FW_UNROLL
          for (int n = 0; n < kVecs; ++n) acc[m][n] = fma(left, right[n], acc[m][n]);
        }
        a_s += std::is_same_v<Left, Columns> ? p.a_stride : 1;
      }
    }
  }

  if (p.prefetcher != nullptr) p.prefetcher->issue(p.depth * p.segments / kDepthPerLine);

  float* c_out = p.c_out + row * p.c_stride + column;
  FW_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FW_UNROLL
    for (int n = 0; n < kVecs; ++n) {
      Vec result = acc[m][n];
      if constexpr (kStart == Start::kStep) {
        result = fnma(broadcast(p.decay[0]), result, load(c_in + m * p.c_stride + n * kLanes));
      }
      store(result, c_out + m * p.c_stride + n * kLanes);
    }
  }
}

template <int kVecs, class Left, Start kStart>
HWY_INLINE void product_columns(const Product& p, int64_t column) {
  // The largest tile that leaves no remainder of two rows, whose few chains could not hide the latency of an FMA.
  constexpr int kMiddle = kTileRows == 12 ? 8 : 4;
  int64_t row = 0;
  while (row < p.rows) {
    const int64_t left = p.rows - row;
    if (left >= kTileRows && left != 2 * kMiddle) {
      product_tile<kTileRows, kVecs, Left, kStart>(p, row, column);
      row += kTileRows;
    } else if (left >= kMiddle) {
      product_tile<kMiddle, kVecs, Left, kStart>(p, row, column);
      row += kMiddle;
    } else {
      product_tile<4, kVecs, Left, kStart>(p, row, column);
      row += 4;
    }
  }
}

}  // namespace

template <class Left, Start kStart>
void product(const Product& p) {
  int64_t column = 0;
  for (; column + kPanel <= p.columns; column += kPanel) product_columns<2, Left, kStart>(p, column);
  if (column < p.columns) product_columns<1, Left, kStart>(p, column);
}

template void product<Columns, Start::kZero>(const Product& p);
template void product<Columns, Start::kAdd>(const Product& p);
template void product<Columns, Start::kDecay>(const Product& p);
template void product<Columns, Start::kStep>(const Product& p);
template void product<PanelRows, Start::kZero>(const Product& p);
template void product<PanelRows, Start::kAdd>(const Product& p);
template void product<MatrixRows, Start::kZero>(const Product& p);

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
