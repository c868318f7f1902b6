/* The C interface: plain C99, no exceptions, a stable layout.
 *
 * Every struct but fw_tensor begins with its size, which the matching _init function sets together with the defaults.
 * Fields are only ever added, at the end: a size that an earlier release had is accepted, and what is missing gets its
 * default. A size below that of the first release or above that of this one is refused. A tensor that is all zeros is
 * absent.
 *
 * Functions return FW_OK or a status; fw_last_error() then says what was wrong. A refused call,
 * FW_INVALID_ARGUMENT or FW_UNSUPPORTED, has written nothing. After every other failure the outputs are undefined, and
 * on CUDA what was enqueued still runs.
 *
 * What each argument means stands in fastweight/delta_rule.h, fastweight/delta_rule_map.h, fastweight/gla.h,
 * fastweight/comba.h, fastweight/dplr.h, fastweight/ttt_linear.h, fastweight/short_conv.h, fastweight/blocks.h and fastweight/context.h. Any number of threads
 * may call at the same time.
 */
#ifndef FASTWEIGHT_C_API_H_
#define FASTWEIGHT_C_API_H_

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FW_API __attribute__((visibility("default")))
#else
#define FW_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fw_status {
  FW_OK = 0,
  FW_INVALID_ARGUMENT = 1, /* the text names the argument, what was expected and what was found */
  FW_UNSUPPORTED = 2,      /* valid, but no implementation takes it; the text lists each one's reason */
  FW_OUT_OF_MEMORY = 3,
  FW_DEVICE_ERROR = 4,
  FW_INTERNAL_ERROR = 5
} fw_status;

enum { FW_F32 = 0, FW_BF16 = 1, FW_F16 = 2, FW_F64 = 3, FW_I32 = 4, FW_I64 = 5 }; /* dtype */
enum { FW_CPU = 0, FW_CUDA = 1 };                                                 /* device_type */
enum { FW_GATE_NONE = 0, FW_GATE_PER_HEAD = 1, FW_GATE_PER_CHANNEL = 2 };         /* gate */
enum { FW_ACTIVATION_NONE = 0, FW_ACTIVATION_SILU = 1 };                          /* activation */

#define FW_MAX_RANK 5
#define FW_UNSET ((double)INFINITY) /* scale, lower_bound: the default */

/* A view: it never owns memory. Strides count elements. */
typedef struct fw_tensor {
  void* data;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
  int32_t rank;
  int64_t shape[FW_MAX_RANK];
  int64_t strides[FW_MAX_RANK];
} fw_tensor;

typedef struct fw_context {
  size_t struct_size;
  int32_t device_type;
  int32_t device_index;
  void* stream;
  int32_t num_threads; /* 0: every core of the process */
  int32_t verbose;
  /* Scratch memory, aligned to 64; null: the heap, on CUDA the device's memory pool. */
  void* (*allocate)(void* user, size_t bytes);
  void (*release)(void* user, void* pointer, size_t bytes);
  void* allocate_user;
  /* Null or empty: choose. A name: run that implementation or fail. A form, such as "chunk" where a device has
   * chunk_16bit and chunk_fp32: the first implementation of that form that takes the problem, or fail. */
  const char* implementation;
  void (*log)(void* user, const char* line); /* receives the verbose lines; null: stderr */
  void* log_user;
  int32_t trust_pointers; /* CUDA: the tensors are known to lie where they say, do not ask the driver */
  size_t scratch_bytes;   /* CUDA: about so much scratch memory where the input can be cut into pieces; 0: a choice */
  int32_t segment_chunks; /* CUDA: of the segments of long sequences, see Context; 0: a choice, -1: nothing is cut */
} fw_context;

typedef struct fw_delta_rule_options {
  size_t struct_size;
  int32_t gate;
  int32_t chunk_size;
  double scale;       /* FW_UNSET: K^-0.5 */
  double lower_bound; /* FW_UNSET: none */
  int32_t state_v_first;
  int32_t qk_l2norm;
  int32_t beta_sigmoid;
  int32_t allow_neg_eigval;
  int32_t gate_in_kernel;
  int32_t safe_gate;
  int32_t total_value_heads; /* 0: those of v */
} fw_delta_rule_options;

