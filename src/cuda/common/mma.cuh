// Tensor-core products of 16-bit operands with fp32 accumulators, and the shared-memory tiles that feed them: thin
// names over instructions that every architecture from sm_80 on has.
//
// Fragments of mma.m16n8k16, with g = lane / 4 and t = lane % 4 (pairs are two neighbouring columns in one register):
//
//     A [16 x 16]   a0: (g, 2t)   a1: (g + 8, 2t)   a2: (g, 2t + 8)   a3: (g + 8, 2t + 8)       pairs
//     B [16 x 8]    b0: (2t, g)   b1: (2t + 8, g)                                               pairs along k
//     C [16 x 8]    c0, c1: (g, 2t), (g, 2t + 1)     c2, c3: (g + 8, 2t), (g + 8, 2t + 1)
//
// Two C tiles side by side, rounded, are an A fragment: results chain into the next product without leaving registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "fastweight/tensor.h"

namespace fastweight::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Register m holds of
// matrix m the pair at row g, columns 2t and 2t + 1.
__device__ __forceinline__ void ldmatrix(uint32_t address, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// The same of the transposed matrices: the pair at rows 2t and 2t + 1 of column g.
__device__ __forceinline__ void ldmatrix_transposed(uint32_t address, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// An 8 x 8 matrix in the layout above, transposed across the warp.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// c += a b
template <DType kType>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  if constexpr (kType == DType::kBF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Two fp32 values to a pair and back.
template <DType kType>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t pair;
  if constexpr (kType == DType::kBF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

template <DType kType>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (kType == DType::kBF16) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

// The A fragment of columns 16 m .. 16 m + 15 of a row of C tiles.
template <DType kType>
__device__ __forceinline__ void pack_a(const float (&left)[4], const float (&right)[4], uint32_t (&a)[4]) {
  a[0] = pack<kType>(left[0], left[1]);
  a[1] = pack<kType>(left[2], left[3]);
  a[2] = pack<kType>(right[0], right[1]);
  a[3] = pack<kType>(right[2], right[3]);
}

// A tile of 16-bit elements in shared memory, rows of kColumns (a multiple of 64). Rows are cut into segments of 16
// bytes, and segment s of row r lies at s ^ (r % 8): the eight rows of a matrix are in different banks.
template <int kColumns>
struct SharedTile {
  static_assert(kColumns % 64 == 0);
  static constexpr int kSegments = kColumns / 8;

  uint16_t* data;

  __device__ __forceinline__ static int offset(int row, int segment) {
    return row * kColumns + (segment ^ (row & 7)) * 8;
  }
  __device__ __forceinline__ uint16_t* segment(int row, int s) const { return data + offset(row, s); }
  __device__ __forceinline__ uint16_t& at(int row, int column) const {
    return data[offset(row, column / 8) + column % 8];
  }
  // 32-bit arithmetic from one base: rows that differ by a multiple of 8 are constant displacements.
  __device__ __forceinline__ uint32_t address(int row, int s) const {
    return shared_address(data) + 2 * static_cast<uint32_t>(offset(row, s));
  }

  // A fragment of rows [row, row + 16) and columns [16 m, 16 m + 16).
  __device__ __forceinline__ void load_a(int row, int m, int lane, uint32_t (&a)[4]) const {
    ldmatrix(address(row + lane % 16, 2 * m + lane / 16), a);
  }
  // B fragments of the transposed tile: inner index along the columns [16 m, 16 m + 16), n along the rows [row, row +
  // 16). Registers 0, 1: the first eight rows; 2, 3: the others.
  __device__ __forceinline__ void load_b(int row, int m, int lane, uint32_t (&b)[4]) const {
    ldmatrix(address(row + lane / 16 * 8 + lane % 8, 2 * m + lane / 8 % 2), b);
  }
  // B fragments of the tile itself: inner index along the rows [row, row + 16), n along columns [16 m, 16 m + 16).
  __device__ __forceinline__ void load_b_transposed(int row, int m, int lane, uint32_t (&b)[4]) const {
    ldmatrix_transposed(address(row + lane % 16, 2 * m + lane / 16), b);
  }
  // C layout of the transposed tile, as pairs along the rows [row, row + 16): registers 0 and 1 hold columns g and g +
  // 8 of [16 m, 16 m + 16) for the first eight rows, 2 and 3 for the others.
  __device__ __forceinline__ void load_c_transposed(int row, int m, int lane, uint32_t (&c)[4]) const {
    ldmatrix_transposed(address(row + lane / 16 * 8 + lane % 8, 2 * m + lane / 8 % 2), c);
  }
};

// 16 bytes from global to shared memory without passing through registers; zeros where `valid` is false.
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups are on their way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 2^x by the special function unit, relative error below 2^-22; 0 far below.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace fastweight::cuda
