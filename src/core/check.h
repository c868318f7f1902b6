// The words that all validation uses. Each function returns when the argument is as expected and otherwise throws
// Error(kInvalidArgument) with a message of one form: `k: expected shape [2, 128, 4, 64], got [2, 128, 4, 32]`.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <utility>

#include "fastweight/context.h"
#include "fastweight/tensor.h"

namespace fastweight::check {

[[noreturn]] void invalid(const char* name, const std::string& expected, const std::string& got);

// An expected shape.
struct Shape {
  Shape(std::initializer_list<int64_t> extents);
  std::array<int64_t, kMaxRank> extents{};
  int32_t rank = 0;
};

std::string text(DType dtype);
std::string text(Device device);
std::string text(double number);
std::string shape_text(const TensorView& view);
std::string strides_text(const TensorView& view);
std::string sizes_text(std::initializer_list<std::pair<const char*, int64_t>> sizes);  // "B=1 T=64"

using fastweight::element_size;
bool is_floating(DType dtype);
bool is_empty(const TensorView& view);  // no elements
bool is_dense(const TensorView& view);  // row-major without gaps

// Element `index` of an int32 or int64 vector in host memory.
int64_t integer_at(const TensorView& view, int64_t index);

// Presence.
void present(const char* name, const TensorView& view);
void absent(const char* name, const TensorView& view, const char* why);

// What must hold for any view, whatever it is for: rank, type and device in range, extents and strides not negative,
// element count and byte extent within int64, and, with elements, a pointer aligned to the element size.
void well_formed(const char* name, const TensorView& view);

void on_device(const char* name, const TensorView& view, Device device);
void rank(const char* name, const TensorView& view, int32_t expected);
void shape(const char* name, const TensorView& view, const Shape& expected);
void dtype(const char* name, const TensorView& view, std::initializer_list<DType> expected);
void floating(const char* name, const TensorView& view);
void in_range(const char* name, int64_t value, int64_t low, int64_t high);

void chunk_size(int64_t value);  // 16, 32 or 64
void eps(double value);          // of a norm, whose kernels add it in fp32, where it must not be 0
void eps_or_zero(double value);  // of a norm that makes NaN of a row of zeros if it is told to

// A vector of parameters: [count], or any shape with that many elements if it is dense.
void parameter(const char* name, const TensorView& view, int64_t count);

// A [count] vector of int32 or int64 that is not a broadcast.
void integer_vector(const char* name, const TensorView& view);

void context(const Context& context);

// Offsets of packed sequences: [N + 1] integers that start at 0, do not decrease and end at the token count.
void cu_seqlens(const TensorView& view, int64_t tokens);

// The number of sequences: those of cu_seqlens, which asks for a batch of 1, or one per row of the batch.
int64_t num_sequences(const TensorView& cu_seqlens, int64_t batch, int64_t tokens);

// The slot of each sequence, from -1 to slots - 1: two sequences must not advance one state.
void state_indices(const TensorView& view, int64_t num_sequences, int64_t slots);

// An output with the shape of another tensor, and its type or fp32.
void like(const char* name, const TensorView& view, const TensorView& other);

// Kernels index scratch memory of the order of all tokens and of all chunk states; 64 bits must suffice for it. Only
// broadcast inputs can be that large. `head_size` is the most elements that a head has of anything.
void scratch_extent(int64_t batch, int64_t tokens, int64_t num_sequences, int64_t num_heads, int64_t head_size,
                    const char* name = "q");

// Memory. A view that is written must have elements of its own: none twice, and none of another view of the call.
// Both tests are sufficient conditions; they accept every dense view and every slice of a packed buffer.
bool has_distinct_elements(const TensorView& view);
bool are_apart(const TensorView& a, const TensorView& b);

struct Argument {
  const char* name;
  const TensorView* view;
  bool written;
};
void memory(std::span<const Argument> arguments);

void views(std::span<const Argument> arguments, Device device);  // well_formed and on_device for each
bool any_fp64(std::span<const Argument> arguments);
bool any_written(std::span<const Argument> arguments);  // whether a call has an element to write

}  // namespace fastweight::check
