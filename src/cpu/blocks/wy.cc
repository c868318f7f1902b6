// The WY factors of a chunk and their adjoint. An item is a chunk of a key head with its group of value heads.
//
//     W = J (beta * exp(gamma) * k),   U = J (beta * v)
//
//     X  = J^T dW,   Y = J^T dU
//     dk = sum over the group of beta * exp(gamma) * X,   dv = beta * Y
//     dbeta  = rowsum(Y * v) + rowsum(X * exp(gamma) * k)
//     dgamma = beta * X * exp(gamma) * k, summed over the channels where the gate is one per head
//     dA = -slower(Z J^T),   Z = J^T dJ = X (beta * exp(gamma) * k)^T + Y (beta * v)^T
#include <vector>

#include "cpu/blocks/kernels.h"
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/blocks/wy.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/blocks/matrix-inl.h"
#include "cpu/simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace blocks {
namespace {

// exp(gamma) as [rows][ld]: rows of the tensor per channel, else copies of one number.
HWY_NOINLINE void load_factors(const TensorView& gamma, const Chunk& chunk, int64_t h, const BlockSizes& sizes,
                               int64_t rows, int64_t ld, float* e) {
  if (sizes.gate == Gate::kPerChannel) {
    load_chunk(gamma, chunk, h, sizes.head_dim_k, rows, ld, e);
    for (int64_t d = 0; d < rows * ld; d += kLanes) store(exp(load(e + d)), e + d);
    return;
  }
  alignas(64) float numbers[kMatrix];
  load_numbers(gamma, chunk, h, 0.0f, rows, numbers);
  for (int64_t i = 0; i < rows; i += kLanes) store(exp(load(numbers + i)), numbers + i);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < ld; d += kLanes) store(broadcast(numbers[i]), e + i * ld + d);
  }
}

// x_i *= scale_i
HWY_NOINLINE void scale_rows(const float* scale, int64_t rows, int64_t ld, float* x) {
  for (int64_t i = 0; i < rows; ++i) {
    const Vec s = broadcast(scale[i]);
    for (int64_t d = 0; d < ld; d += kLanes) store(hn::Mul(s, load(x + i * ld + d)), x + i * ld + d);
  }
}

struct ForwardScratch {
  int64_t ldk, ldv;
  float* k = nullptr;     // [C][ldk]
  float* x = nullptr;     // [C][max]: beta exp(gamma) k, then beta v
  float* out = nullptr;   // [C][max]: W, then U
  float* J = nullptr;     // [C][kMatrix]
  float* beta = nullptr;  // [C]

  void lay_out(ScratchLayout& layout) {
    k = layout.take<float>(kMatrix * ldk);
    x = layout.take<float>(kMatrix * std::max(ldk, ldv));
    out = layout.take<float>(kMatrix * std::max(ldk, ldv));
    J = layout.take<float>(kMatrix * kMatrix);
    beta = layout.take<float>(kMatrix);
  }
};

void chunk_forward(const BlockProblem<WyForward>& problem, const Chunk& chunk, int64_t head, const ForwardScratch& s) {
  const WyForward& args = problem.args;
  const BlockSizes& sizes = problem.sizes;
  const int64_t rows = padded_width(chunk.length);
  load_chunk(args.in.k, chunk, head, sizes.head_dim_k, rows, s.ldk, s.k);
  for (int64_t h = head * sizes.group; h < (head + 1) * sizes.group; ++h) {
    load_lower(args.in.j, chunk, h, true, rows, s.J);
    load_numbers(args.in.beta, chunk, h, 1.0f, rows, s.beta);
    if (args.w.present()) {
      load_factors(args.in.gamma, chunk, h, sizes, rows, s.ldk, s.x);
      for (int64_t d = 0; d < rows * s.ldk; d += kLanes) store(hn::Mul(load(s.x + d), load(s.k + d)), s.x + d);
      scale_rows(s.beta, rows, s.ldk, s.x);
      lower_product(s.J, rows, s.x, s.ldk, s.out);
      store_chunk(s.out, s.ldk, args.w, chunk, h, sizes.head_dim_k);
    }
    if (args.u.present()) {
      load_chunk(args.in.v, chunk, h, sizes.head_dim_v, rows, s.ldv, s.x);
      scale_rows(s.beta, rows, s.ldv, s.x);
      lower_product(s.J, rows, s.x, s.ldv, s.out);
      store_chunk(s.out, s.ldv, args.u, chunk, h, sizes.head_dim_v);
    }
  }
}