typedef struct fw_delta_rule_inputs {
  size_t struct_size;
  fw_tensor q;             /* [B, T, H, K] */
  fw_tensor k;             /* [B, T, H, K] */
  fw_tensor v;             /* [B, T, HV, V] */
  fw_tensor g;             /* per head [B, T, HV]; per channel [B, T, HV, K] */
  fw_tensor beta;          /* [B, T, HV] or [B, T, HV, V]; absent: 1 */
  fw_tensor a_log;         /* [HV] */
  fw_tensor dt_bias;       /* [HV] per head, [HV * K] or [HV, K] per channel */
  fw_tensor initial_state; /* [N, HV, K, V]; absent: 0 */
  fw_tensor cu_seqlens;    /* [N + 1] */
} fw_delta_rule_inputs;

typedef struct fw_delta_rule_forward_args {
  size_t struct_size;
  const fw_delta_rule_inputs* inputs;
  const fw_delta_rule_options* options;
  fw_tensor o;            /* [B, T, HV, V] */
  fw_tensor final_state;  /* [N, HV, K, V]; optional */
  fw_tensor chunk_states; /* [B, NT, HV, K, V]; optional */
  fw_tensor kept;         /* [B, NT, HV, W] int32, for the backward; optional */
} fw_delta_rule_forward_args;

typedef struct fw_delta_rule_backward_args {
  size_t struct_size;
  const fw_delta_rule_inputs* inputs;
  const fw_delta_rule_options* options;
  fw_tensor d_o;                                                      /* [B, T, HV, V]; absent: 0 */
  fw_tensor d_final_state;                                            /* [N, HV, K, V]; absent: 0 */
  fw_tensor chunk_states;                                             /* the forward's; optional */
  fw_tensor dq, dk, dv, dg, dbeta, da_log, ddt_bias, d_initial_state; /* each optional */
  fw_tensor kept;                                                     /* the forward's; optional */
} fw_delta_rule_backward_args;

typedef struct fw_delta_rule_step_args {
  size_t struct_size;
  const fw_delta_rule_inputs* inputs; /* without initial_state */
  const fw_delta_rule_options* options;
  fw_tensor state;         /* [slots, HV, K, V], read and written */
  fw_tensor state_indices; /* [N]: the slot of each sequence, none twice, -1: skip it; optional */
  fw_tensor o;             /* [B, T, HV, V] */
} fw_delta_rule_step_args;

/* The map of a segment, see fastweight/delta_rule_map.h. */
typedef struct fw_delta_rule_map_forward_args {
  size_t struct_size;
  const fw_delta_rule_inputs* inputs;
  const fw_delta_rule_options* options;
  fw_tensor m; /* [N, HV, K, K]; optional */
  fw_tensor h; /* [N, HV, K, V]; optional */
} fw_delta_rule_map_forward_args;

typedef struct fw_delta_rule_map_backward_args {
  size_t struct_size;
  const fw_delta_rule_inputs* inputs; /* without initial_state */
  const fw_delta_rule_options* options;
  fw_tensor d_o;           /* [B, T, HV, V]; absent: 0 */
  fw_tensor d_final_state; /* [N, HV, K, V]; absent: 0 */
  fw_tensor mt;            /* [N, HV, K, K]; optional */
  fw_tensor e;             /* [N, HV, K, V]; optional */
} fw_delta_rule_map_backward_args;

typedef struct fw_gla_options {
  size_t struct_size;
  int32_t gate;
  int32_t chunk_size;
  double scale; /* FW_UNSET: K^-0.5 */
  int32_t state_v_first;
} fw_gla_options;

typedef struct fw_gla_inputs {
  size_t struct_size;
  fw_tensor q;             /* [B, T, H, K] */
  fw_tensor k;             /* [B, T, H, K] */
  fw_tensor v;             /* [B, T, H, V] */
  fw_tensor g;             /* per head [B, T, H]; per channel [B, T, H, K] */
  fw_tensor g_gamma;       /* [H], in place of g */
  fw_tensor initial_state; /* [N, H, K, V]; absent: 0 */
  fw_tensor cu_seqlens;    /* [N + 1] */
} fw_gla_inputs;

typedef struct fw_comba_options {
  size_t struct_size;
  double scale; /* FW_UNSET: K^-0.5 */
  int32_t chunk_size;
  int32_t state_v_first;
  int32_t qk_l2norm;
} fw_comba_options;

