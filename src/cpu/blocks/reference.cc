// The building blocks in double precision, as their definitions read.
//
// An item is one chunk and one q/k head with its group of value heads, so that dk is summed over the group in a
// fixed order. A gate per head is a gate per channel with equal channels, whose gradient is the sum over the channels.
#include "cpu/reference.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/workspace.h"
#include "cpu/blocks/chunks.h"
#include "cpu/blocks/kernels.h"
#include "cpu/element.h"

namespace fastweight::cpu::blocks {
namespace {

// The loop ----------------------------------------------------------------------------------------------------------

// body(chunk, head, scratch) with `doubles` doubles of scratch memory.
template <class Body>
void for_each_chunk(const std::vector<Chunk>& chunks, int64_t heads, int64_t doubles, const Context& context,
                    const Body& body) {
  const int64_t items = static_cast<int64_t>(chunks.size()) * heads;
  if (items == 0) return;
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(context), items));
  const Workspace workspace(context, sizeof(double) * static_cast<size_t>(doubles * threads));
  parallel_for(items, threads, [&](int64_t item, int thread) {
    body(chunks[static_cast<size_t>(item / heads)], item % heads,
         static_cast<double*>(workspace.data()) + doubles * thread);
  });
}

// The rows of a norm, in pieces.
std::vector<Chunk> row_table(int64_t rows) { return chunk_table({{0, 0, 0, rows, 0}}, kRowsPerItem); }

// Hands out the rows and matrices of an item's scratch memory.
class ScratchRows {
 public:
  explicit ScratchRows(double* memory) : next_(memory) {}
  double* take(int64_t count) {
    double* const taken = next_;
    next_ += count;
    return taken;
  }

 private:
  double* next_;
};

// Chunks to and from [C, width] ---------------------------------------------------------------------------------------

// x[chunk, h, 0 .. width); absent: `otherwise`.
void load_chunk(const TensorView& x, const Chunk& chunk, int64_t h, int64_t width, double otherwise, double* rows) {
  for (int64_t i = 0; i < chunk.length; ++i, rows += width) {
    if (x.present()) {
      load_row(x, at(x, {chunk.batch, chunk.begin + i, h}), width, rows);
    } else {
      fill(rows, width, otherwise);
    }
  }
}

void store_chunk(const TensorView& x, const Chunk& chunk, int64_t h, int64_t width, const double* rows) {
  if (!x.present()) return;
  for (int64_t i = 0; i < chunk.length; ++i) {
    store_row(x, at(x, {chunk.batch, chunk.begin + i, h}), width, rows + i * width);
  }
}

void load_numbers(const TensorView& x, const Chunk& chunk, int64_t h, double otherwise, double* numbers) {
  for (int64_t i = 0; i < chunk.length; ++i) {
    numbers[i] = x.present() ? load(x, at(x, {chunk.batch, chunk.begin + i, h})) : otherwise;
  }
}

void store_numbers(const TensorView& x, const Chunk& chunk, int64_t h, const double* numbers) {
  for (int64_t i = 0; i < chunk.length && x.present(); ++i) {
    store(x, at(x, {chunk.batch, chunk.begin + i, h}), numbers[i]);
  }
}

// Of a chunk matrix: columns 0 .. i - 1 of row i, and the diagonal if asked for. The rest of [C, C] becomes 0.
void load_lower(const TensorView& x, const Chunk& chunk, int64_t h, bool diagonal, double* matrix) {
  const int64_t C = x.shape[3];
  fill(matrix, C * C, 0);
  for (int64_t i = 0; i < chunk.length; ++i) {
    load_row(x, at(x, {chunk.batch, chunk.begin + i, h}), i + (diagonal ? 1 : 0), matrix + i * C);
  }
}

// gamma as [C, K], whatever the gate.
void load_gamma(const TensorView& gamma, const Chunk& chunk, int64_t h, const BlockSizes& sizes, double* rows) {
  const int64_t K = sizes.head_dim_k;
  if (sizes.gate == Gate::kPerChannel) return load_chunk(gamma, chunk, h, K, 0, rows);
  for (int64_t i = 0; i < chunk.length; ++i) {
    fill(rows + i * K, K, gamma.present() ? load(gamma, at(gamma, {chunk.batch, chunk.begin + i, h})) : 0);
  }
}

