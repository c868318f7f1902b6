#include "core/check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "fastweight/error.h"

namespace fastweight::check {
namespace {

std::string list_text(const std::array<int64_t, kMaxRank>& values, int32_t count) {
  std::string text = "[";
  for (int32_t i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(values[static_cast<size_t>(i)]);
  }
  return text + "]";
}

bool is_dtype(DType dtype) { return dtype >= DType::kF32 && dtype <= DType::kI64; }
bool is_device_type(DeviceType type) { return type == DeviceType::kCpu || type == DeviceType::kCuda; }

// Bytes from the first to the end of the last element. The view is well formed and has elements.
uint64_t byte_extent(const TensorView& view) {
  int64_t last = 0;
  for (size_t axis = 0; axis < static_cast<size_t>(view.rank); ++axis) {
    last += (view.shape[axis] - 1) * view.strides[axis];
  }
  return static_cast<uint64_t>((last + 1) * element_size(view.dtype));
}

uint64_t address(const TensorView& view) { return reinterpret_cast<uintptr_t>(view.data); }

// Taken modulo `period`, every byte of the view lies in the interval of the returned length that begins at the
// pointer: axes whose stride is a multiple of the period land on the same place again.
uint64_t extent_modulo(const TensorView& view, uint64_t period) {
  const uint64_t size = static_cast<uint64_t>(element_size(view.dtype));
  uint64_t extent = size;
  for (size_t axis = 0; axis < static_cast<size_t>(view.rank); ++axis) {
    if (view.shape[axis] == 1) continue;
    const uint64_t stride = static_cast<uint64_t>(view.strides[axis]) * size;
    if (stride % period != 0) extent += static_cast<uint64_t>(view.shape[axis] - 1) * stride;
  }
  return extent;
}

// Whether the columns of the two views in rows of `period` bytes do not meet, as for two slices of a packed buffer.
bool are_apart_modulo(const TensorView& a, const TensorView& b, uint64_t period) {
  const uint64_t from_a_to_b = (address(b) % period + period - address(a) % period) % period;
  return extent_modulo(a, period) <= from_a_to_b && extent_modulo(b, period) <= period - from_a_to_b;
}

}  // namespace

void invalid(const char* name, const std::string& expected, const std::string& got) {
  throw Error(ErrorCode::kInvalidArgument, std::string(name) + ": expected " + expected + ", got " + got);
}

Shape::Shape(std::initializer_list<int64_t> list) : rank(static_cast<int32_t>(list.size())) {
  std::copy(list.begin(), list.end(), extents.begin());
}

std::string text(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "fp32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "fp16";
    case DType::kF64:
      return "fp64";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
  }
  return std::to_string(static_cast<int32_t>(dtype));
}

std::string text(Device device) {
  std::string type = std::to_string(static_cast<int32_t>(device.type));
  if (device.type == DeviceType::kCpu) type = "cpu";
  if (device.type == DeviceType::kCuda) type = "cuda";
  return type + ":" + std::to_string(device.index);
}

std::string text(double number) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%g", number);
  return buffer;
}

std::string shape_text(const TensorView& view) { return list_text(view.shape, view.rank); }
std::string strides_text(const TensorView& view) { return list_text(view.strides, view.rank); }

std::string sizes_text(std::initializer_list<std::pair<const char*, int64_t>> sizes) {
  std::string text;
  for (const auto& [name, value] : sizes) {
    text += (text.empty() ? "" : " ") + std::string(name) + "=" + std::to_string(value);
  }
  return text;
}

bool is_floating(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF64;
}

bool is_empty(const TensorView& view) {
  const auto end = view.shape.begin() + view.rank;
  return !view.present() || std::find(view.shape.begin(), end, 0) != end;
}

bool is_dense(const TensorView& view) {
  int64_t stride = 1;
  for (int32_t axis = view.rank - 1; axis >= 0; --axis) {
    const size_t i = static_cast<size_t>(axis);
    if (view.shape[i] != 1 && view.strides[i] != stride) return false;
    stride *= view.shape[i];
  }
  return true;
}