typedef struct fw_comba_inputs {
  size_t struct_size;
  fw_tensor q;             /* [B, T, H, K] */
  fw_tensor k;             /* [B, T, H, K] */
  fw_tensor v;             /* [B, T, H, V] */
  fw_tensor p;             /* [B, T, H, K]; absent: k */
  fw_tensor g;             /* [B, T, H] */
  fw_tensor beta;          /* [B, T, H]; absent: 1 */
  fw_tensor initial_state; /* [N, H, K, V]; absent: 0 */
  fw_tensor cu_seqlens;    /* [N + 1] */
} fw_comba_inputs;

typedef struct fw_dplr_options {
  size_t struct_size;
  int32_t gate; /* per channel (DPLR) or none (IPLR) */
  int32_t chunk_size;
  double scale; /* FW_UNSET: K^-0.5 */
  int32_t state_v_first;
} fw_dplr_options;

typedef struct fw_dplr_inputs {
  size_t struct_size;
  fw_tensor q;             /* [B, T, H, K] */
  fw_tensor k;             /* [B, T, H, K] */
  fw_tensor v;             /* [B, T, H, V] */
  fw_tensor a;             /* [B, T, H, K] */
  fw_tensor b;             /* [B, T, H, K] */
  fw_tensor g;             /* [B, T, H, K] */
  fw_tensor initial_state; /* [N, H, K, V]; absent: 0 */
  fw_tensor cu_seqlens;    /* [N + 1] */
} fw_dplr_inputs;

typedef struct fw_gla_forward_args {
  size_t struct_size;
  const fw_gla_inputs* inputs;
  const fw_gla_options* options;
  fw_tensor o;            /* [B, T, H, V] */
  fw_tensor final_state;  /* [N, H, K, V]; optional */
  fw_tensor chunk_states; /* [B, NT, H, K, V]; optional */
} fw_gla_forward_args;

typedef struct fw_gla_backward_args {
  size_t struct_size;
  const fw_gla_inputs* inputs;
  const fw_gla_options* options;
  fw_tensor d_o;                             /* [B, T, H, V]; absent: 0 */
  fw_tensor d_final_state;                   /* [N, H, K, V]; absent: 0 */
  fw_tensor chunk_states;                    /* the forward's; optional */
  fw_tensor dq, dk, dv, dg, d_initial_state; /* each optional */
} fw_gla_backward_args;

typedef struct fw_gla_step_args {
  size_t struct_size;
  const fw_gla_inputs* inputs; /* without initial_state */
  const fw_gla_options* options;
  fw_tensor state;         /* [slots, H, K, V], read and written */
  fw_tensor state_indices; /* [N]: the slot of each sequence, none twice, -1: skip it; optional */
  fw_tensor o;             /* [B, T, H, V] */
} fw_gla_step_args;

typedef struct fw_comba_forward_args {
  size_t struct_size;
  const fw_comba_inputs* inputs;
  const fw_comba_options* options;
  fw_tensor o;            /* [B, T, H, V] */
  fw_tensor final_state;  /* [N, H, K, V]; optional */
  fw_tensor chunk_states; /* [B, NT, H, K, V]; optional */
} fw_comba_forward_args;

typedef struct fw_comba_backward_args {
  size_t struct_size;
  const fw_comba_inputs* inputs;
  const fw_comba_options* options;
  fw_tensor d_o;                                        /* [B, T, H, V]; absent: 0 */
  fw_tensor d_final_state;                              /* [N, H, K, V]; absent: 0 */
  fw_tensor chunk_states;                               /* the forward's; optional */
  fw_tensor dq, dk, dv, dp, dg, dbeta, d_initial_state; /* each optional */
} fw_comba_backward_args;

typedef struct fw_comba_step_args {
  size_t struct_size;
  const fw_comba_inputs* inputs; /* without initial_state */
  const fw_comba_options* options;
  fw_tensor state;         /* [slots, H, K, V], read and written */
  fw_tensor state_indices; /* [N]: the slot of each sequence, none twice, -1: skip it; optional */
  fw_tensor o;             /* [B, T, H, V] */
} fw_comba_step_args;