// dgamma from [C, K].
void store_dgamma(const TensorView& dgamma, const Chunk& chunk, int64_t h, const BlockSizes& sizes, double* rows) {
  const int64_t K = sizes.head_dim_k;
  if (sizes.gate == Gate::kPerChannel) return store_chunk(dgamma, chunk, h, K, rows);
  for (int64_t i = 0; i < chunk.length; ++i) {
    for (int64_t d = 1; d < K; ++d) rows[i * K] += rows[i * K + d];
    rows[i] = rows[i * K];
  }
  store_numbers(dgamma, chunk, h, rows);
}

// Gates ---------------------------------------------------------------------------------------------------------------

// Column d of head h of a gate's rows (BlockProblem): which head of the operator it is, and its place in dt_bias.
struct GateColumns {
  const GateActivationInputs& in;
  const GateActivationOptions& options;
  bool per_channel;
  int64_t width;

  int64_t head(int64_t h, int64_t d) const { return per_channel ? h : d; }
  int64_t bias_index(int64_t h, int64_t d) const { return h * width + d; }
  bool bounded() const { return options.lower_bound != GateActivationOptions::kUnset; }
  double rate(int64_t h, int64_t d) const {
    return in.a_log.present() ? std::exp(load_element(in.a_log, head(h, d))) : 1;
  }
  double bias(int64_t h, int64_t d) const {
    return in.dt_bias.present() ? load_element(in.dt_bias, bias_index(h, d)) : 0;
  }
};

template <class Args>
GateColumns columns_of(const BlockProblem<Args>& problem) {
  return {problem.args.in, problem.args.options, problem.sizes.gate == Gate::kPerChannel, problem.args.in.x.shape[3]};
}

// The key Gram matrix -------------------------------------------------------------------------------------------------

// exp(gamma_i - gamma_j) as [K], from gamma [C, K].
void load_decay(const BlockSizes& sizes, const double* gamma, int64_t i, int64_t j, double* decay) {
  const int64_t K = sizes.head_dim_k, distinct = sizes.gate == Gate::kPerChannel ? K : 1;
  for (int64_t d = 0; d < distinct; ++d) decay[d] = std::exp(gamma[i * K + d] - gamma[j * K + d]);
  fill(decay + distinct, K - distinct, decay[0]);
}

}  // namespace

void reference(const BlockProblem<ChunkLocalCumsum>& problem, const Context& context) {
  const ChunkLocalCumsum& args = problem.args;
  const int64_t width = args.x.shape[3];
  for_each_chunk(chunks_of(problem), args.x.shape[2], 2 * width, context,
                 [&](const Chunk& chunk, int64_t h, double* scratch) {
                   double *row = scratch, *sum = scratch + width;
                   fill(sum, width, 0);
                   for (int64_t n = 0; n < chunk.length; ++n) {
                     const int64_t t = chunk.begin + (args.reverse ? chunk.length - 1 - n : n);
                     load_row(args.x, at(args.x, {chunk.batch, t, h}), width, row);
                     add_scaled(1, row, width, sum);
                     store_row(args.y, at(args.y, {chunk.batch, t, h}), width, sum);
                   }
                 });
}

void reference(const BlockProblem<ScaledDotKktForward>& problem, const Context& context) {
  const BlockSizes& sizes = problem.sizes;
  const ScaledDotKktForward& args = problem.args;
  const int64_t C = sizes.chunk_size, K = sizes.head_dim_k;
  for_each_chunk(chunks_of(problem), sizes.num_heads, 2 * C * K + C * C + C + K, context,
                 [&](const Chunk& chunk, int64_t head, double* scratch) {
                   ScratchRows rows(scratch);
                   double *k = rows.take(C * K), *gamma = rows.take(C * K), *A = rows.take(C * C), *beta = rows.take(C);
                   double* decay = rows.take(K);
                   load_chunk(args.in.k, chunk, head, K, 0, k);
                   for (int64_t h = head * sizes.group; h < (head + 1) * sizes.group; ++h) {
                     load_numbers(args.in.beta, chunk, h, 1, beta);
                     load_gamma(args.in.gamma, chunk, h, sizes, gamma);
                     fill(A, C * C, 0);
                     for (int64_t i = 0; i < chunk.length; ++i) {
                       for (int64_t j = 0; j < i; ++j) {
                         load_decay(sizes, gamma, i, j, decay);
                         double sum = 0;
                         for (int64_t d = 0; d < K; ++d) sum += k[i * K + d] * k[j * K + d] * decay[d];
                         A[i * C + j] = beta[i] * sum;
                       }
                     }
                     store_chunk(args.a, chunk, h, C, A);
                   }
                 });
}