struct BackwardScratch {
  int64_t ldk, ldv;
  float* k = nullptr;         // [C][ldk]
  float* dk = nullptr;        // [C][ldk]
  float* e = nullptr;         // [C][ldk] exp(gamma)
  float* read = nullptr;      // [C][ldk] exp(gamma) k, then times beta
  float* v = nullptr;         // [C][ldv]
  float* gradient = nullptr;  // [C][max]: dW, then dU
  float* X = nullptr;         // [C][ldk]
  float* Y = nullptr;         // [C][ldv]
  float* left = nullptr;      // [max][kMatrix]: X^T or Y^T
  float* right = nullptr;     // [max][kMatrix]: of their partners in Z
  float* J = nullptr;         // [C][kMatrix]
  float* Z = nullptr;         // [C][kMatrix]
  float* dA = nullptr;        // [C][kMatrix]
  float* columns = nullptr;   // [C][kMatrix]
  float* beta = nullptr;      // [C]
  float* dbeta = nullptr;     // [C]
  float* dgamma = nullptr;    // [C]

  void lay_out(ScratchLayout& layout) {
    const int64_t ld = std::max(ldk, ldv);
    for (float** rows : {&k, &dk, &e, &read, &X}) *rows = layout.take<float>(kMatrix * ldk);
    for (float** rows : {&v, &Y}) *rows = layout.take<float>(kMatrix * ldv);
    for (float** rows : {&gradient, &left, &right}) *rows = layout.take<float>(kMatrix * ld);
    for (float** matrix : {&J, &Z, &dA, &columns}) *matrix = layout.take<float>(kMatrix * kMatrix);
    for (float** numbers : {&beta, &dbeta, &dgamma}) *numbers = layout.take<float>(kMatrix);
  }
};

// One value head; adds its share to dk.
void head_backward(const BlockProblem<WyBackward>& problem, const Chunk& chunk, int64_t h, const BackwardScratch& s) {
  const WyBackward& args = problem.args;
  const BlockSizes& sizes = problem.sizes;
  const int64_t rows = padded_width(chunk.length), K = sizes.head_dim_k, V = sizes.head_dim_v;
  load_lower(args.in.j, chunk, h, true, rows, s.J);
  load_numbers(args.in.beta, chunk, h, 1.0f, rows, s.beta);
  load_factors(args.in.gamma, chunk, h, sizes, rows, s.ldk, s.e);
  load_chunk(args.in.v, chunk, h, V, rows, s.ldv, s.v);
  load_chunk(args.dw, chunk, h, K, rows, s.ldk, s.gradient);
  transposed_lower_product(s.J, rows, s.gradient, s.ldk, s.ldk, s.X);
  load_chunk(args.du, chunk, h, V, rows, s.ldv, s.gradient);
  transposed_lower_product(s.J, rows, s.gradient, s.ldv, s.ldv, s.Y);

  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = i * s.ldk;
    Vec sum = zero();
    for (int64_t d = row; d < row + s.ldk; d += kLanes) {
      const Vec read = hn::Mul(load(s.e + d), load(s.k + d));
      store(read, s.read + d);
      sum = fma(load(s.X + d), read, sum);
    }
    const float through_w = sum_of_lanes(sum);
    s.dbeta[i] = row_dot(s.Y + i * s.ldv, s.v + i * s.ldv, s.ldv) + through_w;
    s.dgamma[i] = s.beta[i] * through_w;
  }
  store_numbers(s.dbeta, args.dbeta, chunk, h);
  if (sizes.gate == Gate::kPerHead) store_numbers(s.dgamma, args.dgamma, chunk, h);
  scale_rows(s.beta, rows, s.ldk, s.read);

  if (args.da.present()) {
    scale_rows(s.beta, rows, s.ldv, s.v);
    to_columns(s.X, rows, s.ldk, s.left);
    to_columns(s.read, rows, s.ldk, s.right);
    lower_gram<Start::kZero>(s.left, s.right, rows, s.ldk, s.Z);
    to_columns(s.Y, rows, s.ldv, s.left);
    to_columns(s.v, rows, s.ldv, s.right);
    lower_gram<Start::kAdd>(s.left, s.right, rows, s.ldv, s.Z);
    inverse_adjoint(s.J, rows, s.Z, s.columns, s.dA);
    store_chunk(s.dA, kMatrix, args.da, chunk, h, sizes.chunk_size);
  }

  if (args.dv.present()) {
    scale_rows(s.beta, rows, s.ldv, s.Y);
    store_chunk(s.Y, s.ldv, args.dv, chunk, h, V);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const Vec beta = broadcast(s.beta[i]);
    for (int64_t d = i * s.ldk; d < (i + 1) * s.ldk; d += kLanes) {
      const Vec X = load(s.X + d);
      store(fma(hn::Mul(beta, load(s.e + d)), X, load(s.dk + d)), s.dk + d);
      store(hn::Mul(load(s.read + d), X), s.read + d);
    }
  }
  if (sizes.gate == Gate::kPerChannel) store_chunk(s.read, s.ldk, args.dgamma, chunk, h, K);
}

