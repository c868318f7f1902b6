/* The C interface of TTT-linear as a C99 program sees it: results, status codes, texts, and that failing calls write
 * nothing. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
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

enum { B = 2, T = 3, H = 2, D = 4, ROWS = B * T * H * D, STATE = B * H * D * D, BIAS = B * H * D };

static const float kPoison = 77.0f;

/* One valid call of each mode; `fill` makes it, a test then spoils it. */
typedef struct call {
  float q[ROWS], k[ROWS], v[ROWS], w[H * D], b[H * D], eta[B * T * H];
  float o[ROWS], dq[ROWS], dw[H * D], final_bias[BIAS];
  float state[STATE], state_bias[BIAS], gradient[STATE], gradient_bias[BIAS];
  int32_t position[B], slots[B];
  int64_t cu_seqlens[3];
  fw_context context;
  fw_ttt_linear_options options;
  fw_ttt_linear_inputs inputs;
  fw_ttt_linear_forward_args forward;
  fw_ttt_linear_backward_args backward;
  fw_ttt_linear_step_args step;
} call;

static void fill(call* c) {
  const int64_t rows[4] = {B, T, H, D}, norm[2] = {H, D}, eta[3] = {B, T, H};
  const int64_t state[4] = {B, H, D, D}, bias[4] = {B, H, 1, D}, slots[1] = {B};
  memset(c, 0, sizeof(*c));
  for (int i = 0; i < ROWS; ++i) {
    c->q[i] = (float)(i % 5) * 0.1f;
    c->k[i] = (float)(i % 3) * 0.2f;
    c->v[i] = (float)(i % 7) - 3.0f;
    c->o[i] = c->dq[i] = kPoison;
  }
  for (int i = 0; i < H * D; ++i) {
    c->w[i] = 1.0f + (float)(i % 3) * 0.25f;
    c->b[i] = (float)(i % 4) * 0.5f;
    c->dw[i] = kPoison;
  }
  for (int i = 0; i < B * T * H; ++i) c->eta[i] = 0.01f * (float)(i % 3 + 1);
  for (int i = 0; i < BIAS; ++i) {
    c->final_bias[i] = kPoison;
    c->state_bias[i] = (float)(i % 3);
  }
  for (int i = 0; i < B; ++i) c->slots[i] = B - 1 - i;

  fw_context_init(&c->context);
  fw_ttt_linear_options_init(&c->options);
  fw_ttt_linear_inputs_init(&c->inputs);
  fw_ttt_linear_forward_args_init(&c->forward);
  fw_ttt_linear_backward_args_init(&c->backward);
  fw_ttt_linear_step_args_init(&c->step);
  c->inputs.q = fw_tensor_dense(c->q, FW_F32, 4, rows);
  c->inputs.k = fw_tensor_dense(c->k, FW_F32, 4, rows);
  c->inputs.v = fw_tensor_dense(c->v, FW_F32, 4, rows);
  c->inputs.w = fw_tensor_dense(c->w, FW_F32, 2, norm);
  c->inputs.b = fw_tensor_dense(c->b, FW_F32, 2, norm);
  c->inputs.eta = fw_tensor_dense(c->eta, FW_F32, 3, eta);
  c->forward.inputs = c->backward.inputs = c->step.inputs = &c->inputs;
  c->forward.options = c->backward.options = c->step.options = &c->options;
  c->forward.o = c->step.o = fw_tensor_dense(c->o, FW_F32, 4, rows);
  c->forward.final_state_bias = fw_tensor_dense(c->final_bias, FW_F32, 4, bias);
  c->backward.d_o = fw_tensor_dense(c->v, FW_F32, 4, rows);
  c->backward.dq = fw_tensor_dense(c->dq, FW_F32, 4, rows);
  c->backward.dw = fw_tensor_dense(c->dw, FW_F32, 2, norm);
  c->step.state = fw_tensor_dense(c->state, FW_F32, 4, state);
  c->step.state_bias = fw_tensor_dense(c->state_bias, FW_F32, 4, bias);
  c->step.gradient = fw_tensor_dense(c->gradient, FW_F32, 4, state);
  c->step.gradient_bias = fw_tensor_dense(c->gradient_bias, FW_F32, 4, bias);
  c->step.position = fw_tensor_dense(c->position, FW_I32, 1, slots);
  c->step.state_indices = fw_tensor_dense(c->slots, FW_I32, 1, slots);
}