void reference(const BlockProblem<ScaledDotKktBackward>& problem, const Context& context) {
  const BlockSizes& sizes = problem.sizes;
  const ScaledDotKktBackward& args = problem.args;
  const int64_t C = sizes.chunk_size, K = sizes.head_dim_k;
  for_each_chunk(
      chunks_of(problem), sizes.num_heads, 5 * C * K + C * C + 2 * C + K, context,
      [&](const Chunk& chunk, int64_t head, double* scratch) {
        ScratchRows rows(scratch);
        double *k = rows.take(C * K), *gamma = rows.take(C * K), *dA = rows.take(C * C), *beta = rows.take(C);
        double *reads = rows.take(C * K), *writes = rows.take(C * K);  // k's gradient as row and as column of A
        double *dk = rows.take(C * K), *dbeta = rows.take(C), *decay = rows.take(K);
        load_chunk(args.in.k, chunk, head, K, 0, k);
        fill(dk, C * K, 0);
        for (int64_t h = head * sizes.group; h < (head + 1) * sizes.group; ++h) {
          load_numbers(args.in.beta, chunk, h, 1, beta);
          load_gamma(args.in.gamma, chunk, h, sizes, gamma);
          load_lower(args.da, chunk, h, false, dA);
          fill(reads, C * K, 0);
          fill(writes, C * K, 0);
          for (int64_t i = 0; i < chunk.length; ++i) {
            for (int64_t j = 0; j < i; ++j) {
              load_decay(sizes, gamma, i, j, decay);
              for (int64_t d = 0; d < K; ++d) {
                const double E = dA[i * C + j] * decay[d];
                reads[i * K + d] += E * k[j * K + d];
                writes[j * K + d] += E * beta[i] * k[i * K + d];
              }
            }
          }
          for (int64_t i = 0; i < chunk.length; ++i) {
            dbeta[i] = dot(reads + i * K, k + i * K, K);
            for (int64_t d = i * K; d < (i + 1) * K; ++d) {
              reads[d] *= beta[i];
              dk[d] += reads[d] + writes[d];
              gamma[d] = k[d] * (reads[d] - writes[d]);
            }
          }
          store_numbers(args.dbeta, chunk, h, dbeta);
          store_dgamma(args.dgamma, chunk, h, sizes, gamma);
        }
        store_chunk(args.dk, chunk, head, K, dk);
      });
}

void reference(const BlockProblem<SolveTrilForward>& problem, const Context& context) {
  const SolveTrilForward& args = problem.args;
  const int64_t C = problem.sizes.chunk_size;
  for_each_chunk(chunks_of(problem), problem.sizes.num_value_heads, 2 * C * C, context,
                 [&](const Chunk& chunk, int64_t h, double* scratch) {
                   double *A = scratch, *J = scratch + C * C;
                   load_lower(args.a, chunk, h, false, A);
                   fill(J, C * C, 0);
                   for (int64_t i = 0; i < chunk.length; ++i) {
                     J[i * C + i] = 1;
                     for (int64_t m = 0; m < i; ++m) add_scaled(-A[i * C + m], J + m * C, i, J + i * C);
                   }
                   store_chunk(args.j, chunk, h, C, J);
                 });
}

