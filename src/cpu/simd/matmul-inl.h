// Small fp32 matrix products on data that is already in cache, as register tiles: an element of the left factor is
// broadcast against two vectors of a row of the right factor. Re-included once per instruction set.
//
// Every element of a result is one chain of fused multiply-adds in the order of the inner index, whatever the tile it
// falls into. So a result does not change when a matrix is cut into blocks of rows or columns.
#if defined(FW_CPU_SIMD_MATMUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_SIMD_MATMUL_INL_H_
#undef FW_CPU_SIMD_MATMUL_INL_H_
#else
#define FW_CPU_SIMD_MATMUL_INL_H_
#endif

#include <type_traits>

#include "cpu/simd/prefetch.h"
#include "cpu/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {

// Rows of a tile: with two vectors per row, as many accumulators as the register file holds beside the operands. The
// smaller tiles take the rows that are left over.
#if HWY_TARGET <= HWY_AVX3
inline constexpr int kTileRows = 12;
#else
inline constexpr int kTileRows = 6;
#endif

// Steps of the inner index per turn of the loop.
inline constexpr int64_t kDepthStep = kPanel < 4 ? kPanel : 4;

// The layout of the left factor. Rows of a tile must be constant displacements from one pointer: with a run-time
// distance between rows the compiler runs out of address registers, and the tile reaches 60 % of its speed.
struct Columns {};  // element (m, r) at a[m + r * stride]
template <int64_t kStride>
struct Rows {};  // element (m, r) at a[m * kStride + r]

// What becomes of the product: itself, c_in + product, diag(decay) c_in + product, or c_in - decay[0] * product. The
// first three start the chain of multiply-adds; the last is done once the product is complete.
enum class Start { kZero, kAdd, kDecay, kStep };

// c_out = start + left right. The inner index runs over `segments` pieces of `depth` (a multiple of kDepthStep);
// between pieces the left factor jumps by `a_segment` elements and the right factor goes on. Rows and columns: `rows` a
// multiple of 4, `columns` a multiple of kLanes.
struct Product {
  int64_t rows, columns;
  int64_t depth, segments = 1;
  const float* a;
  int64_t a_stride = 0;  // of Columns
  int64_t a_segment = 0;
  const float* b;
  int64_t b_stride;
  const float* c_in;  // may be c_out
  float* c_out;
  int64_t c_stride;  // of both
  const float* decay = nullptr;
  int64_t decay_stride = 0;             // 0: one number for all rows
  RowPrefetcher* prefetcher = nullptr;  // gets a line per kDepthPerLine steps of the inner index of a tile
};

// A tile of two vectors takes about kTileRows cycles per step. At this pace a block's rows are on their way well before
// its products end (K = V = 128: 560 of 512 lines forward, 1120 of 896 backward), and the miss buffers are never full.
inline constexpr int64_t kDepthPerLine = 16;

template <class Left>
inline constexpr int64_t kRowStride = 1;
template <int64_t kStride>
inline constexpr int64_t kRowStride<Rows<kStride>> = kStride;

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

  const float* a = p.a + row * kRowStride<Left>;
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
          const Vec left = broadcast(a_s[m * kRowStride<Left>]);
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

template <class Left, Start kStart>
HWY_NOINLINE void product(const Product& p) {
  int64_t column = 0;
  for (; column + kPanel <= p.columns; column += kPanel) product_columns<2, Left, kStart>(p, column);
  if (column < p.columns) product_columns<1, Left, kStart>(p, column);
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
