// The gated Gram matrix of the keys of a chunk and its adjoint. An item is a chunk of a key head with its group of
// value heads.
//
//     A_ij = beta_i sum_d k_id k_jd exp(gamma_id - gamma_jd),  i > j
//
// Without a gate or with one per head, the exponential leaves the sum: A = slower(beta * k k^T * Lambda),
// and backward, with E = dA * Lambda,
//
//     reads  = E k,   writes = E^T (beta * k)               k as row and as column of A
//     dbeta  = rowsum(reads * k)
//     dk     = sum over the group of beta * reads + writes
//     dgamma = rowsum(k * (beta * reads - writes))
//
// With a gate per channel the same holds element by element, without the last sum, and the rows are taken 16 at a time.
// With base the gamma of the token before such a block, the exponential between it and an earlier token j is the
// product of
//
//     ahead_i = exp(gamma_i - base)   and   behind_j = exp(base - gamma_j)
//
// neither of which exceeds 1 where gates are decays. From block to block, behind_j is multiplied by the block's whole
// decay; inside a block, by one token's decay exp(gamma_i - gamma_{i-1}) at a time, and that is all that the block's
// own 16 x 16 pairs need.
#include <vector>

#include "cpu/blocks/kernels.h"
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/blocks/scaled_dot_kkt.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/blocks/matrix-inl.h"
#include "cpu/simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace blocks {
namespace {

struct Scratch {
  int64_t ld;
  float* k = nullptr;        // [C][ld]
  float* columns = nullptr;  // [ld][kMatrix] k^T
  float* gram = nullptr;     // [C][kMatrix] k k^T
  float* A = nullptr;        // [C][kMatrix] A, or dA and then E
  float* beta = nullptr;     // [C]
  float* gamma = nullptr;    // [C][ld] per channel, else [C]

  // Per channel.
  float* behind = nullptr;    // [C][ld] forward: times k_j
  float* ahead = nullptr;     // [16][ld] times k_i
  float* decay = nullptr;     // [ld] of one token or of a block
  float* previous = nullptr;  // [C][ld] behind_j k_j

  // Backward.
  float* dk = nullptr;      // [C][ld]
  float* reads = nullptr;   // [C][ld]
  float* writes = nullptr;  // [C][ld]
  float* part = nullptr;    // [C][ld]
  float* scaled = nullptr;  // [C][kMatrix] beta * dA
  float* dbeta = nullptr;   // [C]

