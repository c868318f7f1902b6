/* The C interface of the related families as a C99 program sees it: results, status codes, texts, and that failing
 * calls write nothing. */
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

enum { T = 3, H = 2, K = 4, V = 3, KEYS = T * H * K, VALUES = T * H * V };

static const float kPoison = 77.0f;
static const int64_t kKeyShape[4] = {1, T, H, K}, kValueShape[4] = {1, T, H, V}, kGateShape[3] = {1, T, H};
static const int64_t kHeadShape[1] = {H}, kStateShape[4] = {1, H, K, V};

static float q[KEYS], k[KEYS], p[KEYS], a[KEYS], v[VALUES], g[T * H], g_gamma[H], beta[T * H], o[VALUES], dq[KEYS];
static float slots[H * K * V];

static void fill(void) {
  for (int i = 0; i < KEYS; ++i) {
    q[i] = (float)(i % 5) * 0.1f;
    k[i] = (float)(i % 3) * 0.2f;
    p[i] = (float)(i % 4) * 0.15f;
    a[i] = -0.5f * k[i];
    dq[i] = kPoison;
  }
  for (int i = 0; i < VALUES; ++i) {
    v[i] = (float)(i % 7) - 3.0f;
    o[i] = kPoison;
  }
  for (int i = 0; i < T * H; ++i) {
    g[i] = -0.1f * (float)(i % 3);
    beta[i] = 0.5f;
  }
  memset(slots, 0, sizeof slots);
  for (int i = 0; i < H; ++i) g_gamma[i] = -0.2f * (float)(i + 1);
}

enum family { GLA, COMBA, DPLR };

/* The definitions of the headers, token by token. */
static int is_expected(enum family family) {
  for (int h = 0; h < H; ++h) {
    double state[K][V] = {{0}};
    for (int t = 0; t < T; ++t) {
      const int row = t * H + h;
      const double decay = family == GLA ? exp(g_gamma[h]) : family == COMBA ? exp(g[row]) : 1;
      for (int j = 0; j < V; ++j) {
        double read = 0, u = v[row * V + j], sum = 0;
        for (int i = 0; i < K; ++i) read += (family == DPLR ? a : p)[row * K + i] * state[i][j];
        if (family == COMBA) u = beta[row] * (u - read);
        for (int i = 0; i < K; ++i) {
          state[i][j] = decay * state[i][j] + k[row * K + i] * u;
          if (family == DPLR) state[i][j] += p[row * K + i] * read;
          sum += q[row * K + i] * state[i][j];
        }
        if (!(fabs(o[row * V + j] - sum / sqrt((double)K)) < 1e-5)) return 0;
      }
    }
  }
  return 1;
}

