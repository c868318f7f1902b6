// The inverse of unit lower triangular matrices by forward substitution, and its adjoint.
//
//     J_i = unit row i - sum_{m<i} A_im J_m     four rows at a time, a panel of columns at a time
//     dA  = -slower(Z J^T),   Z = J^T dJ
//
// Every element of J is substituted from A itself: no block of J is a product of other blocks of J, whose errors would
// multiply where the inverse is large.
#include "cpu/blocks/kernels.h"
#include "cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/blocks/solve_tril.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/blocks/matrix-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fastweight::cpu::HWY_NAMESPACE {
namespace blocks {
namespace {

// Columns [column, column + kVecs * kLanes) of J; the rows before them are 0 there already.
template <int kVecs>
HWY_INLINE void solve_columns(const float* A, int64_t rows, int64_t column, float* J) {
  J += column;
  const int64_t first = column / 4 * 4;
  for (int64_t top = first; top < rows; top += 4) {
    Vec r[4][kVecs];
    FW_UNROLL
    for (int m = 0; m < 4; ++m) {
      FW_UNROLL
      for (int n = 0; n < kVecs; ++n) {
        const Vec index = hn::Iota(kF32Tag, static_cast<float>(column + n * kLanes));
        r[m][n] = hn::IfThenElseZero(hn::Eq(index, broadcast(static_cast<float>(top + m))), broadcast(1.0f));
      }
    }
    const float* a = A + top * kMatrix;
    for (int64_t j = first; j < top; ++j) {
      FW_UNROLL
      for (int n = 0; n < kVecs; ++n) {
        const Vec above = load(J + j * kMatrix + n * kLanes);
        FW_UNROLL
        for (int m = 0; m < 4; ++m) r[m][n] = fnma(broadcast(a[m * kMatrix + j]), above, r[m][n]);
      }
    }
    FW_UNROLL
    for (int m = 0; m < 4; ++m) {
      FW_UNROLL
      for (int n = 0; n < kVecs; ++n) {
        FW_UNROLL
        for (int j = 0; j < m; ++j) r[m][n] = fnma(broadcast(a[m * kMatrix + top + j]), r[j][n], r[m][n]);
        store(r[m][n], J + (top + m) * kMatrix + n * kLanes);
      }
    }
  }
}

HWY_INLINE void solve(const float* A, int64_t rows, int64_t columns, float* J) {
  std::memset(J, 0, static_cast<size_t>(rows * kMatrix) * sizeof(float));
  int64_t column = 0;
  for (; column + kPanel <= columns; column += kPanel) solve_columns<2>(A, rows, column, J);
  if (column < columns) solve_columns<1>(A, rows, column, J);
}

struct ForwardScratch {
  float* A = nullptr;  // [C][kMatrix]
  float* J = nullptr;

  void lay_out(ScratchLayout& layout) {
    A = layout.take<float>(kMatrix * kMatrix);
    J = layout.take<float>(kMatrix * kMatrix);
  }
};

struct BackwardScratch {
  float* J = nullptr;        // [C][kMatrix]
  float* dJ = nullptr;       // then dA
  float* Z = nullptr;        // J^T dJ
  float* columns = nullptr;  // J^T

  void lay_out(ScratchLayout& layout) {
    for (float** matrix : {&J, &dJ, &Z, &columns}) *matrix = layout.take<float>(kMatrix * kMatrix);
  }
};

}  // namespace

void solve_tril_forward(const BlockProblem<SolveTrilForward>& problem, const Context& context) {
  const SolveTrilForward& args = problem.args;
  const BlockSizes& sizes = problem.sizes;
  const int64_t heads = sizes.num_value_heads, C = sizes.chunk_size;
  const auto chunks = chunks_of(problem);
  for_each_item(static_cast<int64_t>(chunks.size()) * heads, sizes.batch * sizes.tokens * heads * C * C / 6, context,
                ForwardScratch(), [&](int64_t item, const ForwardScratch& s) HWY_ATTR {
                  const Chunk& chunk = chunks[static_cast<size_t>(item / heads)];
                  const int64_t h = item % heads, rows = round_up(chunk.length, 4);
                  load_lower(args.a, chunk, h, false, rows, s.A);
                  solve(s.A, rows, padded_width(chunk.length), s.J);
                  store_chunk(s.J, kMatrix, args.j, chunk, h, C);
                });
}

void solve_tril_backward(const BlockProblem<SolveTrilBackward>& problem, const Context& context) {
  const SolveTrilBackward& args = problem.args;
  const BlockSizes& sizes = problem.sizes;
  const int64_t heads = sizes.num_value_heads, C = sizes.chunk_size;
  const auto chunks = chunks_of(problem);
  for_each_item(static_cast<int64_t>(chunks.size()) * heads, sizes.batch * sizes.tokens * heads * C * C, context,
                BackwardScratch(), [&](int64_t item, const BackwardScratch& s) HWY_ATTR {
                  const Chunk& chunk = chunks[static_cast<size_t>(item / heads)];
                  const int64_t h = item % heads, rows = padded_width(chunk.length);
                  load_lower(args.j, chunk, h, true, rows, s.J);
                  load_lower(args.dj, chunk, h, false, rows, s.dJ);
                  transposed_lower_product(s.J, rows, s.dJ, kMatrix, rows, s.Z);
                  inverse_adjoint(s.J, rows, s.Z, s.columns, s.dJ);
                  store_chunk(s.dJ, kMatrix, args.da, chunk, h, C);
                });
}

}  // namespace blocks

void block_solve_tril_forward(const BlockProblem<SolveTrilForward>& problem, const Context& context) {
  blocks::solve_tril_forward(problem, context);
}
void block_solve_tril_backward(const BlockProblem<SolveTrilBackward>& problem, const Context& context) {
  blocks::solve_tril_backward(problem, context);
}

}  // namespace fastweight::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fastweight::cpu {
namespace {

HWY_EXPORT(block_solve_tril_forward);
HWY_EXPORT(block_solve_tril_backward);

}  // namespace

void blocks::simd(const BlockProblem<SolveTrilForward>& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(block_solve_tril_forward)(problem, context);
}
void blocks::simd(const BlockProblem<SolveTrilBackward>& problem, const Context& context) {
  HWY_DYNAMIC_DISPATCH(block_solve_tril_backward)(problem, context);
}

}  // namespace fastweight::cpu
#endif