typedef struct fw_dplr_forward_args {
  size_t struct_size;
  const fw_dplr_inputs* inputs;
  const fw_dplr_options* options;
  fw_tensor o;            /* [B, T, H, V] */
  fw_tensor final_state;  /* [N, H, K, V]; optional */
  fw_tensor chunk_states; /* [B, NT, H, K, V]; optional */
} fw_dplr_forward_args;

typedef struct fw_dplr_backward_args {
  size_t struct_size;
  const fw_dplr_inputs* inputs;
  const fw_dplr_options* options;
  fw_tensor d_o;                                     /* [B, T, H, V]; absent: 0 */
  fw_tensor d_final_state;                           /* [N, H, K, V]; absent: 0 */
  fw_tensor chunk_states;                            /* the forward's; optional */
  fw_tensor dq, dk, dv, da, db, dg, d_initial_state; /* each optional */
} fw_dplr_backward_args;

typedef struct fw_dplr_step_args {
  size_t struct_size;
  const fw_dplr_inputs* inputs; /* without initial_state */
  const fw_dplr_options* options;
  fw_tensor state;         /* [slots, H, K, V], read and written */
  fw_tensor state_indices; /* [N]: the slot of each sequence, none twice, -1: skip it; optional */
  fw_tensor o;             /* [B, T, H, V] */
} fw_dplr_step_args;

typedef struct fw_ttt_linear_options {
  size_t struct_size;
  double scale; /* FW_UNSET: D^-0.5 */
  double eps;   /* at least 2^-126 */
  int32_t mini_batch;
} fw_ttt_linear_options;

typedef struct fw_ttt_linear_inputs {
  size_t struct_size;
  fw_tensor q;                  /* [B, T, H, D] */
  fw_tensor k;                  /* [B, T, H, D] */
  fw_tensor v;                  /* [B, T, H, D] */
  fw_tensor w;                  /* [H, D] */
  fw_tensor b;                  /* [H, D] */
  fw_tensor eta;                /* [B, T, H] or [B, T, H, 1] */
  fw_tensor initial_state;      /* [N, H, D, D]; absent: 0 */
  fw_tensor initial_state_bias; /* [N, H, 1, D] or [N, H, D]; absent: 0 */
  fw_tensor cu_seqlens;         /* [N + 1] */
} fw_ttt_linear_inputs;

typedef struct fw_ttt_linear_forward_args {
  size_t struct_size;
  const fw_ttt_linear_inputs* inputs;
  const fw_ttt_linear_options* options;
  fw_tensor o;                /* [B, T, H, D] */
  fw_tensor final_state;      /* [N, H, D, D]; optional */
  fw_tensor final_state_bias; /* [N, H, 1, D] or [N, H, D]; optional */
  fw_tensor kept;             /* [B, NT, H, W] int32, for the backward; optional */
} fw_ttt_linear_forward_args;

typedef struct fw_ttt_linear_backward_args {
  size_t struct_size;
  const fw_ttt_linear_inputs* inputs;
  const fw_ttt_linear_options* options;
  fw_tensor d_o;                                                             /* [B, T, H, D]; absent: 0 */
  fw_tensor d_final_state;                                                   /* [N, H, D, D]; absent: 0 */
  fw_tensor d_final_state_bias;                                              /* [N, H, 1, D]; absent: 0 */
  fw_tensor dq, dk, dv, dw, db, deta, d_initial_state, d_initial_state_bias; /* each optional */
  fw_tensor kept;                                                            /* the forward's; optional */
} fw_ttt_linear_backward_args;

/* The state at the start of the open mini-batch, and the sums over its tokens: each read and written. */
typedef struct fw_ttt_linear_step_args {
  size_t struct_size;
  const fw_ttt_linear_inputs* inputs; /* without initial_state and initial_state_bias */
  const fw_ttt_linear_options* options;
  fw_tensor state;         /* [slots, H, D, D] */
  fw_tensor state_bias;    /* [slots, H, 1, D] or [slots, H, D] */
  fw_tensor gradient;      /* [slots, H, D, D] */
  fw_tensor gradient_bias; /* [slots, H, 1, D] or [slots, H, D] */
  fw_tensor position;      /* [slots] FW_I32: the tokens in the open mini-batch */
  fw_tensor state_indices; /* [N]: the slot of each sequence, none twice, -1: skip it; optional */
  fw_tensor o;             /* [B, T, H, D] */
} fw_ttt_linear_step_args;