void reference(const BlockProblem<SolveTrilBackward>& problem, const Context& context) {
  const SolveTrilBackward& args = problem.args;
  const int64_t C = problem.sizes.chunk_size;
  for_each_chunk(chunks_of(problem), problem.sizes.num_value_heads, 4 * C * C, context,
                 [&](const Chunk& chunk, int64_t h, double* scratch) {
                   ScratchRows rows(scratch);
                   double *J = rows.take(C * C), *dJ = rows.take(C * C), *Z = rows.take(C * C), *dA = rows.take(C * C);
                   load_lower(args.j, chunk, h, true, J);
                   load_lower(args.dj, chunk, h, false, dJ);
                   fill(Z, C * C, 0);
                   fill(dA, C * C, 0);
                   for (int64_t i = 0; i < chunk.length; ++i) {  // Z = J^T dJ
                     for (int64_t m = i; m < chunk.length; ++m) add_scaled(J[m * C + i], dJ + m * C, C, Z + i * C);
                   }
                   for (int64_t i = 0; i < chunk.length; ++i) {
                     for (int64_t j = 0; j < i; ++j) dA[i * C + j] = -dot(Z + i * C, J + j * C, j + 1);
                   }
                   store_chunk(args.da, chunk, h, C, dA);
                 });
}

void reference(const BlockProblem<WyForward>& problem, const Context& context) {
  const BlockSizes& sizes = problem.sizes;
  const WyForward& args = problem.args;
  const int64_t C = sizes.chunk_size, K = sizes.head_dim_k, V = sizes.head_dim_v, M = std::max(K, V);
  for_each_chunk(chunks_of(problem), sizes.num_heads, C * (2 * K + V + M + C + 1), context,
                 [&](const Chunk& chunk, int64_t head, double* scratch) {
                   ScratchRows rows(scratch);
                   double *k = rows.take(C * K), *gamma = rows.take(C * K), *v = rows.take(C * V);
                   double *product = rows.take(C * M), *J = rows.take(C * C), *beta = rows.take(C);
                   const auto times_J = [&](const double* x, int64_t width) {
                     fill(product, C * width, 0);
                     for (int64_t i = 0; i < chunk.length; ++i) {
                       for (int64_t m = 0; m <= i; ++m) {
                         add_scaled(J[i * C + m], x + m * width, width, product + i * width);
                       }
                     }
                   };
                   load_chunk(args.in.k, chunk, head, K, 0, k);
                   for (int64_t h = head * sizes.group; h < (head + 1) * sizes.group; ++h) {
                     load_numbers(args.in.beta, chunk, h, 1, beta);
                     load_gamma(args.in.gamma, chunk, h, sizes, gamma);
                     load_lower(args.in.j, chunk, h, true, J);
                     load_chunk(args.in.v, chunk, h, V, 0, v);
                     for (int64_t i = 0; i < chunk.length; ++i) {
                       for (int64_t d = i * K; d < (i + 1) * K; ++d) gamma[d] = beta[i] * std::exp(gamma[d]) * k[d];
                       for (int64_t d = i * V; d < (i + 1) * V; ++d) v[d] *= beta[i];
                     }
                     times_J(gamma, K);
                     store_chunk(args.w, chunk, h, K, product);
                     times_J(v, V);
                     store_chunk(args.u, chunk, h, V, product);
                   }
                 });
}

