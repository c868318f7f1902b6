#include "capi/convert.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <mutex>
#include <new>
#include <set>

#include "fastweight/error.h"

namespace fastweight::capi {
namespace {

// Fixed, so that reporting that memory ran out needs none. Longer texts are cut.
thread_local char last_error[2048] = "";

}  // namespace

TensorView to_view(const fw_tensor& tensor) {
  static_assert(FW_MAX_RANK == kMaxRank);
  TensorView view;
  view.data = tensor.data;
  view.dtype = static_cast<DType>(tensor.dtype);
  view.device = {static_cast<DeviceType>(tensor.device_type), tensor.device_index};
  view.rank = tensor.rank;
  std::copy_n(tensor.shape, kMaxRank, view.shape.begin());
  std::copy_n(tensor.strides, kMaxRank, view.strides.begin());
  return view;
}

template <>
inline constexpr size_t kFirstSize<fw_context> = offsetof(fw_context, scratch_bytes);

Context to_context(const fw_context* pointer) {
  const fw_context from = required<Context>("context", pointer);
  Context context;
  context.device = {static_cast<DeviceType>(from.device_type), from.device_index};
  context.stream = from.stream;
  context.num_threads = from.num_threads;
  context.workspace = {from.allocate, from.release, from.allocate_user};
  if (from.implementation != nullptr) context.implementation = from.implementation;
  context.verbose = from.verbose != 0;
  context.log = from.log;
  context.log_user = from.log_user;
  context.trust_pointers = from.trust_pointers != 0;
  context.scratch_bytes = from.scratch_bytes;
  context.segment_chunks = from.segment_chunks;
  return context;
}

const char* permanent_name(const std::string& name) {
  static std::mutex& mutex = *new std::mutex;
  static std::set<std::string>& names = *new std::set<std::string>;
  const std::lock_guard lock(mutex);
  return names.insert(name).first->c_str();
}

fw_status fail(fw_status status, const char* text) noexcept {
  std::snprintf(last_error, sizeof(last_error), "%s", text);
  return status;
}

fw_status fail_with_current_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return fail(static_cast<fw_status>(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return fail(FW_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::exception& error) {
    return fail(FW_INTERNAL_ERROR, error.what());
  } catch (...) {
    return fail(FW_INTERNAL_ERROR, "unknown exception");
  }
}

}  // namespace fastweight::capi

extern "C" {

const char* fw_last_error(void) { return fastweight::capi::last_error; }

}  // extern "C"