static int untouched(const call* c) {
  for (int i = 0; i < ROWS; ++i) {
    if (c->o[i] != kPoison || c->dq[i] != kPoison) return 0;
  }
  for (int i = 0; i < H * D; ++i) {
    if (c->dw[i] != kPoison) return 0;
  }
  for (int i = 0; i < STATE; ++i) {
    if (c->state[i] != 0.0f || c->gradient[i] != 0.0f) return 0;
  }
  for (int i = 0; i < BIAS; ++i) {
    if (c->final_bias[i] != kPoison || c->gradient_bias[i] != 0.0f) return 0;
  }
  return c->position[0] == 0;
}

/* xhat of a row; returns 1 / sqrt(variance + eps). */
static double normalise(const double* z, double* xhat) {
  double mean = 0, variance = 0;
  for (int i = 0; i < D; ++i) mean += z[i] / D;
  for (int i = 0; i < D; ++i) variance += (z[i] - mean) * (z[i] - mean) / D;
  const double rho = 1 / sqrt(variance + 1e-6);
  for (int i = 0; i < D; ++i) xhat[i] = (z[i] - mean) * rho;
  return rho;
}

/* The definition, token by token, for fewer tokens than a mini-batch: the state stays (0, bias). The rows of o of one
 * batch entry. */
static void expected_output(const call* c, int batch, int slot, double* o) {
  for (int h = 0; h < H; ++h) {
    const float *w = c->w + h * D, *bias = c->b + h * D, *start = c->state_bias + (slot * H + h) * D;
    double sum[D][D] = {{0}}, row_sum[D] = {0};
    for (int t = 0; t < T; ++t) {
      const int row = (batch * T + t) * H + h;
      const float *q = c->q + row * D, *k = c->k + row * D, *v = c->v + row * D;
      double z[D], x[D], y[D], mean = 0, along = 0;
      for (int i = 0; i < D; ++i) z[i] = start[i];
      const double rho = normalise(z, x);
      for (int i = 0; i < D; ++i) {
        y[i] = w[i] * (w[i] * x[i] + bias[i] - v[i] + k[i]);
        mean += y[i] / D;
        along += x[i] * y[i] / D;
      }
      for (int i = 0; i < D; ++i) {
        const double n = rho * (y[i] - mean - x[i] * along);
        row_sum[i] += n;
        for (int j = 0; j < D; ++j) sum[j][i] += k[j] * n;
      }
      for (int i = 0; i < D; ++i) {
        z[i] = start[i] - c->eta[row] * row_sum[i];
        for (int j = 0; j < D; ++j) z[i] -= q[j] / sqrt((double)D) * c->eta[row] * sum[j][i];
      }
      normalise(z, x);
      for (int i = 0; i < D; ++i) o[(t * H + h) * D + i] = z[i] + w[i] * x[i] + bias[i];
    }
  }
}

static int is_expected(const call* before, const call* after, int indexed) {
  for (int batch = 0; batch < B; ++batch) {
    double o[T * H * D];
    expected_output(before, batch, indexed ? before->slots[batch] : batch, o);
    for (int i = 0; i < T * H * D; ++i) {
      if (!(fabs(after->o[batch * T * H * D + i] - o[i]) < 1e-4)) return 0;
    }
  }
  return 1;
}

static void test_results(void) {
  const int64_t bias[3] = {B, H, D};
  call before, c;
  const char* name = NULL;
  fill(&before);
  fill(&c);
  c.inputs.initial_state_bias = fw_tensor_dense(c.state_bias, FW_F32, 3, bias);
  CHECK(fw_ttt_linear_forward(&c.context, &c.forward, &name) == FW_OK);
  CHECK(name != NULL && strlen(name) > 0);
  CHECK(is_expected(&before, &c, 0));
  CHECK(c.final_bias[0] != kPoison);

  fill(&c);
  CHECK(fw_ttt_linear_step(&c.context, &c.step, NULL) == FW_OK);
  CHECK(is_expected(&before, &c, 1));
  CHECK(c.position[0] == T && c.position[1] == T);

  fill(&c);
  CHECK(fw_ttt_linear_backward(&c.context, &c.backward, &name) == FW_OK);
  CHECK(c.dq[0] != kPoison && c.dw[0] != kPoison);

  fill(&c);
  c.context.implementation = "reference";
  CHECK(fw_ttt_linear_step(&c.context, &c.step, &name) == FW_OK);
  CHECK(strcmp(name, "reference") == 0);
  CHECK(is_expected(&before, &c, 1));
}

