// The last W rows of a block of channels, the filter, and states to and from rows. Re-included once per instruction
// set.
//
// A row is one token of a block of channels in fp32, padded with zeros to `ld`. The rows of a window are addressed
// through pointers, oldest first, which rotate from token to token.
#if defined(FW_CPU_SHORT_CONV_WINDOW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_CPU_SHORT_CONV_WINDOW_INL_H_
#undef FW_CPU_SHORT_CONV_WINDOW_INL_H_
#else
#define FW_CPU_SHORT_CONV_WINDOW_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstring>

#include "core/workspace.h"
#include "cpu/short_conv/partition.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace short_conv {

struct Block {
  int64_t first;  // channel
  int64_t count;
  int64_t ld;  // row length
};

HWY_INLINE Block block_of(const ShortConvSizes& sizes, int64_t index) {
  const int64_t first = index * kBlockChannels;
  const int64_t count = std::min(kBlockChannels, sizes.channels - first);
  return {first, count, round_up(count, kLanes)};
}

HWY_INLINE int64_t most_columns(const ShortConvSizes& sizes) {
  return round_up(std::min(kBlockChannels, sizes.channels), kLanes);
}

// W rows of a block of channels, oldest first: a window, the taps, a state.
struct WindowRows {
  std::array<float*, 16> row;

  void point_at(float* buffer, int64_t W, int64_t ld) {
    for (int64_t i = 0; i < W; ++i) row[static_cast<size_t>(i)] = buffer + i * ld;
  }
  float* operator[](int64_t i) const { return row[static_cast<size_t>(i)]; }

  // The oldest row becomes the newest, to be filled.
  float* advance(int64_t W) {
    std::rotate(row.begin(), row.begin() + 1, row.begin() + W);
    return (*this)[W - 1];
  }
};

HWY_INLINE void fill_row(float* row, int64_t ld, float value) {
  for (int64_t c = 0; c < ld; c += kLanes) store(broadcast(value), row + c);
}

// Channels of token t of a [B, T, D] tensor.
HWY_INLINE char* token_row(const TensorView& x, const Sequence& s, int64_t t, const Block& block) {
  const int64_t offset = s.batch * x.strides[0] + (s.begin + t) * x.strides[1] + block.first * x.strides[2];
  return static_cast<char*>(x.data) + offset * element_size(x.dtype);
}
HWY_INLINE void load_token(const TensorView& x, const Sequence& s, int64_t t, const Block& block, float* row) {
  load_row(token_row(x, s, t, block), x.dtype, x.strides[2], block.count, row, block.ld);
}
HWY_INLINE void store_token(const float* row, const TensorView& x, const Sequence& s, int64_t t, const Block& block) {
  store_row(row, token_row(x, s, t, block), x.dtype, x.strides[2], block.count);
}

// Rows from and to the columns of a [channels, W] matrix that begins at `data`. Usually it is dense with W = 4: then it
// is converted as one row and the columns are picked apart in registers. `packed` holds W * ld numbers.
HWY_NOINLINE inline void load_columns(const char* data, DType dtype, int64_t channel_stride, int64_t column_stride,
                                      int64_t W, const Block& block, float* packed, const WindowRows& rows) {
  const int64_t ld = block.ld;
  if (W == 4 && column_stride == 1 && channel_stride == W) {
    load_row(data, dtype, 1, W * block.count, packed, W * ld);
    for (int64_t c = 0; c < ld; c += kLanes) {
      Vec v0, v1, v2, v3;
      hn::LoadInterleaved4(kF32Tag, packed + 4 * c, v0, v1, v2, v3);
      store(v0, rows[0] + c);
      store(v1, rows[1] + c);
      store(v2, rows[2] + c);
      store(v3, rows[3] + c);
    }
    return;
  }
  for (int64_t i = 0; i < W; ++i) {
    load_row(data + i * column_stride * element_size(dtype), dtype, channel_stride, block.count, rows[i], ld);
  }
}

HWY_NOINLINE inline void store_columns(const WindowRows& rows, char* data, DType dtype, int64_t channel_stride,
                                       int64_t column_stride, int64_t W, const Block& block, float* packed) {
  if (W == 4 && column_stride == 1 && channel_stride == W) {
    for (int64_t c = 0; c < block.ld; c += kLanes) {
      hn::StoreInterleaved4(load(rows[0] + c), load(rows[1] + c), load(rows[2] + c), load(rows[3] + c), kF32Tag,
                            packed + 4 * c);
    }
    return store_row(packed, data, dtype, 1, W * block.count);
  }
  for (int64_t i = 0; i < W; ++i) {
    store_row(rows[i], data + i * column_stride * element_size(dtype), dtype, channel_stride, block.count);
  }
}