void reference(const BlockProblem<WyBackward>& problem, const Context& context) {
  const BlockSizes& sizes = problem.sizes;
  const WyBackward& args = problem.args;
  const int64_t C = sizes.chunk_size, K = sizes.head_dim_k, V = sizes.head_dim_v;
  for_each_chunk(chunks_of(problem), sizes.num_heads, C * (5 * K + 3 * V + 3 * C + 2), context,
                 [&](const Chunk& chunk, int64_t head, double* scratch) {
                   ScratchRows rows(scratch);
                   double *k = rows.take(C * K), *dk = rows.take(C * K), *read = rows.take(C * K);  // exp(gamma) * k
                   double *dW = rows.take(C * K), *X = rows.take(C * K);
                   double *v = rows.take(C * V), *dU = rows.take(C * V), *Y = rows.take(C * V);
                   double *J = rows.take(C * C), *Z = rows.take(C * C), *dA = rows.take(C * C);
                   double *beta = rows.take(C), *dbeta = rows.take(C);
                   load_chunk(args.in.k, chunk, head, K, 0, k);
                   fill(dk, C * K, 0);
                   for (int64_t h = head * sizes.group; h < (head + 1) * sizes.group; ++h) {
                     load_numbers(args.in.beta, chunk, h, 1, beta);
                     load_gamma(args.in.gamma, chunk, h, sizes, read);
                     load_lower(args.in.j, chunk, h, true, J);
                     load_chunk(args.in.v, chunk, h, V, 0, v);
                     load_chunk(args.dw, chunk, h, K, 0, dW);
                     load_chunk(args.du, chunk, h, V, 0, dU);

                     // X = J^T dW,  Y = J^T dU
                     fill(X, C * K, 0);
                     fill(Y, C * V, 0);
                     for (int64_t i = 0; i < chunk.length; ++i) {
                       for (int64_t m = i; m < chunk.length; ++m) {
                         add_scaled(J[m * C + i], dW + m * K, K, X + i * K);
                         add_scaled(J[m * C + i], dU + m * V, V, Y + i * V);
                       }
                     }
                     // Z = X (beta * exp(gamma) * k)^T + Y (beta * v)^T,  dA = -slower(Z J^T)
                     for (int64_t d = 0; d < chunk.length * K; ++d) read[d] = std::exp(read[d]) * k[d];
                     fill(dA, C * C, 0);
                     for (int64_t i = 0; i < chunk.length; ++i) {
                       for (int64_t m = 0; m < i; ++m) {
                         Z[i * C + m] = beta[m] * (dot(X + i * K, read + m * K, K) + dot(Y + i * V, v + m * V, V));
                       }
                       for (int64_t j = 0; j < i; ++j) dA[i * C + j] = -dot(Z + i * C, J + j * C, j + 1);
                     }
                     store_chunk(args.da, chunk, h, C, dA);

                     // From here on W's share: X becomes dgamma.
                     for (int64_t i = 0; i < chunk.length; ++i) {
                       dbeta[i] = dot(Y + i * V, v + i * V, V) + dot(X + i * K, read + i * K, K);
                       for (int64_t d = i * V; d < (i + 1) * V; ++d) Y[d] *= beta[i];
                     }
                     store_numbers(args.dbeta, chunk, h, dbeta);
                     store_chunk(args.dv, chunk, h, V, Y);
                     load_gamma(args.in.gamma, chunk, h, sizes, dW);
                     for (int64_t i = 0; i < chunk.length; ++i) {
                       for (int64_t d = i * K; d < (i + 1) * K; ++d) {
                         const double through_W = beta[i] * std::exp(dW[d]) * X[d];
                         dk[d] += through_W;
                         X[d] = k[d] * through_W;
                       }
                     }
                     store_dgamma(args.dgamma, chunk, h, sizes, X);
                   }
                   store_chunk(args.dk, chunk, head, K, dk);
                 });
}

void reference(const BlockProblem<L2NormForward>& problem, const Context& context) {
  const L2NormForward& args = problem.args;
  const int64_t D = args.x.shape[static_cast<size_t>(args.x.rank - 1)];
  int64_t count = 1;
  for (size_t axis = 0; axis + 1 < static_cast<size_t>(args.x.rank); ++axis) count *= args.x.shape[axis];
  for_each_chunk(row_table(count), 1, D, context, [&](const Chunk& rows, int64_t, double* row) {
    for (int64_t i = rows.begin; i < rows.begin + rows.length; ++i) {
      load_row(args.x, element_offset(args.x, i * D), D, row);
      const double rstd = 1 / std::sqrt(dot(row, row, D) + args.eps);
      for (int64_t d = 0; d < D; ++d) row[d] *= rstd;
      store_row(args.y, element_offset(args.y, i * D), D, row);
      if (args.rstd.present()) store_element(args.rstd, i, rstd);
    }
  });
}