typedef struct fw_short_conv_options {
  size_t struct_size;
  int32_t activation;
} fw_short_conv_options;

typedef struct fw_short_conv_inputs {
  size_t struct_size;
  fw_tensor x;             /* [B, T, D] */
  fw_tensor w;             /* [D, W] */
  fw_tensor bias;          /* [D]; absent: 0 */
  fw_tensor initial_state; /* [N, D, W]; absent: 0 */
  fw_tensor cu_seqlens;    /* [N + 1] */
} fw_short_conv_inputs;

typedef struct fw_short_conv_forward_args {
  size_t struct_size;
  const fw_short_conv_inputs* inputs;
  const fw_short_conv_options* options;
  fw_tensor residual;    /* [B, T, D]; absent: 0 */
  fw_tensor y;           /* [B, T, D] */
  fw_tensor final_state; /* [N, D, W]; optional */
} fw_short_conv_forward_args;

typedef struct fw_short_conv_backward_args {
  size_t struct_size;
  const fw_short_conv_inputs* inputs;
  const fw_short_conv_options* options;
  fw_tensor dy;                             /* [B, T, D]; absent: 0 */
  fw_tensor d_final_state;                  /* [N, D, W]; absent: 0 */
  fw_tensor dx, dw, dbias, d_initial_state; /* each optional */
} fw_short_conv_backward_args;

typedef struct fw_short_conv_step_args {
  size_t struct_size;
  const fw_short_conv_inputs* inputs; /* without initial_state */
  const fw_short_conv_options* options;
  fw_tensor residual;      /* [B, T, D]; absent: 0 */
  fw_tensor state;         /* [slots, D, W], read and written */
  fw_tensor state_indices; /* [N]: the slot of each sequence, none twice, -1: skip it; optional */
  fw_tensor y;             /* [B, T, D] */
} fw_short_conv_step_args;

/* The building blocks: one struct per call, its inputs first. */
typedef struct fw_chunk_local_cumsum_args {
  size_t struct_size;
  fw_tensor x;          /* [B, T, HV] or [B, T, HV, K] */
  fw_tensor cu_seqlens; /* [N + 1]; optional, as in all that follow */
  int32_t chunk_size;
  int32_t reverse;
  fw_tensor y; /* like x */
} fw_chunk_local_cumsum_args;

typedef struct fw_scaled_dot_kkt_forward_args {
  size_t struct_size;
  fw_tensor k;     /* [B, T, H, K] */
  fw_tensor beta;  /* [B, T, HV]; absent: 1 */
  fw_tensor gamma; /* [B, T, HV] or [B, T, HV, K]; absent: 0 */
  fw_tensor cu_seqlens;
  fw_tensor a; /* [B, T, HV, C] */
} fw_scaled_dot_kkt_forward_args;

typedef struct fw_scaled_dot_kkt_backward_args {
  size_t struct_size;
  fw_tensor k, beta, gamma, cu_seqlens;
  fw_tensor da;                /* [B, T, HV, C] */
  fw_tensor dk, dbeta, dgamma; /* each optional */
} fw_scaled_dot_kkt_backward_args;

typedef struct fw_solve_tril_forward_args {
  size_t struct_size;
  fw_tensor a; /* [B, T, HV, C] */
  fw_tensor cu_seqlens;
  fw_tensor j; /* [B, T, HV, C] */
} fw_solve_tril_forward_args;

typedef struct fw_solve_tril_backward_args {
  size_t struct_size;
  fw_tensor j, dj; /* [B, T, HV, C] */
  fw_tensor cu_seqlens;
  fw_tensor da; /* [B, T, HV, C] */
} fw_solve_tril_backward_args;

typedef struct fw_wy_forward_args {
  size_t struct_size;
  fw_tensor k;           /* [B, T, H, K] */
  fw_tensor v;           /* [B, T, HV, V] */
  fw_tensor beta, gamma; /* as above */
  fw_tensor j;           /* [B, T, HV, C] */
  fw_tensor cu_seqlens;
  fw_tensor w; /* [B, T, HV, K]; optional */
  fw_tensor u; /* [B, T, HV, V]; optional */
} fw_wy_forward_args;

