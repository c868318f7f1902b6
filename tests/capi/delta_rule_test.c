/* The C interface as a C99 program sees it: results, status codes, texts, and that failing calls write nothing. */
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

enum { B = 1, T = 3, H = 2, K = 4, V = 3 };

static const float kPoison = 77.0f;

/* One valid call of each mode; `fill` makes it, a test then spoils it. */
typedef struct call {
  float q[B * T * H * K], k[B * T * H * K], v[B * T * H * V], beta[B * T * H], state[B * H * K * V];
  float o[B * T * H * V], dq[B * T * H * K];
  int64_t cu_seqlens[3];
  int32_t slots[B];
  fw_context context;
  fw_delta_rule_options options;
  fw_delta_rule_inputs inputs;
  fw_delta_rule_forward_args forward;
  fw_delta_rule_backward_args backward;
  fw_delta_rule_step_args step;
} call;

static void fill(call* c) {
  const int64_t key_shape[4] = {B, T, H, K};
  const int64_t value_shape[4] = {B, T, H, V};
  const int64_t beta_shape[3] = {B, T, H};
  const int64_t state_shape[4] = {B, H, K, V};
  const int64_t slots_shape[1] = {B};
  for (int i = 0; i < B * T * H * K; ++i) {
    c->q[i] = (float)(i % 5) * 0.1f;
    c->k[i] = (float)(i % 3) * 0.2f;
    c->dq[i] = kPoison;
  }
  for (int i = 0; i < B * T * H * V; ++i) {
    c->v[i] = (float)(i % 7) - 3.0f;
    c->o[i] = kPoison;
  }
  for (int i = 0; i < B * T * H; ++i) c->beta[i] = 0.5f;
  for (int i = 0; i < B * H * K * V; ++i) c->state[i] = 0.0f;
  c->slots[0] = 0;

  fw_context_init(&c->context);
  fw_delta_rule_options_init(&c->options);
  fw_delta_rule_inputs_init(&c->inputs);
  fw_delta_rule_forward_args_init(&c->forward);
  fw_delta_rule_backward_args_init(&c->backward);
  fw_delta_rule_step_args_init(&c->step);
  c->inputs.q = fw_tensor_dense(c->q, FW_F32, 4, key_shape);
  c->inputs.k = fw_tensor_dense(c->k, FW_F32, 4, key_shape);
  c->inputs.v = fw_tensor_dense(c->v, FW_F32, 4, value_shape);
  c->inputs.beta = fw_tensor_dense(c->beta, FW_F32, 3, beta_shape);
  c->forward.inputs = c->backward.inputs = c->step.inputs = &c->inputs;
  c->forward.options = c->backward.options = c->step.options = &c->options;
  c->forward.o = c->step.o = fw_tensor_dense(c->o, FW_F32, 4, value_shape);
  c->backward.d_o = fw_tensor_dense(c->v, FW_F32, 4, value_shape);
  c->backward.dq = fw_tensor_dense(c->dq, FW_F32, 4, key_shape);
  c->step.state = fw_tensor_dense(c->state, FW_F32, 4, state_shape);
  c->step.state_indices = fw_tensor_dense(c->slots, FW_I32, 1, slots_shape);
}

static int untouched(const call* c) {
  for (int i = 0; i < B * T * H * V; ++i) {
    if (c->o[i] != kPoison) return 0;
  }
  for (int i = 0; i < B * T * H * K; ++i) {
    if (c->dq[i] != kPoison) return 0;
  }
  for (int i = 0; i < B * H * K * V; ++i) {
    if (c->state[i] != 0.0f) return 0;
  }
  return 1;
}

/* The definition, token by token. */
static void expected_output(const call* c, double* o) {
  for (int h = 0; h < H; ++h) {
    double state[K][V] = {{0}};
    for (int t = 0; t < T; ++t) {
      const float* q = c->q + (t * H + h) * K;
      const float* k = c->k + (t * H + h) * K;
      for (int j = 0; j < V; ++j) {
        double u = c->v[(t * H + h) * V + j];
        for (int i = 0; i < K; ++i) u -= k[i] * state[i][j];
        u *= c->beta[t * H + h];
        for (int i = 0; i < K; ++i) state[i][j] += k[i] * u;
        double sum = 0;
        for (int i = 0; i < K; ++i) sum += q[i] * state[i][j];
        o[(t * H + h) * V + j] = sum / sqrt((double)K);
      }
    }
  }
}

