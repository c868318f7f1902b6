/* The C interface of the building blocks as a C99 program sees it: defaults, results, status codes, texts, and that
 * failing calls write nothing. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fastweight/c_api.h"

static int failures = 0;

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      printf("%s:%d: %s, last error: %s\n", __FILE__, __LINE__, #condition, fw_last_error()); \
      ++failures;                                                                             \
    }                                                                                         \
  } while (0)

enum { T = 20, K = 4, V = 3, C = 16 };

static fw_tensor rows(const float* data, int64_t width) {
  const int64_t shape[4] = {1, T, 1, width};
  return fw_tensor_dense(data, FW_F32, 4, shape);
}
static fw_tensor numbers(const float* data) {
  const int64_t shape[3] = {1, T, 1};
  return fw_tensor_dense(data, FW_F32, 3, shape);
}
static fw_tensor one(const float* data) {
  const int64_t shape[1] = {1};
  return fw_tensor_dense(data, FW_F32, 1, shape);
}

/* From raw gates and keys to the WY factors, and one row of U by hand. */
static void test_chain(const fw_context* context) {
  float x[T], a_log[1] = {0}, g[T], gamma[T], k[T * K], y[T * K], rstd[T], v[T * V], beta[T];
  float a[T * C], j[T * C], w[T * K], u[T * V];
  for (int i = 0; i < T; ++i) x[i] = 0.1f * (float)(i % 5) - 2.0f, beta[i] = 0.5f;
  for (int i = 0; i < T * K; ++i) k[i] = (float)(i % 7) - 3.0f;
  for (int i = 0; i < T * V; ++i) v[i] = (float)(i % 4) - 1.5f;
  const char* name = NULL;

  fw_gate_activation_forward_args gate;
  fw_gate_activation_forward_args_init(&gate);
  CHECK(gate.lower_bound == FW_UNSET && gate.chunk_size == 0);
  gate.x = numbers(x);
  gate.a_log = one(a_log);
  gate.g = numbers(g);
  CHECK(fw_gate_activation_forward(context, &gate, &name) == FW_OK);
  CHECK(name != NULL && strcmp(name, "simd") == 0);
  CHECK(fabs(g[3] + log1p(exp((double)x[3]))) < 1e-6);

  fw_chunk_local_cumsum_args sum;
  fw_chunk_local_cumsum_args_init(&sum);
  CHECK(sum.chunk_size == 64 && sum.reverse == 0);
  sum.x = numbers(g);
  sum.chunk_size = C;
  sum.y = numbers(gamma);
  CHECK(fw_chunk_local_cumsum(context, &sum, NULL) == FW_OK);
  CHECK(fabs(gamma[1] - (g[0] + g[1])) < 1e-6 && gamma[C] == g[C]);

  fw_l2norm_forward_args norm;
  fw_l2norm_forward_args_init(&norm);
  CHECK(norm.eps == 1e-6);
  norm.x = rows(k, K);
  norm.y = rows(y, K);
  norm.rstd = numbers(rstd);
  CHECK(fw_l2norm_forward(context, &norm, NULL) == FW_OK);

  fw_scaled_dot_kkt_forward_args kkt;
  fw_scaled_dot_kkt_forward_args_init(&kkt);
  kkt.k = rows(y, K);
  kkt.beta = numbers(beta);
  kkt.gamma = numbers(gamma);
  kkt.a = rows(a, C);
  CHECK(fw_scaled_dot_kkt_forward(context, &kkt, NULL) == FW_OK);
  double dot = 0;
  for (int d = 0; d < K; ++d) dot += (double)y[K + d] * (double)y[d];
  CHECK(fabs(a[C] - 0.5 * dot * exp((double)g[1])) < 1e-6);

  fw_solve_tril_forward_args solve;
  fw_solve_tril_forward_args_init(&solve);
  solve.a = rows(a, C);
  solve.j = rows(j, C);
  CHECK(fw_solve_tril_forward(context, &solve, NULL) == FW_OK);
  CHECK(j[0] == 1 && j[1] == 0 && j[C] == -a[C] && j[C + 1] == 1);

  fw_wy_forward_args wy;
  fw_wy_forward_args_init(&wy);
  wy.k = rows(y, K);
  wy.v = rows(v, V);
  wy.beta = numbers(beta);
  wy.gamma = numbers(gamma);
  wy.j = rows(j, C);
  wy.w = rows(w, K);
  wy.u = rows(u, V);
  CHECK(fw_wy_forward(context, &wy, NULL) == FW_OK);
  CHECK(fabs(u[V] - 0.5 * ((double)v[V] + (double)j[C] * (double)v[0])) < 1e-6);

  /* Every backward runs from C too. */
  float dk[T * K], dv[T * V], da[T * C], dx[T * K], dg[T], da_log[1];
  fw_wy_backward_args wy_backward;
  fw_wy_backward_args_init(&wy_backward);
  wy_backward.k = wy.k, wy_backward.v = wy.v, wy_backward.beta = wy.beta, wy_backward.gamma = wy.gamma;
  wy_backward.j = wy.j;
  wy_backward.du = rows(u, V);
  wy_backward.dv = rows(dv, V);
  wy_backward.da = rows(da, C);
  CHECK(fw_wy_backward(context, &wy_backward, NULL) == FW_OK);
  CHECK(fabs(dv[(T - 1) * V] - 0.5 * (double)u[(T - 1) * V]) < 1e-6); /* the last row of a chunk reaches itself alone */

  fw_scaled_dot_kkt_backward_args kkt_backward;
  fw_scaled_dot_kkt_backward_args_init(&kkt_backward);
  kkt_backward.k = kkt.k, kkt_backward.beta = kkt.beta, kkt_backward.gamma = kkt.gamma;
  kkt_backward.da = rows(da, C);
  kkt_backward.dk = rows(dk, K);
  CHECK(fw_scaled_dot_kkt_backward(context, &kkt_backward, NULL) == FW_OK);

  fw_solve_tril_backward_args solve_backward;
  fw_solve_tril_backward_args_init(&solve_backward);
  solve_backward.j = rows(j, C);
  solve_backward.dj = rows(a, C);
  solve_backward.da = rows(da, C);
  CHECK(fw_solve_tril_backward(context, &solve_backward, NULL) == FW_OK);

  fw_l2norm_backward_args norm_backward;
  fw_l2norm_backward_args_init(&norm_backward);
  norm_backward.y = rows(y, K), norm_backward.rstd = numbers(rstd), norm_backward.dy = rows(dk, K);
  norm_backward.dx = rows(dx, K);
  CHECK(fw_l2norm_backward(context, &norm_backward, NULL) == FW_OK);

  fw_gate_activation_backward_args gate_backward;
  fw_gate_activation_backward_args_init(&gate_backward);
  gate_backward.x = numbers(x), gate_backward.a_log = one(a_log), gate_backward.dg = numbers(beta);
  gate_backward.dx = numbers(dg);
  gate_backward.da_log = one(da_log);
  CHECK(fw_gate_activation_backward(context, &gate_backward, NULL) == FW_OK);
  double expected = 0;
  for (int i = 0; i < T; ++i) expected += 0.5 * (double)g[i];
  CHECK(fabs(da_log[0] - expected) < 1e-5);
}

