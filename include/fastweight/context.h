// Where and how a call runs. A context holds no resources; it is cheap to copy.
#pragma once

#include <cstddef>
#include <string>

#include "fastweight/tensor.h"

namespace fastweight {

// Where scratch memory comes from. `allocate` returns at least `bytes` bytes aligned to 64 on the context's device, or null.
// A call takes what it needs before it starts, a map on CUDA before each of its matrices, and gives all of it back before it
// returns (on CUDA: in stream order). The default is the host's heap, on CUDA the device's memory pool, whose release
// threshold (0 unless the program sets it) decides how much of it stays in the process while nothing runs.
struct WorkspaceSource {
  void* (*allocate)(void* user, size_t bytes) = nullptr;
  void (*release)(void* user, void* pointer, size_t bytes) = nullptr;
  void* user = nullptr;
};

// On CUDA a call enqueues on `stream` and returns without waiting. Tensors lie in memory of `device`; the device that
// is current for the calling thread does not matter and is not changed.
struct Context {
  Device device{};
  void* stream = nullptr;  // CUDA: the cudaStream_t to run on
  int num_threads = 0;     // CPU: 0 takes every core of the process
  WorkspaceSource workspace{};
  // Empty: choose. An implementation by its name: run it or fail. A form, such as "chunk" where a device has
  // chunk_16bit and chunk_fp32: the first implementation of that form that takes the problem, or fail with the reason
  // of each.
  std::string implementation{};
  bool verbose = false;                                 // one line per call: what ran, why others did not
  void (*log)(void* user, const char* line) = nullptr;  // receives the verbose lines; null: stderr
  void* log_user = nullptr;
  // CUDA: the caller vouches that every tensor lies where its view says. Otherwise the driver is asked about each of
  // them, which takes a few tenths of a microsecond; with a wrong promise a kernel runs into an illegal access.
  bool trust_pointers = false;
  // CUDA: scratch memory that grows with the length of the input is kept to about so many bytes where a kernel can walk
  // over the input in pieces, which changes no bit. 0: as much as keeps it fast, for a forward below 512 MB.
  size_t scratch_bytes = 0;
  // CUDA: how many chunks the segments have into which the delta rule's chunk_sm90 cuts long sequences of few heads, all of
  // which it then works on at once. Results round differently, and the promise about cuts is one about multiples of four
  // segments. 0: a choice by heads and device, never by the batch. -1: nothing is cut.
  int segment_chunks = 0;
};

}  // namespace fastweight