typedef struct fw_wy_backward_args {
  size_t struct_size;
  fw_tensor k, v, beta, gamma, j, cu_seqlens;
  fw_tensor dw, du;                    /* absent: 0 */
  fw_tensor dk, dv, dbeta, dgamma, da; /* each optional */
} fw_wy_backward_args;

typedef struct fw_l2norm_forward_args {
  size_t struct_size;
  fw_tensor x;    /* [.., D] */
  double eps;     /* at least 2^-126 */
  fw_tensor y;    /* like x */
  fw_tensor rstd; /* [..]; optional */
} fw_l2norm_forward_args;

typedef struct fw_l2norm_backward_args {
  size_t struct_size;
  fw_tensor y, rstd, dy;
  fw_tensor dx; /* like y */
} fw_l2norm_backward_args;

typedef struct fw_gate_activation_forward_args {
  size_t struct_size;
  fw_tensor x;       /* [B, T, HV] or [B, T, HV, K] */
  fw_tensor a_log;   /* [HV] */
  fw_tensor dt_bias; /* [HV] per head, [HV * K] or [HV, K] per channel; optional */
  fw_tensor cu_seqlens;
  double lower_bound; /* FW_UNSET: none */
  int32_t chunk_size; /* 0: g is not summed within chunks */
  fw_tensor g;        /* like x */
} fw_gate_activation_forward_args;

typedef struct fw_gate_activation_backward_args {
  size_t struct_size;
  fw_tensor x, a_log, dt_bias, cu_seqlens;
  double lower_bound;
  int32_t chunk_size;
  fw_tensor dg;                   /* like x */
  fw_tensor dx, da_log, ddt_bias; /* each optional */
} fw_gate_activation_backward_args;

enum { FW_NORM_GATE_SILU = 0, FW_NORM_GATE_SIGMOID = 1 };

typedef struct fw_rms_norm_forward_args {
  size_t struct_size;
  fw_tensor x;      /* [.., D] */
  fw_tensor gate;   /* like x; optional */
  fw_tensor weight; /* [D]; optional */
  double eps;       /* at least 2^-126, or 0: a row of zeros becomes NaN */
  int32_t activation;
  fw_tensor y; /* like x; may be x */
} fw_rms_norm_forward_args;

typedef struct fw_rms_norm_backward_args {
  size_t struct_size;
  fw_tensor x, gate, weight;
  double eps;
  int32_t activation;
  fw_tensor dy;                 /* like x */
  fw_tensor dx, dgate, dweight; /* each optional */
} fw_rms_norm_backward_args;

FW_API const char* fw_version(void);

/* What the last failed call of this thread had to say; never null. Valid until the thread's next failed call. */
FW_API const char* fw_last_error(void);

/* A dense, row-major tensor in host memory. Only tensors that a call writes are written to. */
FW_API fw_tensor fw_tensor_dense(const void* data, int32_t dtype, int32_t rank, const int64_t* shape);