void reference(const BlockProblem<L2NormBackward>& problem, const Context& context) {
  const L2NormBackward& args = problem.args;
  const int64_t D = args.y.shape[static_cast<size_t>(args.y.rank - 1)];
  int64_t count = 1;
  for (size_t axis = 0; axis + 1 < static_cast<size_t>(args.y.rank); ++axis) count *= args.y.shape[axis];
  for_each_chunk(row_table(count), 1, 2 * D, context, [&](const Chunk& rows, int64_t, double* y) {
    double* dy = y + D;
    for (int64_t i = rows.begin; i < rows.begin + rows.length; ++i) {
      load_row(args.y, element_offset(args.y, i * D), D, y);
      load_row(args.dy, element_offset(args.dy, i * D), D, dy);
      const double rstd = load_element(args.rstd, i), along = dot(y, dy, D);
      for (int64_t d = 0; d < D; ++d) dy[d] = rstd * (dy[d] - y[d] * along);
      store_row(args.dx, element_offset(args.dx, i * D), D, dy);
    }
  });
}

void reference(const BlockProblem<GateActivationForward>& problem, const Context& context) {
  const GateActivationForward& args = problem.args;
  const GateColumns columns = columns_of(problem);
  const TensorView& x = args.in.x;
  for_each_chunk(chunks_of(problem), x.shape[2], 0, context, [&](const Chunk& chunk, int64_t h, double*) {
    for (int64_t d = 0; d < columns.width; ++d) {
      const double a = columns.rate(h, d), bias = columns.bias(h, d);
      double sum = 0;
      for (int64_t t = chunk.begin; t < chunk.begin + chunk.length; ++t) {
        const double z = load(x, at(x, {chunk.batch, t, h, d})) + bias;
        const double g = columns.bounded() ? args.options.lower_bound * sigmoid(a * z) : -a * softplus(z);
        sum = args.options.chunk_size == 0 ? g : sum + g;
        store(args.g, at(args.g, {chunk.batch, t, h, d}), sum);
      }
    }
  });
}

void reference(const BlockProblem<GateActivationBackward>& problem, const Context& context) {
  const GateActivationBackward& args = problem.args;
  const GateColumns columns = columns_of(problem);
  const TensorView& x = args.in.x;
  const int64_t heads = x.shape[2], width = columns.width;
  const std::vector<Chunk> chunks = chunks_of(problem);

  // One item per column of a head, all tokens in order: its sums need no further care.
  const Workspace workspace(context, sizeof(double) * static_cast<size_t>(2 * heads * width));
  double* const da_log = static_cast<double*>(workspace.data());
  double* const ddt_bias = da_log + heads * width;
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(context), heads * width));
  parallel_for(heads * width, threads, [&](int64_t item, int) {
    const int64_t h = item / width, d = item % width;
    const double a = columns.rate(h, d), bias = columns.bias(h, d);
    da_log[item] = ddt_bias[item] = 0;
    for (const Chunk& chunk : chunks) {
      double sum = 0;
      for (int64_t t = chunk.begin + chunk.length - 1; t >= chunk.begin; --t) {
        const double z = load(x, at(x, {chunk.batch, t, h, d})) + bias;
        const double above = load(args.dg, at(args.dg, {chunk.batch, t, h, d}));
        sum = args.options.chunk_size == 0 ? above : sum + above;
        double dx;
        if (columns.bounded()) {
          const double y = sigmoid(a * z);
          dx = args.options.lower_bound * y * (1 - y) * a * sum;
          da_log[item] += dx * z;
        } else {
          dx = -a * sigmoid(z) * sum;
          da_log[item] += sum * -a * softplus(z);
        }
        ddt_bias[item] += dx;
        if (args.dx.present()) store(args.dx, at(args.dx, {chunk.batch, t, h, d}), dx);
      }
    }
  });

  const int64_t per_head = columns.per_channel ? width : 1;  // columns that share an A_log
  for (int64_t h = 0; h < problem.sizes.num_value_heads; ++h) {
    double sum = 0;
    for (int64_t d = h * per_head; d < (h + 1) * per_head; ++d) {
      sum += da_log[d];
      if (args.ddt_bias.present()) store_element(args.ddt_bias, d, ddt_bias[d]);
    }
    if (args.da_log.present()) store_element(args.da_log, h, sum);
  }
}

