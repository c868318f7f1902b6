// The instructions that C++ has no word for: thin names over what every architecture from sm_80 on has. Those of Hopper
// alone are in cuda/sm90; there is no other inline assembly. emulator/cuda/common/instructions.cuh says the same in C++.
//
// Fragments of mma.m16n8k16, with g = lane / 4 and t = lane % 4 (pairs are two neighbouring columns in one register):
//
//     A [16 x 16]   a0: (g, 2t)   a1: (g + 8, 2t)   a2: (g, 2t + 8)   a3: (g + 8, 2t + 8)       pairs
//     B [16 x 8]    b0: (2t, g)   b1: (2t + 8, g)                                               pairs along k
//     C [16 x 8]    c0, c1: (g, 2t), (g, 2t + 1)     c2, c3: (g + 8, 2t), (g + 8, 2t + 1)
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fastweight/tensor.h"

namespace fastweight::cuda {

// A block's dynamic shared memory.
template <class T>
__device__ __forceinline__ T& dynamic_shared() {
  extern __shared__ __align__(128) unsigned char memory[];
  return *reinterpret_cast<T*>(memory);
}

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

// The ways back of ldmatrix and ldmatrix_transposed.
__device__ __forceinline__ void stmatrix(uint32_t address, const uint32_t (&m)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int lane = threadIdx.x % 32;
    const uint32_t row = __shfl_sync(0xffffffffu, address, 8 * i + lane / 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + 4 * (lane % 4)), "r"(m[i]) : "memory");
  }
#endif
}
__device__ __forceinline__ void stmatrix_transposed(uint32_t address, const uint32_t (&m)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m[0]),
               "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
#else
  stmatrix(address, {transpose_8x8(m[0]), transpose_8x8(m[1]), transpose_8x8(m[2]), transpose_8x8(m[3])});
#endif
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

// c += a b of tf32 operands, m16n8k8: registers with fp32 numbers of which the unit reads the upper 19 bits (sign,
// eight of exponent, ten of mantissa) and ignores the rest.
//
//     A [16 x 8]    a0: (g, t)    a1: (g + 8, t)    a2: (g, t + 4)    a3: (g + 8, t + 4)
//     B [8 x 8]     b0: (t, g)    b1: (t + 4, g)
//     C [16 x 8]    as above
__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two fp32 values rounded to a pair.
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

// Products of two pairs of bf16, rounded to nearest; those of a power of two are exact in the range of bf16.
__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t pair;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(0x80008000u));  // -0
#endif
  return pair;
}

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

// The same pointer to global memory, without its history: the compiler computes it once, and not anew for every access
// from what it was made of.
template <class T>
__device__ __forceinline__ T* opaque(T* pointer) {
  asm volatile("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// The same number, without its history: what is computed from it is computed where it is needed, not before a loop and
// kept.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The same of a number of a lane or thread, of which it stays known that it is at least 0 and below kBound: divisions by
// powers of two are then single instructions.
template <int kBound>
__device__ __forceinline__ int opaque_below(int value) {
  value = opaque(value);
  __builtin_assume(value >= 0 && value < kBound);
  return value;
}

// For kernels launched with LaunchShape::overlaps, from sm_90 on; without effect elsewhere. Such a kernel may start
// while the kernels before it on the stream still run. It returns when they have completed and what they wrote can be
// seen. Every thread calls it, before it touches global memory for the first time: then who waits for this kernel has
// waited for those before it as well.
__device__ __forceinline__ void wait_for_previous_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel after this one, if it overlaps, may start as soon as every block of this one has called this or left. What
// this kernel writes later is safe: the next one sees nothing before its wait_for_previous_kernels.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// A kernel that overlaps may take results of the one before it as they come, if that one lets it start after its own
// wait_for_previous_kernels: what came before both can be seen then. At its end it waits, too: who waits for it has waited
// for both. One thread of a block publishes results by a flag, after a barrier that all who wrote them have passed; who
// finds it set by `is_published`, and all that pass a barrier with that thread after it, read what was written before.
__device__ __forceinline__ void publish(uint32_t* flag) {
  asm volatile("fence.acq_rel.gpu;\n\tst.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}
// The same after fence_all_blocks(), which may serve several flags.
__device__ __forceinline__ void set_published(uint32_t* flag) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}
__device__ __forceinline__ bool is_published(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value != 0;
}

// What this thread wrote to global memory before is seen by other blocks before what it writes later.
__device__ __forceinline__ void fence_all_blocks() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// The next number from a counter that all blocks share.
__device__ __forceinline__ uint32_t claim(uint32_t* counter) { return atomicAdd(counter, 1u); }

// Asks the L2 cache for the line of an address of global memory. Has no effect that a program could see.
__device__ __forceinline__ void prefetch(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// A barrier like __syncthreads for a part of the block: `threads` threads in whole warps, all of which name kId, 1 to
// 15. Those that arrive do not wait for the others. Those that wait do so at one place of the program
// (compute-sanitizer asks for it), so two kinds of warps that wait for each other need two barriers.
template <int kId>
__device__ __forceinline__ void named_barrier(int threads) {
  static_assert(kId >= 1 && kId <= 15);
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "r"(threads) : "memory");
}
template <int kId>
__device__ __forceinline__ void arrive_at_named_barrier(int threads) {
  static_assert(kId >= 1 && kId <= 15);
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "r"(threads) : "memory");
}

// The larger of two numbers; NaN if either is. fmaxf would take the other one.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// 2^x by the special function unit, relative error below 2^-22; 0 far below.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x) by the special function unit: absolute error below 2^-21 for x in [1/2, 2], relative error below 2^-21
// elsewhere.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / sqrt(x) by the special function unit, relative error below 2^-22; infinity for x below 2^-126.
__device__ __forceinline__ float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x by the special function unit, relative error below 2^-23; 0 for results below 2^-126, infinity for such x.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace fastweight::cuda