int64_t integer_at(const TensorView& view, int64_t index) {
  const int64_t offset = index * view.strides[0];
  if (view.dtype == DType::kI32) return static_cast<const int32_t*>(view.data)[offset];
  return static_cast<const int64_t*>(view.data)[offset];
}

void present(const char* name, const TensorView& view) {
  if (!view.present()) invalid(name, "a tensor", "none");
}

void absent(const char* name, const TensorView& view, const char* why) {
  if (view.present()) invalid(name, std::string("none ") + why, "a tensor of shape " + shape_text(view));
}

void well_formed(const char* name, const TensorView& view) {
  if (view.rank < 0 || view.rank > kMaxRank) {
    invalid(name, "a rank of 0 to " + std::to_string(kMaxRank), std::to_string(view.rank));
  }
  if (!view.present()) return;
  if (view.rank == 0) invalid(name, "a rank of 1 to " + std::to_string(kMaxRank), "0");
  if (!is_dtype(view.dtype)) invalid(name, "a type of the DType enumeration", text(view.dtype));
  if (!is_device_type(view.device.type)) invalid(name, "a device of type cpu or cuda", text(view.device));

  const int64_t size = element_size(view.dtype);
  int64_t count = 1;
  int64_t last = 0;
  bool overflow = false;
  for (size_t axis = 0; axis < static_cast<size_t>(view.rank); ++axis) {
    if (view.shape[axis] < 0) invalid(name, "extents of 0 or more", shape_text(view));
    if (view.strides[axis] < 0) invalid(name, "strides of 0 or more", strides_text(view));
    const int64_t extent = std::max<int64_t>(view.shape[axis], 1);
    int64_t step = 0;
    overflow |= __builtin_mul_overflow(count, extent, &count);
    overflow |= __builtin_mul_overflow(extent - 1, view.strides[axis], &step);
    overflow |= __builtin_add_overflow(last, step, &last);
  }
  int64_t bytes = 0;
  overflow |= __builtin_mul_overflow(count, size, &bytes);
  overflow |= __builtin_add_overflow(last, 1, &last);
  overflow |= __builtin_mul_overflow(last, size, &bytes);
  uint64_t end = 0;
  overflow |= __builtin_add_overflow(address(view), static_cast<uint64_t>(bytes), &end);
  if (overflow) {
    invalid(name, "a tensor that fits the address space",
            "shape " + shape_text(view) + " with strides " + strides_text(view));
  }

  if (is_empty(view)) return;
  if (view.data == nullptr) invalid(name, "a pointer to " + shape_text(view) + " elements", "null");
  if (address(view) % static_cast<uint64_t>(size) != 0) {
    invalid(name, "a pointer aligned to " + std::to_string(size) + " bytes",
            "one that is off by " + std::to_string(address(view) % static_cast<uint64_t>(size)));
  }
}

void on_device(const char* name, const TensorView& view, Device device) {
  if (view.present() && view.device != device) invalid(name, "memory on " + text(device), text(view.device));
}

void rank(const char* name, const TensorView& view, int32_t expected) {
  if (view.rank != expected) invalid(name, "rank " + std::to_string(expected), "shape " + shape_text(view));
}

void shape(const char* name, const TensorView& view, const Shape& expected) {
  const auto end = view.shape.begin() + view.rank;
  if (view.rank == expected.rank && std::equal(view.shape.begin(), end, expected.extents.begin())) return;
  invalid(name, "shape " + list_text(expected.extents, expected.rank), shape_text(view));
}

void dtype(const char* name, const TensorView& view, std::initializer_list<DType> expected) {
  if (std::find(expected.begin(), expected.end(), view.dtype) != expected.end()) return;
  std::string names;
  for (auto it = expected.begin(); it != expected.end(); ++it) {
    if (std::find(expected.begin(), it, *it) != it) continue;
    names += (names.empty() ? "" : " or ") + text(*it);
  }
  invalid(name, "type " + names, text(view.dtype));
}

void floating(const char* name, const TensorView& view) {
  if (!is_floating(view.dtype)) invalid(name, "a floating type", text(view.dtype));
}

