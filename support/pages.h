// Memory for large buffers of tests, benches and the command-line tool.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>

namespace fastweight::support {

// Memory on a cache line, to be given back to std::free; null when there is none. Large blocks ask for huge pages, as
// NumPy's do: a head's rows lie one to a small page, and walking the page tables for each would be timed with the
// kernel.
inline void* allocate_pages(size_t bytes) {
  constexpr size_t kCacheLine = 64, kHugePage = size_t{1} << 21;
  const size_t unit = bytes >= 2 * kHugePage ? kHugePage : kCacheLine;
  const size_t rounded = (bytes + unit - 1) / unit * unit;
  void* block = std::aligned_alloc(unit, rounded);
  if (block != nullptr && unit == kHugePage) madvise(block, rounded, MADV_HUGEPAGE);
  return block;
}

}  // namespace fastweight::support
