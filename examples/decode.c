/* Decoding from C: sequences share a pool of states and advance in place, one token per call.
 *
 * Three sequences live in slots 4, 0 and 2 of a pool of five. After a few tokens the second one ends; its entry becomes
 * -1 and its slot is free for another. */
#include <stdio.h>
#include <stdlib.h>

#include "fastweight/c_api.h"

enum { kSequences = 3, kSlots = 5, kHeads = 2, kKey = 32, kValue = 48 };

/* Stands for the projections of a model: values in [-1, 1). */
static void project(float* values, int count) {
  for (int i = 0; i < count; ++i) values[i] = (float)rand() / (float)RAND_MAX * 2.0f - 1.0f;
}

int main(void) {
  static float q[kSequences * kHeads * kKey], k[kSequences * kHeads * kKey], v[kSequences * kHeads * kValue];
  static float g[kSequences * kHeads], beta[kSequences * kHeads], o[kSequences * kHeads * kValue];
  static float states[kSlots * kHeads * kKey * kValue];
  static float a_log[kHeads];
  int32_t slots[kSequences] = {4, 0, 2};

  const int64_t key_shape[4] = {kSequences, 1, kHeads, kKey};
  const int64_t value_shape[4] = {kSequences, 1, kHeads, kValue};
  const int64_t head_shape[3] = {kSequences, 1, kHeads};
  const int64_t state_shape[4] = {kSlots, kHeads, kKey, kValue};
  const int64_t parameter_shape[1] = {kHeads};
  const int64_t index_shape[1] = {kSequences};

  fw_context context;
  fw_delta_rule_options options;
  fw_delta_rule_inputs inputs;
  fw_delta_rule_step_args args;
  fw_context_init(&context);
  fw_delta_rule_options_init(&options);
  fw_delta_rule_inputs_init(&inputs);
  fw_delta_rule_step_args_init(&args);

  /* As in a Gated DeltaNet layer: raw gates and step sizes come from the model. */
  options.gate = FW_GATE_PER_HEAD;
  options.gate_in_kernel = 1;
  options.beta_sigmoid = 1;
  options.qk_l2norm = 1;
  inputs.q = fw_tensor_dense(q, FW_F32, 4, key_shape);
  inputs.k = fw_tensor_dense(k, FW_F32, 4, key_shape);
  inputs.v = fw_tensor_dense(v, FW_F32, 4, value_shape);
  inputs.g = fw_tensor_dense(g, FW_F32, 3, head_shape);
  inputs.beta = fw_tensor_dense(beta, FW_F32, 3, head_shape);
  inputs.a_log = fw_tensor_dense(a_log, FW_F32, 1, parameter_shape);
  args.inputs = &inputs;
  args.options = &options;
  args.state = fw_tensor_dense(states, FW_F32, 4, state_shape);
  args.state_indices = fw_tensor_dense(slots, FW_I32, 1, index_shape);
  args.o = fw_tensor_dense(o, FW_F32, 4, value_shape);

  for (int token = 0; token < 8; ++token) {
    if (token == 4) slots[1] = -1;
    project(q, kSequences * kHeads * kKey);
    project(k, kSequences * kHeads * kKey);
    project(v, kSequences * kHeads * kValue);
    project(g, kSequences * kHeads);
    project(beta, kSequences * kHeads);

    const char* implementation;
    if (fw_delta_rule_step(&context, &args, &implementation) != FW_OK) {
      fprintf(stderr, "%s\n", fw_last_error());
      return 1;
    }
    printf("token %d (%s):", token, implementation);
    for (int n = 0; n < kSequences; ++n) printf(" %8.4f", o[n * kHeads * kValue]);
    printf("\n");
  }
  return 0;
}
