/* The map of a segment through the C interface: two tokens by hand, and the refusals that only C has. */
#include <math.h>
#include <stdio.h>

#include "fastweight/c_api.h"

static int failures = 0;

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      printf("%s:%d: %s, last error: %s\n", __FILE__, __LINE__, #condition, fw_last_error()); \
      ++failures;                                                                             \
    }                                                                                         \
  } while (0)

enum { T = 2, K = 2, V = 1 };

static int near(const float* x, const double* expected, int count) {
  for (int i = 0; i < count; ++i) {
    if (fabs(x[i] - expected[i]) > 1e-6) return 0;
  }
  return 1;
}

int main(void) {
  const float q[T * K] = {1, 0, 0, 1}, k[T * K] = {1, 0, 0.6f, 0.8f}, v[T * V] = {2, 3}, beta[T] = {0.5f, 1};
  const float d_o[T * V] = {1, 2};
  /* M = (I - k2^T k2) (I - k1^T k1 / 2);  S1 = (1, 0), S2 = S1 + k2^T (3 - 0.6). */
  const double expected_m[K * K] = {0.32, -0.48, -0.24, 0.36};
  const double expected_h[K * V] = {1 + 0.6 * 2.4, 0.8 * 2.4};
  /* G2 = q2^T 2 = (0, 2), G1 = (I - k2^T k2) G2 + q1^T, e = (I - k1^T k1 / 2) G1. */
  const double expected_e[K * V] = {0.5 * (1 - 0.6 * 1.6), 2 - 0.8 * 1.6};
  const int64_t keys[4] = {1, T, 1, K}, values[4] = {1, T, 1, V}, betas[3] = {1, T, 1};
  const int64_t square[4] = {1, 1, K, K}, state[4] = {1, 1, K, V};
  float m[K * K], h[K * V], mt[K * K], e[K * V];

  fw_context context;
  fw_delta_rule_options options;
  fw_delta_rule_inputs inputs;
  fw_delta_rule_map_forward_args forward;
  fw_delta_rule_map_backward_args backward;
  fw_context_init(&context);
  fw_delta_rule_options_init(&options);
  fw_delta_rule_inputs_init(&inputs);
  fw_delta_rule_map_forward_args_init(&forward);
  fw_delta_rule_map_backward_args_init(&backward);
  options.scale = 1;
  inputs.q = fw_tensor_dense(q, FW_F32, 4, keys);
  inputs.k = fw_tensor_dense(k, FW_F32, 4, keys);
  inputs.v = fw_tensor_dense(v, FW_F32, 4, values);
  inputs.beta = fw_tensor_dense(beta, FW_F32, 3, betas);
  forward.inputs = backward.inputs = &inputs;
  forward.options = backward.options = &options;
  forward.m = fw_tensor_dense(m, FW_F32, 4, square);
  forward.h = fw_tensor_dense(h, FW_F32, 4, state);
  backward.d_o = fw_tensor_dense(d_o, FW_F32, 4, values);
  backward.mt = fw_tensor_dense(mt, FW_F32, 4, square);
  backward.e = fw_tensor_dense(e, FW_F32, 4, state);

  const char* name = NULL;
  CHECK(fw_delta_rule_map_forward(&context, &forward, &name) == FW_OK);
  CHECK(name != NULL);
  CHECK(near(m, expected_m, K * K));
  CHECK(near(h, expected_h, K * V));
  CHECK(fw_delta_rule_map_backward(&context, &backward, NULL) == FW_OK);
  CHECK(near(e, expected_e, K * V));
  for (int i = 0; i < K * K; ++i) CHECK(fabsf(mt[i] - m[i % K * K + i / K]) < 1e-6f);

  m[0] = 77;
  forward.inputs = NULL;
  CHECK(fw_delta_rule_map_forward(&context, &forward, NULL) == FW_INVALID_ARGUMENT);
  CHECK(fw_delta_rule_map_backward(&context, NULL, NULL) == FW_INVALID_ARGUMENT);
  backward.struct_size = 1;
  CHECK(fw_delta_rule_map_backward(&context, &backward, NULL) == FW_INVALID_ARGUMENT);
  CHECK(m[0] == 77);
  fw_delta_rule_map_forward_args_init(NULL);
  fw_delta_rule_map_backward_args_init(NULL);
  if (failures == 0) printf("all checks passed\n");
  return failures == 0 ? 0 : 1;
}
