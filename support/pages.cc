#include "support/pages.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <utility>

namespace fastweight::support {
namespace {

std::byte* allocate_or_throw(size_t bytes) {
  void* const block = allocate_pages(bytes);
  if (block == nullptr) throw std::bad_alloc();
  return static_cast<std::byte*>(block);
}

}  // namespace

void* allocate_pages(size_t bytes) {
  constexpr size_t kCacheLine = 64, kHugePage = size_t{1} << 21;
  const size_t unit = bytes >= 2 * kHugePage ? kHugePage : kCacheLine;
  const size_t rounded = (bytes + unit - 1) / unit * unit;
  void* block = std::aligned_alloc(unit, rounded);
  if (block != nullptr && unit == kHugePage) madvise(block, rounded, MADV_HUGEPAGE);
  return block;
}

Pages::Pages(size_t bytes, std::byte value) : size_(bytes) {
  if (bytes == 0) return;
  data_.reset(allocate_or_throw(bytes));
  std::memset(data(), std::to_integer<int>(value), bytes);
}

Pages::Pages(const Pages& other) : size_(other.size_) {
  if (size_ == 0) return;
  data_.reset(allocate_or_throw(size_));
  std::memcpy(data(), other.data(), size_);
}

Pages& Pages::operator=(const Pages& other) {
  if (this != &other) *this = Pages(other);
  return *this;
}

}  // namespace fastweight::support