namespace {

// One row of the norm: n = x rstd, a = activation(gate) and its derivative, weight.
struct NormRow {
  double rstd;
  double *n, *a, *slope, *weight;  // [D]
};

NormRow norm_row(const RmsNormInputs& in, const RmsNormOptions& options, int64_t i, int64_t D, double* memory) {
  NormRow row{0, memory, memory + D, memory + 2 * D, memory + 3 * D};
  load_row(in.x, element_offset(in.x, i * D), D, row.n);
  row.rstd = 1 / std::sqrt(dot(row.n, row.n, D) / static_cast<double>(D) + options.eps);
  for (int64_t d = 0; d < D; ++d) {
    row.n[d] *= row.rstd;
    row.weight[d] = in.weight.present() ? load_element(in.weight, d) : 1;
    row.a[d] = 1;
    row.slope[d] = 0;
    if (!in.gate.present()) continue;
    const double z = load(in.gate, element_offset(in.gate, i * D + d)), y = sigmoid(z);
    const bool silu = options.activation == NormGate::kSilu;
    row.a[d] = silu ? z * y : y;
    row.slope[d] = silu ? y * (1 + z * (1 - y)) : y * (1 - y);
  }
  return row;
}

int64_t row_count(const TensorView& x) {
  int64_t count = 1;
  for (size_t axis = 0; axis + 1 < static_cast<size_t>(x.rank); ++axis) count *= x.shape[axis];
  return count;
}

}  // namespace

void reference(const BlockProblem<RmsNormForward>& problem, const Context& context) {
  const RmsNormForward& args = problem.args;
  const int64_t D = args.in.x.shape[static_cast<size_t>(args.in.x.rank - 1)];
  for_each_chunk(row_table(row_count(args.in.x)), 1, 4 * D, context, [&](const Chunk& rows, int64_t, double* memory) {
    for (int64_t i = rows.begin; i < rows.begin + rows.length; ++i) {
      const NormRow row = norm_row(args.in, args.options, i, D, memory);
      for (int64_t d = 0; d < D; ++d) row.n[d] *= row.weight[d] * row.a[d];
      store_row(args.y, element_offset(args.y, i * D), D, row.n);
    }
  });
}

void reference(const BlockProblem<RmsNormBackward>& problem, const Context& context) {
  const RmsNormBackward& args = problem.args;
  const int64_t D = args.in.x.shape[static_cast<size_t>(args.in.x.rank - 1)], count = row_count(args.in.x);
  for_each_chunk(row_table(count), 1, 5 * D, context, [&](const Chunk& rows, int64_t, double* memory) {
    double* dn = memory + 4 * D;
    for (int64_t i = rows.begin; i < rows.begin + rows.length; ++i) {
      const NormRow row = norm_row(args.in, args.options, i, D, memory);
      load_row(args.dy, element_offset(args.dy, i * D), D, dn);
      for (int64_t d = 0; d < D; ++d) {
        row.slope[d] *= dn[d] * row.weight[d] * row.n[d];
        dn[d] *= row.weight[d] * row.a[d];
      }
      if (args.dgate.present()) store_row(args.dgate, element_offset(args.dgate, i * D), D, row.slope);
      const double along = dot(dn, row.n, D) / static_cast<double>(D);
      for (int64_t d = 0; d < D; ++d) dn[d] = row.rstd * (dn[d] - row.n[d] * along);
      if (args.dx.present()) store_row(args.dx, element_offset(args.dx, i * D), D, dn);
    }
  });
  if (!args.dweight.present()) return;
  std::vector<double> memory(static_cast<size_t>(6 * D), 0.0);
  double *dy = memory.data() + 4 * D, *sums = dy + D;
  for (int64_t i = 0; i < count; ++i) {
    const NormRow row = norm_row(args.in, args.options, i, D, memory.data());
    load_row(args.dy, element_offset(args.dy, i * D), D, dy);
    for (int64_t d = 0; d < D; ++d) sums[d] += dy[d] * row.n[d] * row.a[d];
  }
  for (int64_t d = 0; d < D; ++d) store_element(args.dweight, d, sums[d]);
}

}  // namespace fastweight::cpu::blocks
