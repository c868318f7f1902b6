// Products of a warpgroup on the tensor cores of Hopper: wgmma, asynchronous, 64 x kN sums in registers. For sm_90a
// alone. emulator/cuda/sm90/wgmma.cuh says the same in C++.
//
// A warpgroup is four warps, the first of which is a multiple of four in its block. All of its 128 threads call all of
// these functions, with the same operands. Warp w has rows [16 w, 16 w + 16) of the sums and of A, as C tiles and A
// fragments of mma.m16n8k16 (instructions.cuh): c[n] is the tile of columns [8 n, 8 n + 8).
//
// A group of products is
//
//     wgmma_fence(c, a)        what the threads wrote to registers and shared memory before can be read by the products
//     wgmma(c, ...)  ...       any number of them, also several into the same sums
//     wgmma_commit()
//     wgmma_wait<0>(c)         until so many of the last groups are on their way; the others have completed
//
// From its wgmma to its wait a product reads its operands in shared memory and in `a`, and owns its sums: nobody writes
// the former, nobody touches the latter, and the arrays of registers stay in scope. A product may follow another into
// the same sums without a wait between them. Products of different widths into the same registers make ptxas wait after
// every one of them.
//
// Operands in shared memory are read by the asynchronous proxy: who wrote them with ordinary stores calls
// fence_async_proxy() (barriers.cuh) after the stores and before the barrier that tells this warpgroup. What TMA wrote
// needs none.
#pragma once

#include <cstdint>

#include "cuda/common/instructions.cuh"
#include "cuda/sm90/panel_tile.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "for sm_90a alone: files that include this lie in src/cuda/sm90 or in a folder <path>_sm90"
#endif