static int is_expected(const call* c) {
  double o[B * T * H * V];
  expected_output(c, o);
  for (int i = 0; i < B * T * H * V; ++i) {
    if (!(fabs(c->o[i] - o[i]) < 1e-5)) return 0;
  }
  return 1;
}

static void test_results(void) {
  call c;
  const char* name = NULL;
  fill(&c);
  CHECK(fw_delta_rule_forward(&c.context, &c.forward, &name) == FW_OK);
  CHECK(name != NULL && strlen(name) > 0);
  CHECK(is_expected(&c));

  fill(&c);
  CHECK(fw_delta_rule_step(&c.context, &c.step, NULL) == FW_OK);
  CHECK(is_expected(&c));

  fill(&c);
  CHECK(fw_delta_rule_backward(&c.context, &c.backward, &name) == FW_OK);
  CHECK(c.dq[0] != kPoison);

  fill(&c);
  c.context.implementation = "reference";
  CHECK(fw_delta_rule_forward(&c.context, &c.forward, &name) == FW_OK);
  CHECK(strcmp(name, "reference") == 0);
  CHECK(is_expected(&c));
}

/* All modes fail with this text somewhere in the message. */
static void expect_invalid(int line, call* c, const char* text) {
  for (int mode = 0; mode < 3; ++mode) {
    fw_status status;
    if (mode == 0) status = fw_delta_rule_forward(&c->context, &c->forward, NULL);
    if (mode == 1) status = fw_delta_rule_backward(&c->context, &c->backward, NULL);
    if (mode == 2) status = fw_delta_rule_step(&c->context, &c->step, NULL);
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

  INVALID("k: expected shape [1, 3, 2, 4], got [1, 3, 2, 3]", c.inputs.k.shape[3] = 3);
  INVALID("q: ", c.inputs.q.data = NULL);
  INVALID("q: ", memset(&c.inputs.q, 0, sizeof(fw_tensor)));
  INVALID("q: ", c.inputs.q.rank = 100);
  INVALID("q: ", c.inputs.q.rank = -100);
  INVALID("v: ", c.inputs.v.dtype = 42);
  INVALID("v: ", c.inputs.v.device_type = -3);
  INVALID("v: ", c.inputs.v.device_type = FW_CUDA);
  INVALID("v: ", c.inputs.v.shape[0] = INT64_MAX);
  INVALID("v: ", c.inputs.v.strides[0] = INT64_MIN);
  INVALID("gate: ", c.options.gate = 3);
  INVALID("chunk_size: ", c.options.chunk_size = 63);
  INVALID("scale: ", c.options.scale = NAN);
  INVALID("allow_neg_eigval: ", c.options.allow_neg_eigval = 1);
  INVALID("num_threads: ", c.context.num_threads = -1);
  INVALID("implementation: ", c.context.implementation = "nonsense");
  INVALID("context: ", c.context.struct_size = 0);
  INVALID("options: ", c.options.struct_size += 1);
  INVALID("inputs: ", c.inputs.struct_size = SIZE_MAX);
  INVALID("args: ", c.forward.struct_size = c.backward.struct_size = c.step.struct_size = 8);
  INVALID("inputs: ", c.forward.inputs = c.backward.inputs = c.step.inputs = NULL);
  INVALID("options: ", c.forward.options = c.backward.options = c.step.options = NULL);
  c.cu_seqlens[0] = 0;
  c.cu_seqlens[1] = 4;
  c.cu_seqlens[2] = 3;
  INVALID("cu_seqlens: ", c.inputs.cu_seqlens = fw_tensor_dense(c.cu_seqlens, FW_I64, 1, two_sequences));
#undef INVALID

  fill(&c);
  CHECK(fw_delta_rule_forward(NULL, &c.forward, NULL) == FW_INVALID_ARGUMENT);
  CHECK(strstr(fw_last_error(), "context: expected a struct, got null") != NULL);
  CHECK(fw_delta_rule_forward(&c.context, NULL, NULL) == FW_INVALID_ARGUMENT);
  CHECK(fw_delta_rule_backward(&c.context, NULL, NULL) == FW_INVALID_ARGUMENT);
  CHECK(fw_delta_rule_step(&c.context, NULL, NULL) == FW_INVALID_ARGUMENT);
  c.slots[0] = 1;
  CHECK(fw_delta_rule_step(&c.context, &c.step, NULL) == FW_INVALID_ARGUMENT);
  CHECK(strstr(fw_last_error(), "state_indices: ") != NULL);
  CHECK(untouched(&c));
}

static void test_num_chunks(void) {
  const int64_t offsets[3] = {0, 17, 20};
  const int64_t shape[1] = {3};
  const fw_tensor cu_seqlens = fw_tensor_dense(offsets, FW_I64, 1, shape);
  int64_t count = -1;
  CHECK(fw_delta_rule_num_chunks(20, NULL, 16, &count) == FW_OK && count == 2);
  CHECK(fw_delta_rule_num_chunks(20, &cu_seqlens, 16, &count) == FW_OK && count == 3);
  CHECK(fw_delta_rule_num_chunks(21, &cu_seqlens, 16, &count) == FW_INVALID_ARGUMENT && count == 3);
  CHECK(fw_delta_rule_num_chunks(20, NULL, 16, NULL) == FW_INVALID_ARGUMENT);
}

static void test_helpers(void) {
  const int64_t shape[3] = {2, 3, 4};
  const fw_tensor tensor = fw_tensor_dense(shape, FW_I64, 3, shape);
  CHECK(tensor.strides[0] == 12 && tensor.strides[1] == 4 && tensor.strides[2] == 1);
  CHECK(fw_tensor_dense(NULL, FW_F32, 9, shape).rank == 9);
  CHECK(fw_tensor_dense(NULL, FW_F32, -9, shape).rank == -9);
  CHECK(fw_tensor_dense(NULL, FW_F32, 2, NULL).rank == 2);
  CHECK(strlen(fw_version()) > 0);
  fw_context_init(NULL);
  fw_delta_rule_options_init(NULL);
  fw_delta_rule_inputs_init(NULL);
  fw_delta_rule_forward_args_init(NULL);
  fw_delta_rule_backward_args_init(NULL);
  fw_delta_rule_step_args_init(NULL);
}

/* A source with one block: counts what is out, and refuses when told to. */
typedef struct pool {
  double memory[1 << 16];
  int allocations, releases, refuse;
} pool;

static void* pool_allocate(void* user, size_t bytes) {
  pool* p = (pool*)user;
  if (p->refuse || bytes + 64 > sizeof(p->memory)) return NULL;
  ++p->allocations;
  return (void*)(((uintptr_t)p->memory + 63) / 64 * 64);
}

static void pool_release(void* user, void* pointer, size_t bytes) {
  (void)pointer;
  (void)bytes;
  ++((pool*)user)->releases;
}

static void test_workspace(void) {
  static pool p;
  call c;
  fill(&c);
  c.context.allocate = pool_allocate;
  c.context.release = pool_release;
  c.context.allocate_user = &p;
  CHECK(fw_delta_rule_backward(&c.context, &c.backward, NULL) == FW_OK);
  CHECK(p.allocations == p.releases);

  if (p.allocations > 0) {
    fill(&c);
    c.context.allocate = pool_allocate;
    c.context.release = pool_release;
    c.context.allocate_user = &p;
    p.refuse = 1;
    CHECK(fw_delta_rule_backward(&c.context, &c.backward, NULL) == FW_OUT_OF_MEMORY);
    CHECK(untouched(&c));
    CHECK(p.allocations == p.releases);
  }
}

int main(void) {
  CHECK(strcmp(fw_last_error(), "") == 0);
  test_results();
  test_errors();
  test_num_chunks();
  test_helpers();
  test_workspace();
  if (failures == 0) printf("all passed\n");
  return failures == 0 ? 0 : 1;
}