/* The struct's size and defaults; null is ignored. */
FW_API void fw_context_init(fw_context* context);
FW_API void fw_delta_rule_options_init(fw_delta_rule_options* options);
FW_API void fw_delta_rule_inputs_init(fw_delta_rule_inputs* inputs);
FW_API void fw_delta_rule_forward_args_init(fw_delta_rule_forward_args* args);
FW_API void fw_delta_rule_backward_args_init(fw_delta_rule_backward_args* args);
FW_API void fw_delta_rule_step_args_init(fw_delta_rule_step_args* args);
FW_API void fw_delta_rule_map_forward_args_init(fw_delta_rule_map_forward_args* args);
FW_API void fw_delta_rule_map_backward_args_init(fw_delta_rule_map_backward_args* args);
FW_API void fw_gla_options_init(fw_gla_options* options);
FW_API void fw_gla_inputs_init(fw_gla_inputs* inputs);
FW_API void fw_gla_forward_args_init(fw_gla_forward_args* args);
FW_API void fw_gla_backward_args_init(fw_gla_backward_args* args);
FW_API void fw_gla_step_args_init(fw_gla_step_args* args);
FW_API void fw_comba_options_init(fw_comba_options* options);
FW_API void fw_comba_inputs_init(fw_comba_inputs* inputs);
FW_API void fw_comba_forward_args_init(fw_comba_forward_args* args);
FW_API void fw_comba_backward_args_init(fw_comba_backward_args* args);
FW_API void fw_comba_step_args_init(fw_comba_step_args* args);
FW_API void fw_dplr_options_init(fw_dplr_options* options);
FW_API void fw_dplr_inputs_init(fw_dplr_inputs* inputs);
FW_API void fw_dplr_forward_args_init(fw_dplr_forward_args* args);
FW_API void fw_dplr_backward_args_init(fw_dplr_backward_args* args);
FW_API void fw_dplr_step_args_init(fw_dplr_step_args* args);
FW_API void fw_ttt_linear_options_init(fw_ttt_linear_options* options);
FW_API void fw_ttt_linear_inputs_init(fw_ttt_linear_inputs* inputs);
FW_API void fw_ttt_linear_forward_args_init(fw_ttt_linear_forward_args* args);
FW_API void fw_ttt_linear_backward_args_init(fw_ttt_linear_backward_args* args);
FW_API void fw_ttt_linear_step_args_init(fw_ttt_linear_step_args* args);
FW_API void fw_short_conv_options_init(fw_short_conv_options* options);
FW_API void fw_short_conv_inputs_init(fw_short_conv_inputs* inputs);
FW_API void fw_short_conv_forward_args_init(fw_short_conv_forward_args* args);
FW_API void fw_short_conv_backward_args_init(fw_short_conv_backward_args* args);
FW_API void fw_short_conv_step_args_init(fw_short_conv_step_args* args);
FW_API void fw_chunk_local_cumsum_args_init(fw_chunk_local_cumsum_args* args);
FW_API void fw_scaled_dot_kkt_forward_args_init(fw_scaled_dot_kkt_forward_args* args);
FW_API void fw_scaled_dot_kkt_backward_args_init(fw_scaled_dot_kkt_backward_args* args);
FW_API void fw_solve_tril_forward_args_init(fw_solve_tril_forward_args* args);
FW_API void fw_solve_tril_backward_args_init(fw_solve_tril_backward_args* args);
FW_API void fw_wy_forward_args_init(fw_wy_forward_args* args);
FW_API void fw_wy_backward_args_init(fw_wy_backward_args* args);
FW_API void fw_l2norm_forward_args_init(fw_l2norm_forward_args* args);
FW_API void fw_l2norm_backward_args_init(fw_l2norm_backward_args* args);
FW_API void fw_gate_activation_forward_args_init(fw_gate_activation_forward_args* args);
FW_API void fw_gate_activation_backward_args_init(fw_gate_activation_backward_args* args);
FW_API void fw_rms_norm_forward_args_init(fw_rms_norm_forward_args* args);
FW_API void fw_rms_norm_backward_args_init(fw_rms_norm_backward_args* args);

/* `implementation` may be null; otherwise it receives the name of what ran, which lives as long as the program. */
FW_API fw_status fw_delta_rule_forward(const fw_context* context, const fw_delta_rule_forward_args* args,
                                       const char** implementation);
FW_API fw_status fw_delta_rule_backward(const fw_context* context, const fw_delta_rule_backward_args* args,
                                        const char** implementation);
FW_API fw_status fw_delta_rule_step(const fw_context* context, const fw_delta_rule_step_args* args,
                                    const char** implementation);
FW_API fw_status fw_delta_rule_map_forward(const fw_context* context, const fw_delta_rule_map_forward_args* args,
                                           const char** implementation);
FW_API fw_status fw_delta_rule_map_backward(const fw_context* context, const fw_delta_rule_map_backward_args* args,
                                            const char** implementation);
FW_API fw_status fw_gla_forward(const fw_context* context, const fw_gla_forward_args* args,
                                const char** implementation);
FW_API fw_status fw_gla_backward(const fw_context* context, const fw_gla_backward_args* args,
                                 const char** implementation);
FW_API fw_status fw_gla_step(const fw_context* context, const fw_gla_step_args* args, const char** implementation);
FW_API fw_status fw_comba_forward(const fw_context* context, const fw_comba_forward_args* args,
                                  const char** implementation);
FW_API fw_status fw_comba_backward(const fw_context* context, const fw_comba_backward_args* args,
                                   const char** implementation);