static void test_errors(const fw_context* context) {
  float a[T * C] = {0}, j[T * C];
  for (int i = 0; i < T * C; ++i) j[i] = 77;
  fw_solve_tril_forward_args solve;
  fw_solve_tril_forward_args_init(&solve);
  CHECK(fw_solve_tril_forward(context, NULL, NULL) == FW_INVALID_ARGUMENT);
  CHECK(fw_solve_tril_forward(NULL, &solve, NULL) == FW_INVALID_ARGUMENT);
  CHECK(fw_solve_tril_forward(context, &solve, NULL) == FW_INVALID_ARGUMENT);
  CHECK(strcmp(fw_last_error(), "a: expected a tensor, got none") == 0);
  solve.a = rows(a, C);
  solve.j = rows(j, C);
  solve.struct_size = 3;
  CHECK(fw_solve_tril_forward(context, &solve, NULL) == FW_INVALID_ARGUMENT);
  CHECK(strstr(fw_last_error(), "args: expected struct_size") != NULL);
  solve.struct_size = sizeof(solve);
  solve.a.shape[1] = T - 1;
  CHECK(fw_solve_tril_forward(context, &solve, NULL) == FW_INVALID_ARGUMENT);
  CHECK(strcmp(fw_last_error(), "j: expected shape [1, 19, 1, 16], got [1, 20, 1, 16]") == 0);
  for (int i = 0; i < T * C; ++i) CHECK(j[i] == 77);
  fw_solve_tril_forward_args_init(NULL);
}

int main(void) {
  fw_context context;
  fw_context_init(&context);
  test_chain(&context);
  test_errors(&context);
  if (failures == 0) printf("all good\n");
  return failures == 0 ? 0 : 1;
}
