// Small fp32 matrix products on data that is already in cache, as register tiles: an element of the left factor is
// broadcast against two vectors of a row of the right factor (matmul.cc). Re-included once per instruction set.
//
// Every element of a result is one chain of fused multiply-adds in the order of the inner index, whatever the tile it
// falls into. So a result does not change when a matrix is cut into blocks of rows or columns.
#if defined(FW_CPU_SIMD_MATMUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_SIMD_MATMUL_INL_H_
#undef FW_CPU_SIMD_MATMUL_INL_H_
#else
#define FW_CPU_SIMD_MATMUL_INL_H_
#endif

#include "cpu/simd/prefetch.h"
#include "cpu/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {

// Steps of the inner index per turn of the loop. (With four, gcc spills accumulators of the largest tile, and the
// products take 5 % longer.)
inline constexpr int64_t kDepthStep = 2;

// The layout of the left factor: element (m, r) at a[m + r * stride], or at a[m * kRowStride + r]. Rows of a tile must
// be constant displacements from one pointer: with a run-time distance between rows the compiler runs out of address
// registers, and the tile reaches 60 % of its speed.
struct Columns {
  static constexpr int64_t kRowStride = 1;
};
struct PanelRows {  // of states
  static constexpr int64_t kRowStride = kPanel;
};
struct MatrixRows {  // of matrices between the tokens of a chunk of up to 64
  static constexpr int64_t kRowStride = 64;
};

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
  RowPrefetcher* prefetcher = nullptr;  // gets a few lines per tile
};

// For the pairs of `Left` and `kStart` that are listed in matmul.cc.
template <class Left, Start kStart>
void product(const Product& p);

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