/* Calls of one family: a constant decay for GLA, p in place of b for DPLR without a gate. */
#define TEST_FAMILY(family, FAMILY, set_inputs)                                                         \
  static void test_##family(void) {                                                                     \
    fw_context context;                                                                                 \
    fw_##family##_options options;                                                                      \
    fw_##family##_inputs inputs;                                                                        \
    fw_##family##_forward_args forward;                                                                 \
    fw_##family##_backward_args backward;                                                               \
    fw_##family##_step_args step;                                                                       \
    const char* name = NULL;                                                                            \
    fill();                                                                                             \
    fw_context_init(&context);                                                                          \
    fw_##family##_options_init(&options);                                                               \
    fw_##family##_inputs_init(&inputs);                                                                 \
    fw_##family##_forward_args_init(&forward);                                                          \
    fw_##family##_backward_args_init(&backward);                                                        \
    fw_##family##_step_args_init(&step);                                                                \
    inputs.q = fw_tensor_dense(q, FW_F32, 4, kKeyShape);                                                \
    inputs.k = fw_tensor_dense(k, FW_F32, 4, kKeyShape);                                                \
    inputs.v = fw_tensor_dense(v, FW_F32, 4, kValueShape);                                              \
    set_inputs;                                                                                         \
    forward.inputs = backward.inputs = &inputs;                                                         \
    forward.options = backward.options = &options;                                                      \
    forward.o = fw_tensor_dense(o, FW_F32, 4, kValueShape);                                             \
    backward.d_o = fw_tensor_dense(v, FW_F32, 4, kValueShape);                                          \
    backward.dq = fw_tensor_dense(dq, FW_F32, 4, kKeyShape);                                            \
    step.inputs = &inputs;                                                                              \
    step.options = &options;                                                                            \
    step.state = fw_tensor_dense(slots, FW_F32, 4, kStateShape);                                        \
    step.o = fw_tensor_dense(o, FW_F32, 4, kValueShape);                                                \
                                                                                                        \
    CHECK(fw_##family##_forward(&context, &forward, &name) == FW_OK);                                   \
    CHECK(name != NULL && strcmp(name, "recurrent") == 0);                                              \
    CHECK(is_expected(FAMILY));                                                                         \
    CHECK(fw_##family##_backward(&context, &backward, NULL) == FW_OK);                                  \
    CHECK(dq[0] != kPoison);                                                                            \
    memset(o, 0, sizeof o);                                                                             \
    CHECK(fw_##family##_step(&context, &step, &name) == FW_OK && strcmp(name, "recurrent") == 0);       \
    CHECK(is_expected(FAMILY) && slots[V + 1] != 0);                                                    \
    context.implementation = "reference";                                                               \
    CHECK(fw_##family##_forward(&context, &forward, &name) == FW_OK && strcmp(name, "reference") == 0); \
    CHECK(is_expected(FAMILY));                                                                         \
                                                                                                        \
    fill();                                                                                             \
    inputs.k.shape[3] = 3;                                                                              \
    CHECK(fw_##family##_forward(&context, &forward, NULL) == FW_INVALID_ARGUMENT);                      \
    CHECK(strcmp(fw_last_error(), "k: expected shape [1, 3, 2, 4], got [1, 3, 2, 3]") == 0);            \
    CHECK(fw_##family##_backward(&context, &backward, NULL) == FW_INVALID_ARGUMENT);                    \
    CHECK(fw_##family##_step(&context, &step, NULL) == FW_INVALID_ARGUMENT);                            \
    inputs.struct_size = 0;                                                                             \
    CHECK(fw_##family##_forward(&context, &forward, NULL) == FW_INVALID_ARGUMENT);                      \
    CHECK(strstr(fw_last_error(), "inputs: expected struct_size") != NULL);                             \
    forward.inputs = NULL;                                                                              \
    CHECK(fw_##family##_forward(&context, &forward, NULL) == FW_INVALID_ARGUMENT);                      \
    CHECK(fw_##family##_forward(&context, NULL, NULL) == FW_INVALID_ARGUMENT);                          \
    CHECK(fw_##family##_forward(NULL, &forward, NULL) == FW_INVALID_ARGUMENT);                          \
    CHECK(o[0] == kPoison && dq[0] == kPoison);                                                         \
    fw_##family##_options_init(NULL);                                                                   \
    fw_##family##_inputs_init(NULL);                                                                    \
    fw_##family##_forward_args_init(NULL);                                                              \
    fw_##family##_backward_args_init(NULL);                                                             \
    fw_##family##_step_args_init(NULL);                                                                 \
  }

TEST_FAMILY(gla, GLA, {
  options.gate = FW_GATE_PER_HEAD;
  inputs.g_gamma = fw_tensor_dense(g_gamma, FW_F32, 1, kHeadShape);
})
TEST_FAMILY(comba, COMBA, {
  inputs.p = fw_tensor_dense(p, FW_F32, 4, kKeyShape);
  inputs.g = fw_tensor_dense(g, FW_F32, 3, kGateShape);
  inputs.beta = fw_tensor_dense(beta, FW_F32, 3, kGateShape);
})
TEST_FAMILY(dplr, DPLR, {
  options.gate = FW_GATE_NONE;
  inputs.a = fw_tensor_dense(a, FW_F32, 4, kKeyShape);
  inputs.b = fw_tensor_dense(p, FW_F32, 4, kKeyShape);
})

int main(void) {
  test_gla();
  test_comba();
  test_dplr();
  if (failures == 0) printf("all passed\n");
  return failures == 0 ? 0 : 1;
}