// A slot of a [slots, D, W] state. Absent: 0.
HWY_INLINE char* state_begin(const TensorView& state, int64_t slot, const Block& block) {
  const int64_t offset = slot * state.strides[0] + block.first * state.strides[1];
  return static_cast<char*>(state.data) + offset * element_size(state.dtype);
}
HWY_NOINLINE inline void load_state(const TensorView& state, int64_t slot, int64_t W, const Block& block, float* packed,
                                    const WindowRows& rows) {
  if (state.present()) {
    load_columns(state_begin(state, slot, block), state.dtype, state.strides[1], state.strides[2], W, block, packed,
                 rows);
  } else {
    for (int64_t i = 0; i < W; ++i) fill_row(rows[i], block.ld, 0);
  }
}
HWY_NOINLINE inline void store_state(const WindowRows& rows, const TensorView& state, int64_t slot, int64_t W,
                                     const Block& block, float* packed) {
  store_columns(rows, state_begin(state, slot, block), state.dtype, state.strides[1], state.strides[2], W, block,
                packed);
}

// What a thread needs to filter a block of channels.
struct Filter {
  int64_t W;
  bool silu;
  float* w_buffer;  // [W][ld]
  float* x_buffer;  // [W][ld]
  float* bias;      // [ld]
  float* packed;    // [W * ld]
  WindowRows w;     // row i: tap i of every channel
  WindowRows x;     // the window

  void lay_out(ScratchLayout& layout, const ShortConvSizes& sizes) {
    const int64_t ld = most_columns(sizes);
    W = sizes.width;
    w_buffer = layout.take<float>(W * ld);
    x_buffer = layout.take<float>(W * ld);
    bias = layout.take<float>(ld);
    packed = layout.take<float>(W * ld);
  }

  HWY_INLINE void open(const ShortConvInputs& in, const ShortConvOptions& options, const Block& block) {
    silu = options.activation == Activation::kSilu;
    w.point_at(w_buffer, W, block.ld);
    x.point_at(x_buffer, W, block.ld);
    const char* data = static_cast<const char*>(in.w.data) + block.first * in.w.strides[0] * element_size(in.w.dtype);
    load_columns(data, in.w.dtype, in.w.strides[0], in.w.strides[1], W, block, packed, w);
    fill_row(bias, block.ld, 0);
    if (in.bias.present()) {
      const char* from =
          static_cast<const char*>(in.bias.data) + block.first * in.bias.strides[0] * element_size(in.bias.dtype);
      load_row(from, in.bias.dtype, in.bias.strides[0], block.count, bias, block.ld);
    }
  }

  // The window before token t. Ranges begin at multiples of kRangeTokens >= W, so it is a state or tokens, never both.
  HWY_INLINE void open_window(const TensorView& x_view, const TensorView& state, int64_t slot, const Sequence& s,
                              int64_t t, const Block& block) {
    if (t == 0) return load_state(state, slot, W, block, packed, x);
    for (int64_t i = 0; i < W; ++i) load_token(x_view, s, t - W + i, block, x[i]);
  }

  // visit(c, z) for the vectors of z = bias + sum_i w_i x_i, the sum from the oldest row on.
  template <class Visit>
  HWY_INLINE void convolve(const Block& block, const Visit& visit) const {
    if (W == 4) {
      const float *x0 = x[0], *x1 = x[1], *x2 = x[2], *x3 = x[3], *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
      for (int64_t c = 0; c < block.ld; c += kLanes) {
        Vec z = fma(load(w0 + c), load(x0 + c), load(bias + c));
        z = fma(load(w1 + c), load(x1 + c), z);
        z = fma(load(w2 + c), load(x2 + c), z);
        visit(c, fma(load(w3 + c), load(x3 + c), z));
      }
      return;
    }
    for (int64_t c = 0; c < block.ld; c += kLanes) {
      Vec z = load(bias + c);
      for (int64_t i = 0; i < W; ++i) z = fma(load(w[i] + c), load(x[i] + c), z);
      visit(c, z);
    }
  }
};

}  // namespace short_conv
}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