  void lay_out(ScratchLayout& layout) {
    for (float** rows : {&k, &columns, &gamma, &behind, &previous, &dk, &reads, &writes, &part}) {
      *rows = layout.take<float>(kMatrix * ld);
    }
    for (float** matrix : {&gram, &A, &scaled}) *matrix = layout.take<float>(kMatrix * kMatrix);
    for (float** numbers : {&beta, &dbeta}) *numbers = layout.take<float>(kMatrix);
    ahead = layout.take<float>(kRowBlock * ld);
    decay = layout.take<float>(ld);
  }
};

// ---- One number per head, or none ---------------------------------------------------------------------------------

// M_ij *= scale_i exp(gamma_i - gamma_j) for j < i, and 0 for j >= i: masked by selection, whatever exp gave there.
HWY_INLINE void apply_lambda(const float* scale, const float* gamma, int64_t rows, float* M) {
  for (int64_t i = 0; i < rows; ++i) {
    const Vec gamma_i = broadcast(gamma[i]), scale_i = broadcast(scale == nullptr ? 1.0f : scale[i]);
    for (int64_t j = 0; j < i; j += kLanes) {
      float* at = M + i * kMatrix + j;
      const Vec lambda = exp(hn::Sub(gamma_i, load(gamma + j)));
      store(hn::Mul(hn::Mul(scale_i, load(at)), lambda), at);
    }
  }
  keep_strictly_lower(M, rows);
}

HWY_INLINE void head_forward(const Scratch& s, int64_t rows) {
  std::memcpy(s.A, s.gram, static_cast<size_t>(rows * kMatrix) * sizeof(float));
  apply_lambda(s.beta, s.gamma, rows, s.A);
}

HWY_INLINE void head_backward(const Scratch& s, int64_t rows) {
  apply_lambda(nullptr, s.gamma, rows, s.A);
  lower_product(s.A, rows, s.k, s.ld, s.reads);
  for (int64_t i = 0; i < rows; ++i) {
    const Vec beta = broadcast(s.beta[i]);
    for (int64_t d = i * s.ld; d < (i + 1) * s.ld; d += kLanes) store(hn::Mul(beta, load(s.k + d)), s.part + d);
  }
  transposed_lower_product(s.A, rows, s.part, s.ld, s.ld, s.writes);
}

// ---- One number per channel -----------------------------------------------------------------------------------------

// decay = exp(to - from)
HWY_INLINE void make_decay(const float* from, const float* to, int64_t ld, float* decay) {
  for (int64_t d = 0; d < ld; d += kLanes) store(exp(hn::Sub(load(to + d), load(from + d))), decay + d);
}

// Rows [first, end) of x times the decay.
HWY_INLINE void decay_rows(const float* decay, int64_t first, int64_t end, int64_t ld, float* x) {
  for (int64_t j = first; j < end; ++j) {
    for (int64_t d = 0; d < ld; d += kLanes) store(hn::Mul(load(x + j * ld + d), load(decay + d)), x + j * ld + d);
  }
}

// ahead_i = k_i exp(gamma_i - base) of the block of rows that begins at `top`.
HWY_INLINE void make_ahead(const Scratch& s, int64_t top, int64_t end) {
  const float* base = s.gamma + (top - 1) * s.ld;
  for (int64_t i = top; i < end; ++i) {
    for (int64_t d = 0; d < s.ld; d += kLanes) {
      const Vec factor = exp(hn::Sub(load(s.gamma + i * s.ld + d), load(base + d)));
      store(hn::Mul(factor, load(s.k + i * s.ld + d)), s.ahead + (i - top) * s.ld + d);
    }
  }
}

// behind holds k_j exp(..) here.
HWY_INLINE void channel_forward(const Scratch& s, int64_t rows) {
  const int64_t ld = s.ld;
  for (int64_t top = 0; top < rows; top += kRowBlock) {
    const int64_t end = std::min(top + kRowBlock, rows);
    if (top > 0) {
      make_ahead(s, top, end);
      to_columns(s.ahead, end - top, ld, s.columns);
      to_columns(s.behind, top, ld, s.previous);
      product<Columns, Start::kZero>({.rows = end - top,
                                      .columns = top,
                                      .depth = ld,
                                      .a = s.columns,
                                      .a_stride = kMatrix,
                                      .b = s.previous,
                                      .b_stride = kMatrix,
                                      .c_in = s.A + top * kMatrix,
                                      .c_out = s.A + top * kMatrix,
                                      .c_stride = kMatrix});
      make_decay(s.gamma + (top - 1) * ld, s.gamma + (end - 1) * ld, ld, s.decay);
      decay_rows(s.decay, 0, top, ld, s.behind);
    }
    for (int64_t i = top; i < end; ++i) {
      if (i > top) make_decay(s.gamma + (i - 1) * ld, s.gamma + i * ld, ld, s.decay);
      const float* k = s.k + i * ld;
      for (int64_t j = top; j < i; ++j) {
        float* behind = s.behind + j * ld;
        Vec sum = zero();
        for (int64_t d = 0; d < ld; d += kLanes) {
          const Vec decayed = hn::Mul(load(behind + d), load(s.decay + d));
          store(decayed, behind + d);
          sum = fma(load(k + d), decayed, sum);
        }
        s.A[i * kMatrix + j] = sum_of_lanes(sum);
      }
      std::memcpy(s.behind + i * ld, k, static_cast<size_t>(ld) * sizeof(float));
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    const Vec beta = broadcast(s.beta[i]);
    for (int64_t j = 0; j < i; j += kLanes) {
      store(hn::Mul(beta, load(s.A + i * kMatrix + j)), s.A + i * kMatrix + j);
    }
  }
  keep_strictly_lower(s.A, rows);
}

// The pairs of a block with the tokens before it.
HWY_INLINE void channel_backward_across(const Scratch& s, int64_t top, int64_t end) {
  const int64_t ld = s.ld;
  for (int64_t d = 0; d < top * ld; d += kLanes) {
    store(hn::Mul(load(s.behind + d), load(s.k + d)), s.previous + d);
  }
  product<MatrixRows, Start::kZero>({.rows = end - top,
                                     .columns = ld,
                                     .depth = top,
                                     .a = s.A + top * kMatrix,
                                     .b = s.previous,
                                     .b_stride = ld,
                                     .c_in = s.reads + top * ld,
                                     .c_out = s.reads + top * ld,
                                     .c_stride = ld});
  make_ahead(s, top, end);
  product<Columns, Start::kZero>({.rows = top,
                                  .columns = ld,
                                  .depth = end - top,
                                  .a = s.scaled + top * kMatrix,
                                  .a_stride = kMatrix,
                                  .b = s.ahead,
                                  .b_stride = ld,
                                  .c_in = s.part,
                                  .c_out = s.part,
                                  .c_stride = ld});
  for (int64_t d = 0; d < top * ld; d += kLanes) {
    store(fma(load(s.behind + d), load(s.part + d), load(s.writes + d)), s.writes + d);
  }
  const float* base = s.gamma + (top - 1) * ld;
  for (int64_t i = top; i < end; ++i) {
    for (int64_t d = 0; d < ld; d += kLanes) {
      float* reads = s.reads + i * ld + d;
      store(hn::Mul(load(reads), exp(hn::Sub(load(s.gamma + i * ld + d), load(base + d)))), reads);
    }
  }
  make_decay(base, s.gamma + (end - 1) * ld, ld, s.decay);
  decay_rows(s.decay, 0, top, ld, s.behind);
}

// behind holds exp(..) alone here, and s.scaled is beta * dA.
HWY_INLINE void channel_backward(const Scratch& s, int64_t rows) {
  const int64_t ld = s.ld;
  std::memset(s.writes, 0, static_cast<size_t>(rows * ld) * sizeof(float));
  for (int64_t i = 0; i < rows; ++i) {
    const Vec beta = broadcast(s.beta[i]);
    for (int64_t j = 0; j < kMatrix; j += kLanes) {
      store(hn::Mul(beta, load(s.A + i * kMatrix + j)), s.scaled + i * kMatrix + j);
    }
  }
  for (int64_t top = 0; top < rows; top += kRowBlock) {
    const int64_t end = std::min(top + kRowBlock, rows);
    if (top > 0) {
      channel_backward_across(s, top, end);
    } else {
      std::memset(s.reads, 0, static_cast<size_t>(end * ld) * sizeof(float));
    }
    for (int64_t i = top; i < end; ++i) {
      if (i > top) make_decay(s.gamma + (i - 1) * ld, s.gamma + i * ld, ld, s.decay);
      const float* k = s.k + i * ld;
      float* reads = s.reads + i * ld;
      for (int64_t j = top; j < i; ++j) {
        const Vec dA = broadcast(s.A[i * kMatrix + j]), scaled = broadcast(s.scaled[i * kMatrix + j]);
        for (int64_t d = 0; d < ld; d += kLanes) {
          float *behind = s.behind + j * ld + d, *writes = s.writes + j * ld + d;
          const Vec factor = hn::Mul(load(behind), load(s.decay + d));
          store(factor, behind);
          store(fma(hn::Mul(dA, factor), load(s.k + j * ld + d), load(reads + d)), reads + d);
          store(fma(hn::Mul(scaled, factor), load(k + d), load(writes)), writes);
        }
      }
      for (int64_t d = 0; d < ld; d += kLanes) store(broadcast(1.0f), s.behind + i * ld + d);
    }
  }
}

// ---- A chunk --------------------------------------------------------------------------------------------------------

HWY_INLINE void load_head(const ScaledDotKktInputs& in, const BlockSizes& sizes, const Chunk& chunk, int64_t h,
                          int64_t rows, const Scratch& s) {
  load_numbers(in.beta, chunk, h, 1.0f, rows, s.beta);
  const bool per_channel = sizes.gate == Gate::kPerChannel;
  if (per_channel) {
    load_chunk(in.gamma, chunk, h, sizes.head_dim_k, rows, s.ld, s.gamma);
  } else {
    load_numbers(in.gamma, chunk, h, 0.0f, rows, s.gamma);
  }
  // Rows beyond the chunk go on without decay: no exponent is positive because of them.
  const int64_t width = per_channel ? s.ld : 1;
  for (int64_t i = chunk.length; i < rows; ++i) {
    std::memcpy(s.gamma + i * width, s.gamma + (i - 1) * width, static_cast<size_t>(width) * sizeof(float));
  }
}

void chunk_forward(const BlockProblem<ScaledDotKktForward>& problem, const Chunk& chunk, int64_t head,
                   const Scratch& s) {
  const ScaledDotKktForward& args = problem.args;
  const BlockSizes& sizes = problem.sizes;
  const int64_t rows = padded_width(chunk.length);
  load_chunk(args.in.k, chunk, head, sizes.head_dim_k, rows, s.ld, s.k);
  if (sizes.gate != Gate::kPerChannel) {
    to_columns(s.k, rows, s.ld, s.columns);
    lower_gram<Start::kZero>(s.columns, s.columns, rows, s.ld, s.gram);
  }
  for (int64_t h = head * sizes.group; h < (head + 1) * sizes.group; ++h) {
    load_head(args.in, sizes, chunk, h, rows, s);
    if (sizes.gate == Gate::kPerChannel) {
      channel_forward(s, rows);
    } else {
      head_forward(s, rows);
    }
    store_chunk(s.A, kMatrix, args.a, chunk, h, sizes.chunk_size);
  }
}

// From reads and writes to the gradients of one value head; adds its share to dk.
void finish_head(const ScaledDotKktBackward& args, const BlockSizes& sizes, const Chunk& chunk, int64_t h, int64_t rows,
                 const Scratch& s) {
  const bool per_channel = sizes.gate == Gate::kPerChannel;
  alignas(64) float dgamma[kMatrix];
  for (int64_t i = 0; i < rows; ++i) {
    const Vec beta = broadcast(s.beta[i]);
    s.dbeta[i] = row_dot(s.reads + i * s.ld, s.k + i * s.ld, s.ld);
    Vec sum = zero();
    for (int64_t d = i * s.ld; d < (i + 1) * s.ld; d += kLanes) {
      const Vec read = hn::Mul(beta, load(s.reads + d)), write = load(s.writes + d);
      store(hn::Add(load(s.dk + d), hn::Add(read, write)), s.dk + d);
      const Vec gate = hn::Mul(load(s.k + d), hn::Sub(read, write));
      if (per_channel) store(gate, s.part + d);
      sum = hn::Add(sum, gate);
    }
    dgamma[i] = sum_of_lanes(sum);
  }
  store_numbers(s.dbeta, args.dbeta, chunk, h);
  if (per_channel) {
    store_chunk(s.part, s.ld, args.dgamma, chunk, h, sizes.head_dim_k);
  } else {
    store_numbers(dgamma, args.dgamma, chunk, h);
  }
}

void chunk_backward(const BlockProblem<ScaledDotKktBackward>& problem, const Chunk& chunk, int64_t head,
                    const Scratch& s) {
  const ScaledDotKktBackward& args = problem.args;
  const BlockSizes& sizes = problem.sizes;
  const int64_t rows = padded_width(chunk.length);
  load_chunk(args.in.k, chunk, head, sizes.head_dim_k, rows, s.ld, s.k);
  std::memset(s.dk, 0, static_cast<size_t>(rows * s.ld) * sizeof(float));
  for (int64_t h = head * sizes.group; h < (head + 1) * sizes.group; ++h) {
    load_head(args.in, sizes, chunk, h, rows, s);
    load_lower(args.da, chunk, h, false, rows, s.A);
    if (sizes.gate == Gate::kPerChannel) {
      channel_backward(s, rows);
    } else {
      head_backward(s, rows);
    }
    finish_head(args, sizes, chunk, h, rows, s);
  }
  store_chunk(s.dk, s.ld, args.dk, chunk, head, sizes.head_dim_k);
}

// run(problem, chunk, head, scratch) for every chunk of every key head.
template <class Args, class Run>
HWY_INLINE void for_each_chunk(const BlockProblem<Args>& problem, const Context& context, Run run) {
  const BlockSizes& sizes = problem.sizes;
  const int64_t heads = sizes.num_heads, C = sizes.chunk_size;
  const auto chunks = chunks_of(problem);
  const int64_t cost = sizes.batch * sizes.tokens * sizes.num_value_heads * C * sizes.head_dim_k;
  for_each_item(static_cast<int64_t>(chunks.size()) * heads, cost, context, Scratch{padded_width(sizes.head_dim_k)},
                [&](int64_t item, const Scratch& s)
                    HWY_ATTR { run(problem, chunks[static_cast<size_t>(item / heads)], item % heads, s); });
}

}  // namespace

void scaled_dot_kkt_forward(const BlockProblem<ScaledDotKktForward>& problem, const Context& context) {
  for_each_chunk(problem, context, chunk_forward);
}

void scaled_dot_kkt_backward(const BlockProblem<ScaledDotKktBackward>& problem, const Context& context) {
  for_each_chunk(problem, context, chunk_backward);
}

}  // namespace blocks

void block_scaled_dot_kkt_forward(const BlockProblem<ScaledDotKktForward>& problem, const Context& context) {
  blocks::scaled_dot_kkt_forward(problem, context);
}
void block_scaled_dot_kkt_backward(const BlockProblem<ScaledDotKktBackward>& problem, const Context& context) {
  blocks::scaled_dot_kkt_backward(problem, context);
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {
namespace {

HWY_EXPORT(block_scaled_dot_kkt_forward);
HWY_EXPORT(block_scaled_dot_kkt_backward);

}  // namespace

void blocks::simd(const BlockProblem<ScaledDotKktForward>& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(block_scaled_dot_kkt_forward)(problem, context);
}
void blocks::simd(const BlockProblem<ScaledDotKktBackward>& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(block_scaled_dot_kkt_backward)(problem, context);
}

}  // namespace fastweight::cpu
#endif
