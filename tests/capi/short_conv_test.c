/* The C interface of the short convolution as a C99 program sees it: results, status codes, texts, and that failing
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

enum { B = 2, T = 3, D = 2, W = 4, ROWS = B * T * D, STATE = B * D * W };

static const float kPoison = 77.0f;

/* One valid call of each mode; `fill` makes it, a test then spoils it. */
typedef struct call {
  float x[ROWS], w[D * W], bias[D], y[ROWS], dx[ROWS], dw[D * W], state[STATE], final_state[STATE];
  int32_t slots[B];
  fw_context context;
  fw_short_conv_options options;
  fw_short_conv_inputs inputs;
  fw_short_conv_forward_args forward;
  fw_short_conv_backward_args backward;
  fw_short_conv_step_args step;
} call;

static void fill(call* c) {
  const int64_t rows[3] = {B, T, D}, taps[2] = {D, W}, channels[1] = {D}, state[3] = {B, D, W}, slots[1] = {B};
  memset(c, 0, sizeof(*c));
  for (int i = 0; i < ROWS; ++i) {
    c->x[i] = (float)(i % 5) - 2.0f;
    c->y[i] = c->dx[i] = kPoison;
  }
  for (int i = 0; i < D * W; ++i) {
    c->w[i] = 0.25f * (float)(i % 3 + 1);
    c->dw[i] = kPoison;
  }
  for (int i = 0; i < D; ++i) c->bias[i] = 0.5f;
  for (int i = 0; i < STATE; ++i) c->final_state[i] = kPoison;
  for (int i = 0; i < B; ++i) c->slots[i] = B - 1 - i;

  fw_context_init(&c->context);
  fw_short_conv_options_init(&c->options);
  fw_short_conv_inputs_init(&c->inputs);
  fw_short_conv_forward_args_init(&c->forward);
  fw_short_conv_backward_args_init(&c->backward);
  fw_short_conv_step_args_init(&c->step);
  c->inputs.x = fw_tensor_dense(c->x, FW_F32, 3, rows);
  c->inputs.w = fw_tensor_dense(c->w, FW_F32, 2, taps);
  c->inputs.bias = fw_tensor_dense(c->bias, FW_F32, 1, channels);
  c->forward.inputs = c->backward.inputs = c->step.inputs = &c->inputs;
  c->forward.options = c->backward.options = c->step.options = &c->options;
  c->forward.y = c->step.y = fw_tensor_dense(c->y, FW_F32, 3, rows);
  c->forward.final_state = fw_tensor_dense(c->final_state, FW_F32, 3, state);
  c->backward.dy = fw_tensor_dense(c->x, FW_F32, 3, rows);
  c->backward.dx = fw_tensor_dense(c->dx, FW_F32, 3, rows);
  c->backward.dw = fw_tensor_dense(c->dw, FW_F32, 2, taps);
  c->step.state = fw_tensor_dense(c->state, FW_F32, 3, state);
  c->step.state_indices = fw_tensor_dense(c->slots, FW_I32, 1, slots);
}

static int untouched(const call* c) {
  for (int i = 0; i < ROWS; ++i) {
    if (c->y[i] != kPoison || c->dx[i] != kPoison) return 0;
  }
  for (int i = 0; i < STATE; ++i) {
    if (c->state[i] != 0 || c->final_state[i] != kPoison) return 0;
  }
  return 1;
}

static float x_at(const call* c, int b, int t, int d) { return t < 0 ? 0 : c->x[(b * T + t) * D + d]; }

static void test_results(void) {
  call c;
  const char* name = NULL;
  for (int silu = 0; silu < 2; ++silu) {
    fill(&c);
    c.options.activation = silu ? FW_ACTIVATION_SILU : FW_ACTIVATION_NONE;
    CHECK(fw_short_conv_forward(&c.context, &c.forward, &name) == FW_OK);
    CHECK(name != NULL && strcmp(name, "direct") == 0);
    for (int b = 0; b < B; ++b) {
      for (int d = 0; d < D; ++d) {
        for (int t = 0; t < T; ++t) {
          double z = c.bias[d];
          for (int i = 0; i < W; ++i) z += (double)c.w[d * W + i] * (double)x_at(&c, b, t - W + 1 + i, d);
          const double y = silu ? z / (1 + exp(-z)) : z;
          CHECK(fabs((double)c.y[(b * T + t) * D + d] - y) < 1e-6);
        }
        for (int i = 0; i < W; ++i) CHECK(c.final_state[(b * D + d) * W + i] == x_at(&c, b, T - W + i, d));
      }
    }
    CHECK(fw_short_conv_backward(&c.context, &c.backward, NULL) == FW_OK);
    CHECK(c.dx[0] != kPoison && c.dw[0] != kPoison);

    float y[ROWS];
    memcpy(y, c.y, sizeof(y));
    CHECK(fw_short_conv_step(&c.context, &c.step, NULL) == FW_OK);
    CHECK(memcmp(y, c.y, sizeof(y)) == 0);
    CHECK(memcmp(c.state, c.final_state + D * W, D * W * sizeof(float)) == 0); /* the slots are swapped */
  }
}

static void test_errors(void) {
  call c;
#define INVALID(argument, ...)                                                           \
  do {                                                                                   \
    fill(&c);                                                                            \
    __VA_ARGS__;                                                                         \
    CHECK(fw_short_conv_forward(&c.context, &c.forward, NULL) == FW_INVALID_ARGUMENT);   \
    CHECK(strncmp(fw_last_error(), argument, strlen(argument)) == 0);                    \
    CHECK(fw_short_conv_backward(&c.context, &c.backward, NULL) == FW_INVALID_ARGUMENT); \
    CHECK(strncmp(fw_last_error(), argument, strlen(argument)) == 0);                    \
    CHECK(fw_short_conv_step(&c.context, &c.step, NULL) == FW_INVALID_ARGUMENT);         \
    CHECK(strncmp(fw_last_error(), argument, strlen(argument)) == 0);                    \
    CHECK(untouched(&c));                                                                \
  } while (0)
  INVALID("x: ", c.inputs.x.rank = 2);
  INVALID("w: ", c.inputs.w.shape[0] = 3);
  INVALID("bias: ", c.inputs.bias.dtype = FW_I32);
  INVALID("activation: ", c.options.activation = 7);
  INVALID("options: ", c.options.struct_size = 3);
  INVALID("inputs: ", c.inputs.struct_size = 0);
  INVALID("args: ", c.forward.struct_size = c.backward.struct_size = c.step.struct_size = 8);
  INVALID("inputs: ", c.forward.inputs = c.backward.inputs = c.step.inputs = NULL);
  INVALID("options: ", c.forward.options = c.backward.options = c.step.options = NULL);
#undef INVALID

  fill(&c);
  CHECK(fw_short_conv_forward(NULL, &c.forward, NULL) == FW_INVALID_ARGUMENT);
  CHECK(fw_short_conv_forward(&c.context, NULL, NULL) == FW_INVALID_ARGUMENT);
  CHECK(fw_short_conv_backward(&c.context, NULL, NULL) == FW_INVALID_ARGUMENT);
  CHECK(fw_short_conv_step(&c.context, NULL, NULL) == FW_INVALID_ARGUMENT);
  fw_short_conv_options_init(NULL);
  fw_short_conv_inputs_init(NULL);
  fw_short_conv_forward_args_init(NULL);
  fw_short_conv_backward_args_init(NULL);
  fw_short_conv_step_args_init(NULL);
}

int main(void) {
  test_results();
  test_errors();
  if (failures == 0) printf("all passed\n");
  return failures == 0 ? 0 : 1;
}
