// Scratch memory from the context's source, as one block that is cut into 64-byte aligned arrays.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fastweight/context.h"

namespace fastweight {

inline constexpr size_t kWorkspaceAlignment = 64;

// A layout is written once, as a function that calls `take` for each array. Run on a default-constructed layout it
// measures (the pointers are null); run on one with a base it hands out the arrays.
class ScratchLayout {
 public:
  ScratchLayout() = default;
  explicit ScratchLayout(void* base) : base_(static_cast<std::byte*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    T* array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    used_ += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return array;
  }
  size_t bytes() const { return used_; }

 private:
  std::byte* base_ = nullptr;
  size_t used_ = 0;
};

// Owns one block for the length of a call. Throws Error(kOutOfMemory) when the source has nothing to give.
class Workspace {
 public:
  Workspace(const Context& context, size_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const { return data_; }

 private:
  WorkspaceSource source_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace fastweight
