#include "core/workspace.h"

#include <sys/mman.h>

#include <cstdlib>
#include <string>

#include "fastweight/error.h"

namespace fastweight {
namespace {

// Large blocks ask for huge pages where the system has them: states are walked again and again.
void* heap_allocate(void*, size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr size_t kHugePage = size_t{1} << 21;
  if (bytes >= 2 * kHugePage) {
    const size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    void* block = std::aligned_alloc(kHugePage, rounded);
    if (block != nullptr) madvise(block, rounded, MADV_HUGEPAGE);
    return block;
  }
#endif
  return std::aligned_alloc(kWorkspaceAlignment, bytes);
}
void heap_release(void*, void* pointer, size_t) { std::free(pointer); }

}  // namespace

Workspace::Workspace(const Context& context, size_t bytes) : source_(context.workspace) {
  if (source_.allocate == nullptr) source_ = {heap_allocate, heap_release, nullptr};
  bytes_ = (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  if (bytes_ == 0) return;
  data_ = source_.allocate(source_.user, bytes_);
  if (data_ == nullptr) {
    throw Error(ErrorCode::kOutOfMemory, "workspace: expected " + std::to_string(bytes_) + " bytes, got none");
  }
}

Workspace::~Workspace() {
  if (data_ != nullptr && source_.release != nullptr) source_.release(source_.user, data_, bytes_);
}

}  // namespace fastweight
