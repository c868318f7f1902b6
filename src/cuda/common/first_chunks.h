// The number of chunks before each sequence, computed on the device.
#pragma once

#include <cstdint>

#include "cuda/common/sequences.h"
#include "cuda/common/workspace.h"
#include "fastweight/context.h"

namespace fastweight::cuda {

// Enqueues first_chunk[n] = chunks of the sequences before n, for n = 0 .. count.
void build_first_chunks(const Sequences& sequences, int64_t chunk_size, int64_t* first_chunk, const Context& context);

// The same of stretches of `tokens` tokens, of which a sequence counts its whole groups of `group` and nothing else.
void build_first_stretches(const Sequences& sequences, int64_t tokens, int64_t group, int64_t* first,
                           const Context& context);

// The chunks of a call, numbered on the device: for kernels that need no other scratch memory. Holds that memory until
// everything that reads it has been enqueued.
class NumberedChunks {
 public:
  NumberedChunks(const Sequences& sequences, int64_t chunk_size, const Context& context);

  const ChunkedSequences& chunked() const { return chunked_; }
  int64_t count() const { return max_chunks(chunked_.sequences, chunked_.chunk_size); }  // at most

 private:
  DeviceWorkspace workspace_;
  ChunkedSequences chunked_;
};

}  // namespace fastweight::cuda
