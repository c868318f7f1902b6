// What the references share: elements and rows as doubles, and the loop over sequences and heads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "core/sequences.h"
#include "core/workspace.h"
#include "cpu/parallel.h"
#include "cpu/scalar_types.h"
#include "fastweight/tensor.h"

namespace fastweight::cpu {

// Element access ---------------------------------------------------------------------------------------------------

// The offset of x[index.., 0..]: the axes that the index leaves out start at 0.
inline int64_t at(const TensorView& x, std::initializer_list<int64_t> index) {
  int64_t offset = 0;
  size_t axis = 0;
  for (int64_t i : index) offset += i * x.strides[axis++];
  return offset;
}

inline double load(const TensorView& x, int64_t offset) { return load_as_double(x.data, x.dtype, offset); }
inline void store(const TensorView& x, int64_t offset, double value) { store_double(x.data, x.dtype, offset, value); }

inline int64_t last_stride(const TensorView& x) { return x.strides[static_cast<size_t>(x.rank - 1)]; }

inline void load_row(const TensorView& x, int64_t offset, int64_t count, double* row) {
  for (int64_t i = 0; i < count; ++i) row[i] = load(x, offset + i * last_stride(x));
}

inline void store_row(const TensorView& x, int64_t offset, int64_t count, const double* row) {
  for (int64_t i = 0; i < count; ++i) store(x, offset + i * last_stride(x), row[i]);
}

// Small vectors and matrices (rows contiguous) ----------------------------------------------------------------------

inline void fill(double* x, int64_t count, double value) { std::fill_n(x, count, value); }
inline void copy(const double* from, int64_t count, double* to) { std::copy_n(from, count, to); }

// Four partial sums let the additions overlap.
inline double dot(const double* x, const double* y, int64_t count) {
  double sum[4] = {0, 0, 0, 0};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int64_t j = 0; j < 4; ++j) sum[j] += x[i + j] * y[i + j];
  }
  for (; i < count; ++i) sum[0] += x[i] * y[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// y += a x
inline void add_scaled(double a, const double* x, int64_t count, double* y) {
  for (int64_t i = 0; i < count; ++i) y[i] += a * x[i];
}

// Activations -------------------------------------------------------------------------------------------------------

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// The loop ----------------------------------------------------------------------------------------------------------

// Gives every thread its own copy of what `layout` describes and runs body(sequence, head, scratch).
template <class Layout, class Body>
void for_each_item(int64_t heads, const std::vector<Sequence>& sequences, const Context& context, const Layout& layout,
                   const Body& body) {
  const int64_t items = static_cast<int64_t>(sequences.size()) * heads;
  if (items == 0) return;
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(context), items));

  ScratchLayout measure;
  layout(measure);
  const size_t bytes = measure.bytes();
  const Workspace workspace(context, bytes * static_cast<size_t>(threads));
  parallel_for(items, threads, [&](int64_t item, int thread) {
    ScratchLayout own(static_cast<std::byte*>(workspace.data()) + bytes * static_cast<size_t>(thread));
    body(sequences[static_cast<size_t>(item / heads)], item % heads, layout(own));
  });
}

}  // namespace fastweight::cpu