// run(chunk, head, scratch) for every chunk of every key head.
template <class Scratch, class Args, class Run>
HWY_INLINE void for_each_chunk(const BlockProblem<Args>& problem, const Context& context, int64_t products, Run run) {
  const BlockSizes& sizes = problem.sizes;
  const int64_t heads = sizes.num_heads, C = sizes.chunk_size;
  const auto chunks = chunks_of(problem);
  const int64_t cost =
      products * sizes.batch * sizes.tokens * sizes.num_value_heads * C * (sizes.head_dim_k + sizes.head_dim_v);
  for_each_item(static_cast<int64_t>(chunks.size()) * heads, cost, context,
                Scratch{padded_width(sizes.head_dim_k), padded_width(sizes.head_dim_v)},
                [&](int64_t item, const Scratch& s)
                    HWY_ATTR { run(chunks[static_cast<size_t>(item / heads)], item % heads, s); });
}

}  // namespace

void wy_forward(const BlockProblem<WyForward>& problem, const Context& context) {
  for_each_chunk<ForwardScratch>(problem, context, 1,
                                 [&](const Chunk& chunk, int64_t head, const ForwardScratch& s)
                                     HWY_ATTR { chunk_forward(problem, chunk, head, s); });
}

void wy_backward(const BlockProblem<WyBackward>& problem, const Context& context) {
  const BlockSizes& sizes = problem.sizes;
  for_each_chunk<BackwardScratch>(
      problem, context, 3, [&](const Chunk& chunk, int64_t head, const BackwardScratch& s) HWY_ATTR {
        load_chunk(problem.args.in.k, chunk, head, sizes.head_dim_k, padded_width(chunk.length), s.ldk, s.k);
        std::memset(s.dk, 0, static_cast<size_t>(kMatrix * s.ldk) * sizeof(float));
        for (int64_t h = head * sizes.group; h < (head + 1) * sizes.group; ++h) head_backward(problem, chunk, h, s);
        store_chunk(s.dk, s.ldk, problem.args.dk, chunk, head, sizes.head_dim_k);
      });
}

}  // namespace blocks

void block_wy_forward(const BlockProblem<WyForward>& problem, const Context& context) {
  blocks::wy_forward(problem, context);
}
void block_wy_backward(const BlockProblem<WyBackward>& problem, const Context& context) {
  blocks::wy_backward(problem, context);
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {
namespace {

HWY_EXPORT(block_wy_forward);
HWY_EXPORT(block_wy_backward);

}  // namespace

void blocks::simd(const BlockProblem<WyForward>& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(block_wy_forward)(problem, context);
}
void blocks::simd(const BlockProblem<WyBackward>& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(block_wy_backward)(problem, context);
}

}  // namespace fastweight::cpu
#endif
