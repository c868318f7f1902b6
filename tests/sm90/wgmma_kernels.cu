#include "tests/sm90/wgmma_kernels.h"

#include "cuda/common/launch.h"
#include "cuda/sm90/barriers.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace fastweight::cuda {
namespace {

constexpr int kThreads = 128, kM = 64, kSteps = kInner / 16;

template <class Tile>
__device__ void put(const Tile& tile, int row, int column, uint16_t element) {
  const uint32_t address = tile.address(row, column / 8, 0) + static_cast<uint32_t>(column % 8 * 2);
  auto* memory = &dynamic_shared<unsigned char>();
  *reinterpret_cast<uint16_t*>(memory + (address - shared_address(memory))) = element;
}

// matrix [rows x columns], or its transpose, to a tile.
template <class Tile>
__device__ void fill(const Tile& tile, const uint16_t* matrix, int rows, int columns, bool transposed) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * columns; i += kThreads) {
    const int row = i / columns, column = i % columns;
    put(tile, transposed ? column : row, transposed ? row : column, matrix[i]);
  }
}

// The fragment of rows [16 warp, +16) and columns [16 m, +16) of a dense matrix of kInner columns.
__device__ void load_fragment(const uint16_t* matrix, int m, uint32_t (&a)[4]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = 16 * m + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint16_t* pair = matrix + (row + i % 2 * 8) * kInner + column + i / 2 * 8;
    a[i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}

template <int kTiles>
__device__ void store_sums(const float (&c)[kTiles][4], float* out) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) out[(row + e / 2 * 8) * 8 * kTiles + 8 * n + lane % 4 * 2 + e % 2] = c[n][e];
  }
}

template <int kRows, int kColumns, Swizzle kSwizzle>
struct alignas(1024) TileMemory {
  using Tile = PanelTile<kRows, kColumns, kSwizzle>;
  unsigned char bytes[Tile::kBytes];
};

template <int kN, Swizzle kSwizzle, bool kBAlongColumns>
struct alignas(1024) Shared {
  static constexpr int kWide = kN < row_bytes(kSwizzle) / 2 ? row_bytes(kSwizzle) / 2 : kN;  // whole panels
  TileMemory<kM, kInner, kSwizzle> a;                                                        // or [kInner x kM]
  TileMemory<kBAlongColumns ? kInner : kN, kBAlongColumns ? kWide : kInner, kSwizzle> b;
};

template <DType kType, int kN, Swizzle kSwizzle, OperandPlace kA, bool kBAlongColumns>
__global__ void __launch_bounds__(kThreads, 1) product_kernel(const uint16_t* a, const uint16_t* b, float* out) {
  auto& s = aligned_shared<Shared<kN, kSwizzle, kBAlongColumns>>();
  const typename decltype(s.a)::Tile sA(&s.a);
  const typename decltype(s.b)::Tile sB(&s.b);
  fill(sA, a, kM, kInner, kA == OperandPlace::kAlongColumns);
  fill(sB, b, kInner, kN, !kBAlongColumns);
  fence_async_proxy();
  __syncthreads();
  float c[kN / 8][4];
  uint32_t rA[kSteps][4];
  if constexpr (kA == OperandPlace::kRegisters) {
#pragma unroll
    for (int m = 0; m < kSteps; ++m) load_fragment(a, m, rA[m]);
    wgmma_fence(c, rA);
  } else {
    wgmma_fence(c);
  }
#pragma unroll
  for (int m = 0; m < kSteps; ++m) {
    const auto with_b = [&](const auto& operand) {
      if constexpr (kA == OperandPlace::kRegisters) {
        wgmma<kType, kN>(c, rA[m], operand, m > 0);
      } else if constexpr (kA == OperandPlace::kAlongRows) {
        wgmma<kType, kN>(c, sA.along_rows(0, m), operand, m > 0);
      } else {
        wgmma<kType, kN>(c, sA.along_columns(0, m), operand, m > 0);
      }
    };
    if constexpr (kBAlongColumns) {
      with_b(sB.along_columns(0, m));
    } else {
      with_b(sB.along_rows(0, m));
    }
  }
  wgmma_commit();
  wgmma_wait<0>(c);
  store_sums(c, out);
}

__global__ void __launch_bounds__(kThreads, 1)
    chain_kernel(const uint16_t* a, const uint16_t* b, const uint16_t* d, float* out) {
  struct alignas(1024) Both {
    TileMemory<kInner, kM, Swizzle::k128> b, d;
  };
  auto& s = aligned_shared<Both>();
  const typename decltype(s.b)::Tile sB(&s.b), sD(&s.d);
  fill(sB, b, kInner, kM, false);
  fill(sD, d, kInner, kM, false);
  fence_async_proxy();
  __syncthreads();
  float x[8][4], y[8][4];
  uint32_t rA[kSteps][4], rX[kSteps][4];
#pragma unroll
  for (int m = 0; m < kSteps; ++m) load_fragment(a, m, rA[m]);
  wgmma_fence(x, rA);
#pragma unroll
  for (int m = 0; m < kSteps; ++m) wgmma<DType::kBF16, 64>(x, rA[m], sB.along_columns(0, m), m > 0);
  wgmma_commit();
  wgmma_wait<0>(x);
#pragma unroll
  for (int m = 0; m < kSteps; ++m) pack_a<DType::kBF16>(x[2 * m], x[2 * m + 1], rX[m]);
  wgmma_fence(y, rX);
#pragma unroll
  for (int m = 0; m < kSteps; ++m) wgmma<DType::kBF16, 64>(y, rX[m], sD.along_columns(0, m), m > 0);
  wgmma_commit();
  wgmma_wait<0>(y);
  store_sums(y, out);
}

