// Runs CUDA kernels, compiled as C++, on the CPU: block after block, the threads of a block as fibers of one thread.
//
// A fiber runs until it needs the others: at a barrier, or at an instruction of its whole warp (a shuffle, a product of
// the tensor cores) or warpgroup (wgmma). That instruction is executed once for the 32 or 128 threads when all of them
// have arrived. Threads that arrive at different instructions, or that have left while others wait, end the program with
// a message.
//
// What a kernel may not rely on differs from block to block: the order of its warps, and of lanes between two
// instructions of their warp. Shared memory starts as NaNs, and the page after it cannot be touched. Of a kernel that overlaps
// the first blocks run, until they wait, before the kernel before it has done more than let them start.
#pragma once

#include <driver_types.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#include "async.h"

namespace emulator {

inline constexpr int kLanes = 32;
inline constexpr int kWarpgroup = 128;  // threads

struct Grid {
  dim3 blocks, threads;
  size_t shared_bytes = 0;
  bool overlaps = false;  // launched so that it may start before the kernels before it have completed
};

// Calls body() for every thread of every block: until finish() returns, if the kernel overlaps or lets the next one start.
void run(cudaStream_t stream, const Grid& grid, std::function<void()> body);
void finish();

// The rest is for the running thread of a kernel
// ------------------------------------------------------------------------

// What the 32 lanes of a warp, or the 128 of a warpgroup, do together: lanes[i] is what lane i gave to `together`.
using WarpOperation = void (*)(void* const* lanes);

// Both return when operation(lanes) has run.
void together(const char* name, WarpOperation operation, void* mine);
void warpgroup_together(const char* name, WarpOperation operation, void* mine);

// The registers of a thread of the running thread's warpgroup: by one of its threads.
void set_registers(int count);

// The lane that an instruction elects: one in some blocks, another one in others.
int elected_lane();

// The block's barrier 0, for all threads that have not left; and one of the others, 1 to 15, for so many threads, some
// of which may only arrive at it and go on.
void block_barrier();
void named_barrier(int id, int threads);
void arrive_at_named_barrier(int id, int threads);

// Waits until the phase of this parity of a transaction barrier in shared memory has completed.
void wait_for_phase(uint32_t barrier, bool parity);

// Work on the way that somebody waits for at a transaction barrier. It is done as late as the block allows: when no
// thread can go on without it.
void begin_landing(std::function<void()> landing);

// Work of the running thread on its way, see async.h.
AsyncWork& async_work();

// Every thread of a grid that overlaps has to call this.
void wait_for_previous_kernels();
void let_next_kernel_start();
// For what a kernel before this one publishes and has not yet: it may be there when this returns.
void wait_for_flag();

// The block's dynamic shared memory, aligned to 128 bytes at its end.
unsigned char* shared_memory();

// As the instructions name it, in 32 bits.
uint32_t shared_address(const void* pointer);
void* shared_pointer(uint32_t address, size_t bytes);

// Copies of this thread that are on their way: they happen when they are waited for.
void begin_copy(void* to, const void* from, size_t bytes);
void commit_copies();
void wait_copies(int pending);

}  // namespace emulator

// CUDA's names of a thread's place, of the thread that is running.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