/* All modes fail with this text somewhere in the message. */
static void expect_invalid(int line, call* c, const char* text) {
  for (int mode = 0; mode < 3; ++mode) {
    fw_status status = FW_OK;
    if (mode == 0) status = fw_ttt_linear_forward(&c->context, &c->forward, NULL);
    if (mode == 1) status = fw_ttt_linear_backward(&c->context, &c->backward, NULL);
    if (mode == 2) status = fw_ttt_linear_step(&c->context, &c->step, NULL);
    if (status != FW_INVALID_ARGUMENT || strstr(fw_last_error(), text) == NULL ||
        strstr(fw_last_error(), "expected") == NULL || strstr(fw_last_error(), "got") == NULL || !untouched(c)) {
      printf("%s:%d: mode %d: status %d, \"%s\", expected \"%s\"\n", __FILE__, line, mode, (int)status, fw_last_error(),
             text);
      ++failures;
    }
  }
}

static void test_errors(void) {
  static const int64_t two_sequences[1] = {3};
  call c;

#define INVALID(text, spoil)            \
  do {                                  \
    fill(&c);                           \
    spoil;                              \
    expect_invalid(__LINE__, &c, text); \
  } while (0)

  INVALID("k: expected shape [2, 3, 2, 4], got [2, 3, 2, 3]", c.inputs.k.shape[3] = 3);
  INVALID("q: ", c.inputs.q.data = NULL);
  INVALID("q: ", memset(&c.inputs.q, 0, sizeof(fw_tensor)));
  INVALID("w: ", c.inputs.w.rank = 100);
  INVALID("b: ", c.inputs.b.rank = -100);
  INVALID("eta: ", c.inputs.eta.dtype = 42);
  INVALID("eta: ", memset(&c.inputs.eta, 0, sizeof(fw_tensor)));
  INVALID("v: ", c.inputs.v.device_type = FW_CUDA);
  INVALID("v: ", c.inputs.v.shape[0] = INT64_MAX);
  INVALID("mini_batch: ", c.options.mini_batch = 63);
  INVALID("scale: ", c.options.scale = NAN);
  INVALID("eps: ", c.options.eps = 0);
  INVALID("num_threads: ", c.context.num_threads = -1);
  INVALID("implementation: ", c.context.implementation = "nonsense");
  INVALID("context: ", c.context.struct_size = 0);
  INVALID("options: ", c.options.struct_size += 1);
  INVALID("inputs: ", c.inputs.struct_size = SIZE_MAX);
  INVALID("args: ", c.forward.struct_size = c.backward.struct_size = c.step.struct_size = 8);
  INVALID("inputs: ", c.forward.inputs = c.backward.inputs = c.step.inputs = NULL);
  INVALID("options: ", c.forward.options = c.backward.options = c.step.options = NULL);
  INVALID("cu_seqlens: ", c.inputs.cu_seqlens = fw_tensor_dense(c.cu_seqlens, FW_I64, 1, two_sequences));
#undef INVALID

  fill(&c);
  CHECK(fw_ttt_linear_forward(NULL, &c.forward, NULL) == FW_INVALID_ARGUMENT);
  CHECK(fw_ttt_linear_forward(&c.context, NULL, NULL) == FW_INVALID_ARGUMENT);
  CHECK(fw_ttt_linear_backward(&c.context, NULL, NULL) == FW_INVALID_ARGUMENT);
  CHECK(fw_ttt_linear_step(&c.context, NULL, NULL) == FW_INVALID_ARGUMENT);
  c.slots[0] = B;
  CHECK(fw_ttt_linear_step(&c.context, &c.step, NULL) == FW_INVALID_ARGUMENT);
  CHECK(strstr(fw_last_error(), "state_indices: ") != NULL);
  CHECK(untouched(&c));
  fill(&c);
  c.position[1] = 16;
  CHECK(fw_ttt_linear_step(&c.context, &c.step, NULL) == FW_INVALID_ARGUMENT);
  CHECK(strstr(fw_last_error(), "position: ") != NULL);
  CHECK(untouched(&c));
}

static void test_helpers(void) {
  fw_ttt_linear_options options;
  fw_ttt_linear_options_init(&options);
  CHECK(options.mini_batch == 16 && options.eps == 1e-6 && options.scale == FW_UNSET);
  fw_ttt_linear_options_init(NULL);
  fw_ttt_linear_inputs_init(NULL);
  fw_ttt_linear_forward_args_init(NULL);
  fw_ttt_linear_backward_args_init(NULL);
  fw_ttt_linear_step_args_init(NULL);
}

int main(void) {
  test_results();
  test_errors();
  test_helpers();
  if (failures == 0) printf("all passed\n");
  return failures == 0 ? 0 : 1;
}