__global__ void __launch_bounds__(kThreads, 1)
    halves_kernel(const uint16_t* a, const uint16_t* b, float* out, float* first) {
  struct alignas(1024) Memory {
    TileMemory<kInner, 128, Swizzle::k128> b;
  };
  auto& s = aligned_shared<Memory>();
  const typename decltype(s.b)::Tile sB(&s.b);
  fill(sB, b, kInner, 128, false);
  fence_async_proxy();
  __syncthreads();
  float left[8][4], right[8][4];
  uint32_t rA[kSteps][4];
#pragma unroll
  for (int m = 0; m < kSteps; ++m) load_fragment(a, m, rA[m]);
  wgmma_fence(left, rA);
#pragma unroll
  for (int m = 0; m < kSteps; ++m) wgmma<DType::kBF16, 64>(left, rA[m], sB.along_columns(0, m), m > 0);
  wgmma_commit();
  wgmma_fence(right);
#pragma unroll
  for (int m = 0; m < kSteps; ++m) wgmma<DType::kBF16, 64>(right, rA[m], sB.along_columns(64, m), m > 0);
  wgmma_commit();
  wgmma_wait<1>(left);
  store_sums(left, first);
  wgmma_wait<0>(right);
  float both[16][4];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      both[n][e] = left[n][e];
      both[8 + n][e] = right[n][e];
    }
  }
  store_sums(both, out);
}

// The instances: every way to place the operands with bf16 and 64 or 128 columns; one pattern with fp16, and with 32.
template <DType kType, int kN, Swizzle kSwizzle, OperandPlace kA, bool kBAlongColumns>
bool run(const ProductCase& which, const void* a, const void* b, float* c) {
  const ProductCase mine{kType, kN, kSwizzle, kA, kBAlongColumns};
  if (which.dtype != mine.dtype || which.n != mine.n || which.swizzle != mine.swizzle || which.a != mine.a ||
      which.b_along_columns != mine.b_along_columns) {
    return false;
  }
  launch<product_kernel<kType, kN, kSwizzle, kA, kBAlongColumns>>(
      "product", {}, {1, kThreads, sizeof(Shared<kN, kSwizzle, kBAlongColumns>)}, static_cast<const uint16_t*>(a),
      static_cast<const uint16_t*>(b), c);
  return true;
}

template <DType kType, int kN, Swizzle kSwizzle>
bool run_places(const ProductCase& which, const void* a, const void* b, float* c) {
  return run<kType, kN, kSwizzle, OperandPlace::kRegisters, false>(which, a, b, c) ||
         run<kType, kN, kSwizzle, OperandPlace::kRegisters, true>(which, a, b, c) ||
         run<kType, kN, kSwizzle, OperandPlace::kAlongRows, false>(which, a, b, c) ||
         run<kType, kN, kSwizzle, OperandPlace::kAlongRows, true>(which, a, b, c) ||
         run<kType, kN, kSwizzle, OperandPlace::kAlongColumns, false>(which, a, b, c) ||
         run<kType, kN, kSwizzle, OperandPlace::kAlongColumns, true>(which, a, b, c);
}

}  // namespace

bool multiply(const ProductCase& which, const void* a, const void* b, float* c) {
  constexpr DType kBF16 = DType::kBF16, kF16 = DType::kF16;
  return run_places<kBF16, 64, Swizzle::k128>(which, a, b, c) || run_places<kBF16, 64, Swizzle::k64>(which, a, b, c) ||
         run_places<kBF16, 64, Swizzle::kNone>(which, a, b, c) ||
         run_places<kBF16, 128, Swizzle::k128>(which, a, b, c) ||
         run_places<kBF16, 128, Swizzle::k64>(which, a, b, c) ||
         run_places<kBF16, 128, Swizzle::kNone>(which, a, b, c) ||
         run_places<kBF16, 32, Swizzle::k128>(which, a, b, c) || run_places<kF16, 64, Swizzle::k128>(which, a, b, c);
}

void multiply_twice(const void* a, const void* b, const void* d, float* c) {
  launch<chain_kernel>("chain", {}, {1, kThreads, 2 * sizeof(TileMemory<kInner, kM, Swizzle::k128>)},
                       static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b),
                       static_cast<const uint16_t*>(d), c);
}

void multiply_halves(const void* a, const void* b, float* c, float* first) {
  launch<halves_kernel>("halves", {}, {1, kThreads, sizeof(TileMemory<kInner, 128, Swizzle::k128>)},
                        static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b), c, first);
}

}  // namespace fastweight::cuda
