// Memory for large buffers of tests, benches and the command-line tool.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

namespace fastweight::support {

// Memory on a cache line, to be given back to std::free; null when there is none. Large blocks ask for huge pages, as
// NumPy's do: a head's rows lie one to a small page, and walking the page tables for each would be timed with the
// kernel.
void* allocate_pages(size_t bytes);

// Bytes of such memory.
class Pages {
 public:
  Pages() = default;
  explicit Pages(size_t bytes, std::byte value = std::byte{0});  // throws std::bad_alloc
  Pages(const Pages& other);
  Pages(Pages&&) noexcept = default;
  Pages& operator=(const Pages& other);
  Pages& operator=(Pages&&) noexcept = default;

  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
};

}  // namespace fastweight::support