FW_API fw_status fw_comba_step(const fw_context* context, const fw_comba_step_args* args, const char** implementation);
FW_API fw_status fw_dplr_forward(const fw_context* context, const fw_dplr_forward_args* args,
                                 const char** implementation);
FW_API fw_status fw_dplr_backward(const fw_context* context, const fw_dplr_backward_args* args,
                                  const char** implementation);
FW_API fw_status fw_dplr_step(const fw_context* context, const fw_dplr_step_args* args, const char** implementation);
FW_API fw_status fw_ttt_linear_forward(const fw_context* context, const fw_ttt_linear_forward_args* args,
                                       const char** implementation);
FW_API fw_status fw_ttt_linear_backward(const fw_context* context, const fw_ttt_linear_backward_args* args,
                                        const char** implementation);
FW_API fw_status fw_ttt_linear_step(const fw_context* context, const fw_ttt_linear_step_args* args,
                                    const char** implementation);
FW_API fw_status fw_short_conv_forward(const fw_context* context, const fw_short_conv_forward_args* args,
                                       const char** implementation);
FW_API fw_status fw_short_conv_backward(const fw_context* context, const fw_short_conv_backward_args* args,
                                        const char** implementation);
FW_API fw_status fw_short_conv_step(const fw_context* context, const fw_short_conv_step_args* args,
                                    const char** implementation);

FW_API fw_status fw_chunk_local_cumsum(const fw_context* context, const fw_chunk_local_cumsum_args* args,
                                       const char** implementation);
FW_API fw_status fw_scaled_dot_kkt_forward(const fw_context* context, const fw_scaled_dot_kkt_forward_args* args,
                                           const char** implementation);
FW_API fw_status fw_scaled_dot_kkt_backward(const fw_context* context, const fw_scaled_dot_kkt_backward_args* args,
                                            const char** implementation);
FW_API fw_status fw_solve_tril_forward(const fw_context* context, const fw_solve_tril_forward_args* args,
                                       const char** implementation);
FW_API fw_status fw_solve_tril_backward(const fw_context* context, const fw_solve_tril_backward_args* args,
                                        const char** implementation);
FW_API fw_status fw_wy_forward(const fw_context* context, const fw_wy_forward_args* args, const char** implementation);
FW_API fw_status fw_wy_backward(const fw_context* context, const fw_wy_backward_args* args,
                                const char** implementation);
FW_API fw_status fw_l2norm_forward(const fw_context* context, const fw_l2norm_forward_args* args,
                                   const char** implementation);
FW_API fw_status fw_l2norm_backward(const fw_context* context, const fw_l2norm_backward_args* args,
                                    const char** implementation);
FW_API fw_status fw_gate_activation_forward(const fw_context* context, const fw_gate_activation_forward_args* args,
                                            const char** implementation);
FW_API fw_status fw_gate_activation_backward(const fw_context* context, const fw_gate_activation_backward_args* args,
                                             const char** implementation);
FW_API fw_status fw_rms_norm_forward(const fw_context* context, const fw_rms_norm_forward_args* args,
                                     const char** implementation);
FW_API fw_status fw_rms_norm_backward(const fw_context* context, const fw_rms_norm_backward_args* args,
                                      const char** implementation);

/* NT, the chunks along axis 1 of chunk_states. `cu_seqlens` may be null: one length for all. */
FW_API fw_status fw_delta_rule_num_chunks(int64_t tokens, const fw_tensor* cu_seqlens, int32_t chunk_size,
                                          int64_t* num_chunks);
/* W of `kept` for q, k and v of a type and keys of K channels; 0 where nothing can be kept. With decays per channel most of it
   are keys that have their decays: `all` 0, and the backward makes these again. */
FW_API fw_status fw_delta_rule_kept_words(const fw_context* context, const fw_delta_rule_options* options,
                                          int32_t dtype, int64_t head_dim_k, int32_t all, int64_t* words);
/* The same of TTT-Linear, for heads of D channels. */
FW_API fw_status fw_ttt_linear_kept_words(const fw_context* context, const fw_ttt_linear_options* options,
                                          int32_t dtype, int64_t head_dim, int64_t* words);

#ifdef __cplusplus
}
#endif

#endif /* FASTWEIGHT_C_API_H_ */
