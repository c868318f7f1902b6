/* The same token as outside.cc, through the C interface. */
#include <fastweight/c_api.h>
#include <math.h>
#include <stdio.h>

int main(void) {
  const float q[2] = {1, 2}, k[2] = {0.6f, 0.8f}, v[3] = {1, -2, 3}, beta[1] = {0.5f};
  const int64_t qk_shape[4] = {1, 1, 1, 2}, v_shape[4] = {1, 1, 1, 3}, beta_shape[3] = {1, 1, 1};
  float o[3] = {0};
  fw_context context;
  fw_delta_rule_inputs inputs;
  fw_delta_rule_options options;
  fw_delta_rule_forward_args args;
  const char* ran = "";
  int i;

  fw_context_init(&context);
  fw_delta_rule_options_init(&options);
  fw_delta_rule_inputs_init(&inputs);
  fw_delta_rule_forward_args_init(&args);
  options.scale = 1;
  inputs.q = fw_tensor_dense(q, FW_F32, 4, qk_shape);
  inputs.k = fw_tensor_dense(k, FW_F32, 4, qk_shape);
  inputs.v = fw_tensor_dense(v, FW_F32, 4, v_shape);
  inputs.beta = fw_tensor_dense(beta, FW_F32, 3, beta_shape);
  args.inputs = &inputs;
  args.options = &options;
  args.o = fw_tensor_dense(o, FW_F32, 4, v_shape);
  if (fw_delta_rule_forward(&context, &args, &ran) != FW_OK) {
    fprintf(stderr, "%s\n", fw_last_error());
    return 1;
  }
  printf("fastweight %s from C, %s: %g %g %g\n", fw_version(), ran, o[0], o[1], o[2]);
  for (i = 0; i < 3; ++i) {
    if (fabsf(o[i] - 1.1f * v[i]) > 1e-5f) return 1;
  }
  return 0;
}