void in_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  invalid(name, "a value from " + std::to_string(low) + " to " + std::to_string(high), std::to_string(value));
}

void chunk_size(int64_t value) {
  if (value != 16 && value != 32 && value != 64) invalid("chunk_size", "16, 32 or 64", std::to_string(value));
}

void eps(double value) {
  if (std::isfinite(value) && value >= double{std::numeric_limits<float>::min()}) return;
  invalid("eps", "a finite number above 0 and normal in fp32 (at least 2^-126)", text(value));
}

void eps_or_zero(double value) {
  if (value != 0) eps(value);
}

void parameter(const char* name, const TensorView& view, int64_t count) {
  floating(name, view);
  if (view.rank == 1 && view.shape[0] == count) return;
  int64_t elements = 1;
  for (size_t axis = 0; axis < static_cast<size_t>(view.rank); ++axis) elements *= view.shape[axis];
  if (elements != count) shape(name, view, {count});
  if (!is_dense(view)) invalid(name, "a dense tensor", "strides " + strides_text(view));
}

void integer_vector(const char* name, const TensorView& view) {
  rank(name, view, 1);
  dtype(name, view, {DType::kI32, DType::kI64});
  if (!has_distinct_elements(view)) invalid(name, "a stride of 1 or more", strides_text(view));
}

void context(const Context& context) {
  if (!is_device_type(context.device.type)) invalid("device", "a device of type cpu or cuda", text(context.device));
  if (context.device.index < 0) invalid("device", "an index of 0 or more", text(context.device));
  if (context.device.type == DeviceType::kCpu && context.device.index != 0) {
    invalid("device", "cpu:0", text(context.device));
  }
  if (context.num_threads < 0) invalid("num_threads", "0 or more", std::to_string(context.num_threads));
  const WorkspaceSource& workspace = context.workspace;
  if ((workspace.allocate == nullptr) != (workspace.release == nullptr)) {
    invalid("workspace", "both allocate and release, or neither",
            workspace.release == nullptr ? "allocate alone" : "release alone");
  }
}

void cu_seqlens(const TensorView& view, int64_t tokens) {
  integer_vector("cu_seqlens", view);
  if (view.shape[0] < 1) invalid("cu_seqlens", "at least one element", "shape [0]");
  if (view.device.type != DeviceType::kCpu) return;
  const auto at = [&](int64_t n) { return integer_at(view, n); };
  const int64_t last = view.shape[0] - 1;
  if (at(0) != 0) invalid("cu_seqlens", "0 at position 0", std::to_string(at(0)));
  for (int64_t n = 0; n < last; ++n) {
    if (at(n + 1) >= at(n)) continue;
    invalid("cu_seqlens", "at least " + std::to_string(at(n)) + " at position " + std::to_string(n + 1),
            std::to_string(at(n + 1)));
  }
  if (at(last) != tokens) {
    invalid("cu_seqlens", "the token count " + std::to_string(tokens) + " at position " + std::to_string(last),
            std::to_string(at(last)));
  }
}

int64_t num_sequences(const TensorView& cu_seqlens, int64_t batch, int64_t tokens) {
  if (!cu_seqlens.present()) return batch;
  if (batch != 1) invalid("cu_seqlens", "a batch of 1", "a batch of " + std::to_string(batch));
  check::cu_seqlens(cu_seqlens, tokens);
  return cu_seqlens.shape[0] - 1;
}

void state_indices(const TensorView& view, int64_t num_sequences, int64_t slots) {
  integer_vector("state_indices", view);
  shape("state_indices", view, {num_sequences});
  if (view.device.type != DeviceType::kCpu) return;
  std::vector<int64_t> used;
  used.reserve(static_cast<size_t>(num_sequences));
  for (int64_t n = 0; n < num_sequences; ++n) {
    const int64_t slot = integer_at(view, n);
    if (slot < -1 || slot >= slots) {
      invalid("state_indices", "a slot from -1 to " + std::to_string(slots - 1) + " at position " + std::to_string(n),
              std::to_string(slot));
    }
    if (slot >= 0) used.push_back(slot);
  }
  std::sort(used.begin(), used.end());
  const auto repeated = std::adjacent_find(used.begin(), used.end());
  if (repeated != used.end()) {
    invalid("state_indices", "every slot at most once", "slot " + std::to_string(*repeated) + " twice");
  }
}