namespace fastweight::cuda {

// The compiler moves no access to these registers across this place.
__device__ __forceinline__ void keep_in_place(float& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ __forceinline__ void keep_in_place(uint32_t& x) { asm volatile("" : "+r"(x)::"memory"); }
template <class T, int kCount>
__device__ __forceinline__ void keep_in_place(T (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) keep_in_place(registers[i]);
}

// `registers`: the sums and fragments of A that the following products use and that were written before.
template <class... Registers>
__device__ __forceinline__ void wgmma_fence(Registers&... registers) {
  (keep_in_place(registers), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// `registers`: the sums of the groups that have completed.
template <int kPending, class... Registers>
__device__ __forceinline__ void wgmma_wait(Registers&... registers) {
  static_assert(kPending >= 0 && kPending <= 7);
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  (keep_in_place(registers), ...);
}

// Assembly for kN columns: the sums are operands 0 to kN / 2 - 1, the inputs follow them.
#define FW_SUM(n) "+f"(c[kFirst + (n)][0]), "+f"(c[kFirst + (n)][1]), "+f"(c[kFirst + (n)][2]), "+f"(c[kFirst + (n)][3])
#define FW_SUMS_32(n) FW_SUM(n), FW_SUM((n) + 1), FW_SUM((n) + 2), FW_SUM((n) + 3)
#define FW_SUMS_64(n) FW_SUMS_32(n), FW_SUMS_32((n) + 4)
#define FW_SUMS_128(n) FW_SUMS_64(n), FW_SUMS_64((n) + 8)
#define FW_NAMES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FW_NAMES_64 \
  FW_NAMES_32       \
  ", "              \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FW_NAMES_128                                                                                               \
  FW_NAMES_64                                                                                                      \
  ", "                                                                                                             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// A in registers: four registers, the descriptor of B, whether to accumulate, whether B is along columns.
#define FW_REGISTERS_32 "{%16, %17, %18, %19}, %20, p, 1, 1, %22"
#define FW_REGISTERS_IF_32 "%21"
#define FW_REGISTERS_64 "{%32, %33, %34, %35}, %36, p, 1, 1, %38"
#define FW_REGISTERS_IF_64 "%37"
#define FW_REGISTERS_128 "{%64, %65, %66, %67}, %68, p, 1, 1, %70"
#define FW_REGISTERS_IF_128 "%69"
// A in shared memory: the descriptors of A and B, whether to accumulate, whether A and B are along columns.
#define FW_SHARED_32 "%16, %17, p, 1, 1, %19, %20"
#define FW_SHARED_IF_32 "%18"
#define FW_SHARED_64 "%32, %33, p, 1, 1, %35, %36"
#define FW_SHARED_IF_64 "%34"
#define FW_SHARED_128 "%64, %65, p, 1, 1, %67, %68"
#define FW_SHARED_IF_128 "%66"
#define FW_WGMMA(columns, type, A, ...)                                                                      \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " A##_IF_##columns                                      \
               ", 0;\n\t"                                                                                    \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" FW_NAMES_##columns \
               "}, " A##_##columns ";\n\t}"                                                                  \
               : FW_SUMS_##columns(0)                                                                        \
               : __VA_ARGS__)
#define FW_FOR_TYPES(columns, A, ...)          \
  if constexpr (kType == DType::kBF16) {       \
    FW_WGMMA(columns, "bf16", A, __VA_ARGS__); \
  } else {                                     \
    FW_WGMMA(columns, "f16", A, __VA_ARGS__);  \
  }
#define FW_FOR_WIDTHS(A, ...)         \
  if constexpr (kN == 32) {           \
    FW_FOR_TYPES(32, A, __VA_ARGS__)  \
  } else if constexpr (kN == 64) {    \
    FW_FOR_TYPES(64, A, __VA_ARGS__)  \
  } else {                            \
    FW_FOR_TYPES(128, A, __VA_ARGS__) \
  }

// c[kFirst ..] = a b, or += where `accumulate`: A from registers, [64 x 16], and B [16 x kN] from shared memory. The sums
// are columns of a wider array of C tiles, or all of it.
template <DType kType, int kN, int kFirst = 0, int kTiles, bool kAlongColumns>
__device__ __forceinline__ void wgmma(float (&c)[kTiles][4], const uint32_t (&a)[4],
                                      const WgmmaOperand<kAlongColumns>& b, bool accumulate = true) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  static_assert(kN == 32 || kN == 64 || kN == 128);
  static_assert(8 * kFirst + kN <= 8 * kTiles);
  FW_FOR_WIDTHS(FW_REGISTERS, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor),
                "r"(static_cast<int>(accumulate)), "n"(kAlongColumns))
}

// The same with A from shared memory.
template <DType kType, int kN, int kFirst = 0, int kTiles, bool kAAlongColumns, bool kBAlongColumns>
__device__ __forceinline__ void wgmma(float (&c)[kTiles][4], const WgmmaOperand<kAAlongColumns>& a,
                                      const WgmmaOperand<kBAlongColumns>& b, bool accumulate = true) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  static_assert(kN == 32 || kN == 64 || kN == 128);
  static_assert(8 * kFirst + kN <= 8 * kTiles);
  FW_FOR_WIDTHS(FW_SHARED, "l"(a.descriptor), "l"(b.descriptor), "r"(static_cast<int>(accumulate)), "n"(kAAlongColumns),
                "n"(kBAlongColumns))
}

#undef FW_SUM
#undef FW_WGMMA
#undef FW_FOR_TYPES
#undef FW_FOR_WIDTHS
#undef FW_SUMS_32
#undef FW_NAMES_32
#undef FW_REGISTERS_32
#undef FW_REGISTERS_IF_32
#undef FW_SHARED_32
#undef FW_SHARED_IF_32
#undef FW_SUMS_64
#undef FW_NAMES_64
#undef FW_REGISTERS_64
#undef FW_REGISTERS_IF_64
#undef FW_SHARED_64
#undef FW_SHARED_IF_64
#undef FW_SUMS_128
#undef FW_NAMES_128
#undef FW_REGISTERS_128
#undef FW_REGISTERS_IF_128
#undef FW_SHARED_128
#undef FW_SHARED_IF_128

}  // namespace fastweight::cuda