void like(const char* name, const TensorView& view, const TensorView& other) {
  Shape expected{};
  expected.extents = other.shape;
  expected.rank = other.rank;
  shape(name, view, expected);
  dtype(name, view, {other.dtype, DType::kF32});
}

void scratch_extent(int64_t batch, int64_t tokens, int64_t num_sequences, int64_t num_heads, int64_t head_size,
                    const char* name) {
  constexpr int64_t kBytesPerItem = 64;
  int64_t per_head = 0;
  bool overflow = __builtin_mul_overflow(head_size, kBytesPerItem, &per_head);
  overflow |= __builtin_mul_overflow(num_heads, per_head, &per_head);
  int64_t items = 0;
  overflow |= __builtin_mul_overflow(batch, tokens, &items);
  overflow |= __builtin_add_overflow(items, std::max(num_sequences, batch), &items);
  overflow |= __builtin_mul_overflow(items, per_head, &items);
  if (overflow) {
    invalid(name, "a problem whose scratch memory fits the address space",
            "batch " + std::to_string(batch) + ", tokens " + std::to_string(tokens) + ", heads " +
                std::to_string(num_heads));
  }
}

bool has_distinct_elements(const TensorView& view) {
  if (is_empty(view)) return true;
  std::array<size_t, kMaxRank> axes{};
  size_t count = 0;
  for (size_t axis = 0; axis < static_cast<size_t>(view.rank); ++axis) {
    if (view.shape[axis] > 1) axes[count++] = axis;
  }
  std::sort(axes.begin(), axes.begin() + count, [&](size_t a, size_t b) { return view.strides[a] < view.strides[b]; });
  int64_t inner_extent = 1;  // of the axes with smaller strides
  for (size_t i = 0; i < count; ++i) {
    const int64_t stride = view.strides[axes[i]];
    if (stride < inner_extent) return false;
    inner_extent += (view.shape[axes[i]] - 1) * stride;
  }
  return true;
}

bool are_apart(const TensorView& a, const TensorView& b) {
  if (is_empty(a) || is_empty(b)) return true;
  if (address(a) + byte_extent(a) <= address(b) || address(b) + byte_extent(b) <= address(a)) return true;
  for (const TensorView* view : {&a, &b}) {
    for (size_t axis = 0; axis < static_cast<size_t>(view->rank); ++axis) {
      if (view->shape[axis] == 1 || view->strides[axis] == 0) continue;
      const int64_t period = view->strides[axis] * element_size(view->dtype);
      if (are_apart_modulo(a, b, static_cast<uint64_t>(period))) return true;
    }
  }
  return false;
}

void memory(std::span<const Argument> arguments) {
  for (const Argument& output : arguments) {
    if (!output.written) continue;
    if (!has_distinct_elements(*output.view)) {
      invalid(output.name, "strides that step over the axes with smaller ones",
              "shape " + shape_text(*output.view) + " with strides " + strides_text(*output.view));
    }
    for (const Argument& other : arguments) {
      if (&other == &output || are_apart(*output.view, *other.view)) continue;
      invalid(output.name, std::string("memory apart from ") + other.name + ", or another slice of its rows",
              "an overlap of their address ranges");
    }
  }
}

void views(std::span<const Argument> arguments, Device device) {
  for (const Argument& argument : arguments) {
    well_formed(argument.name, *argument.view);
    on_device(argument.name, *argument.view, device);
  }
}

bool any_written(std::span<const Argument> arguments) {
  return std::any_of(arguments.begin(), arguments.end(),
                     [](const Argument& argument) { return argument.written && !is_empty(*argument.view); });
}

bool any_fp64(std::span<const Argument> arguments) {
  return std::any_of(arguments.begin(), arguments.end(), [](const Argument& argument) {
    return argument.view->present() && argument.view->dtype == DType::kF64;
  });
}

}  // namespace fastweight::check
