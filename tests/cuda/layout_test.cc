// How tensors and options reach the kernels, on the host.
#include <gtest/gtest.h>

#include <vector>

#include "cuda/common/tensor.h"
#include "cuda/delta_rule/chunk_16bit/config.h"
#include "cuda/delta_rule/chunk_16bit/lower.h"
#include "cuda/delta_rule/chunk_fp32/config.h"
#include "cuda/delta_rule/device_problem.h"
#include "support/tensor.h"

namespace fastweight::cuda {
namespace {

using support::Tensor;

TensorView dense_view(DType dtype, std::initializer_list<int64_t> shape) {
  alignas(256) static char memory[1];
  return TensorView::dense(memory, dtype, shape);
}

TEST(CudaLayout, VectorsOfFour) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const TensorView view = dense_view(dtype, {2, 3, 4, 8});
    EXPECT_TRUE(device_tensor(view).aligned_vec4);

    TensorView shifted = view;
    shifted.data = static_cast<char*>(view.data) + 2 * element_size(dtype);
    EXPECT_FALSE(device_tensor(shifted).aligned_vec4) << "two elements off";
    shifted.data = static_cast<char*>(view.data) + 4 * element_size(dtype);
    EXPECT_TRUE(device_tensor(shifted).aligned_vec4) << "one vec4 off";

    EXPECT_FALSE(device_tensor(dense_view(dtype, {2, 3, 4, 6})).aligned_vec4) << "a row of six";
    TensorView gaps = view;
    gaps.strides[2] = 10;
    EXPECT_FALSE(device_tensor(gaps).aligned_vec4) << "rows ten apart";
    gaps.shape[2] = 1;
    EXPECT_TRUE(device_tensor(gaps).aligned_vec4) << "one row: its stride does not matter";
    TensorView spread = view;
    spread.strides[3] = 2;
    EXPECT_FALSE(device_tensor(spread).aligned_vec4) << "every second element";
  }
  EXPECT_FALSE(device_tensor({}).present());
}

TEST(CudaLayout, StatesInEitherOrder) {
  const TensorView k_first = dense_view(DType::kF32, {5, 2, 24, 40}), v_first = dense_view(DType::kF32, {5, 2, 40, 24});
  const DeviceStates a = device_states(k_first, false), b = device_states(v_first, true);
  EXPECT_EQ(a.k_stride, 40);
  EXPECT_EQ(a.v_stride, 1);
  EXPECT_TRUE(a.v_aligned_vec4 && !a.k_aligned_vec4);
  EXPECT_EQ(b.k_stride, 1);
  EXPECT_EQ(b.v_stride, 24);
  EXPECT_TRUE(b.k_aligned_vec4 && !b.v_aligned_vec4);
  for (const DeviceStates& states : {a, b}) {
    EXPECT_EQ(states.outer_strides[0], 2 * 24 * 40);
    EXPECT_EQ(states.outer_strides[1], 24 * 40);
  }
  const DeviceStates chunks = device_states(dense_view(DType::kBF16, {1, 7, 2, 24, 40}), false);
  EXPECT_EQ(chunks.outer_strides[1], 2 * 24 * 40);
  EXPECT_EQ(chunks.outer_strides[2], 24 * 40);
  EXPECT_FALSE(device_states(dense_view(DType::kF32, {5, 2, 24, 3}), false).v_aligned_vec4) << "three columns";
}

TEST(CudaLayout, OptionsOfAProblem) {
  DeltaRuleStepProblem problem;
  problem.sizes = {1, 9, 2, 6, 3, 32, 64, 4, 4};
  problem.scale = 0.25;
  problem.args.options.gate = Gate::kPerChannel;
  problem.args.options.gate_in_kernel = true;
  problem.args.options.lower_bound = -5;
  problem.args.options.beta_sigmoid = problem.args.options.allow_neg_eigval = true;
  problem.args.in.q = problem.args.in.k = dense_view(DType::kBF16, {1, 9, 2, 32});
  problem.args.in.v = dense_view(DType::kBF16, {1, 9, 6, 64});
  problem.args.in.beta = dense_view(DType::kF32, {1, 9, 6, 64});
  const Tensor offsets(DType::kI64, {5});
  problem.args.in.cu_seqlens = offsets.view();

  const DeltaRuleDeviceProblem device = device_problem(problem);
  EXPECT_EQ(device.num_value_heads, 6);
  EXPECT_EQ(device.group, 3);
  EXPECT_EQ(device.head_dim_k, 32);
  EXPECT_EQ(device.head_dim_v, 64);
  EXPECT_EQ(device.sequences.count, 4);
  EXPECT_EQ(device.sequences.tokens, 9);
  EXPECT_EQ(device.sequences.offsets, offsets.data());
  EXPECT_EQ(device.scale, 0.25f);
  EXPECT_EQ(device.beta_factor, 2.0f);
  EXPECT_EQ(device.lower_bound, -5.0f);
  EXPECT_TRUE(device.has_lower_bound && device.gate_in_kernel && device.beta_sigmoid && device.beta_per_value);
  EXPECT_TRUE(device.qkv_aligned_vec4);
  EXPECT_FALSE(device.a_log.present() || device.dt_bias.present());

  problem.args.options.lower_bound = DeltaRuleOptions::kUnset;
  problem.args.in.v.strides[1] += 2;
  EXPECT_FALSE(device_problem(problem).has_lower_bound);
  EXPECT_FALSE(device_problem(problem).qkv_aligned_vec4);
}

// How the scans are cut, for devices that are not here: so many multiprocessors, so much shared memory in a block.
constexpr int kHopper = 132;
constexpr size_t kShared227 = 227 * 1024, kShared163 = 163 * 1024, kShared99 = 99 * 1024;

std::string scan_of(int64_t heads, int K, int V, bool per_channel, size_t shared = kShared227) {
  return chunk_16bit::scan_config({heads, K, V, per_channel}, kHopper, shared).text();
}

TEST(CudaConfig, Chunk16BitByHeads) {
  // Few heads: narrow blocks fill the device. Many: wide warps share their operands.
  EXPECT_EQ(scan_of(33, 128, 128, false), "K 128, columns 32, warps 4, stages 2");
  EXPECT_EQ(scan_of(34, 128, 128, false), "K 128, columns 64, warps 8, stages 2");
  EXPECT_EQ(scan_of(66, 128, 128, false), "K 128, columns 64, warps 8, stages 2");
  EXPECT_EQ(scan_of(67, 128, 128, false), "K 128, columns 128, warps 8, stages 2");
  EXPECT_EQ(scan_of(1000, 64, 128, true), "K 64, columns 128, warps 8, stages 2");
}

TEST(CudaConfig, Chunk16BitBySizes) {
  EXPECT_EQ(scan_of(1000, 65, 32, false), "K 128, columns 32, warps 4, stages 2");
  EXPECT_EQ(scan_of(1000, 64, 33, false), "K 64, columns 64, warps 8, stages 2");
  EXPECT_EQ(scan_of(1000, 64, 64, false), "K 64, columns 64, warps 8, stages 2");
  EXPECT_EQ(scan_of(1000, 64, 65, false), "K 64, columns 128, warps 8, stages 2");
  // The state of 256 channels leaves no registers for two tiles of columns.
  EXPECT_EQ(scan_of(1000, 129, 256, false), "K 256, columns 64, warps 8, stages 2");
}

TEST(CudaConfig, Chunk16BitByMemory) {
  // The second stage goes first, the wide blocks with it: they are not worth one stage.
  EXPECT_EQ(scan_of(1000, 256, 128, true), "K 256, columns 64, warps 8, stages 1");
  EXPECT_EQ(scan_of(1000, 128, 128, true, kShared163), "K 128, columns 64, warps 8, stages 1");
  EXPECT_EQ(scan_of(1000, 128, 128, false, kShared99), "K 128, columns 64, warps 8, stages 1");
  EXPECT_EQ(scan_of(1000, 64, 128, false, kShared99), "K 64, columns 64, warps 8, stages 2");
}

TEST(CudaConfig, ChunkFp32) {
  const auto scan = [](int64_t heads, int K, int V) {
    return chunk_fp32::scan_config(heads, K, V, false, kHopper).text();
  };
  EXPECT_EQ(scan(64, 128, 128), "K 128, columns 64, warps 4, stages 2") << "128 blocks, one each";
  EXPECT_EQ(scan(33, 128, 128), "K 128, columns 32, warps 2, stages 2") << "132 blocks of half the warps, one each";
  EXPECT_EQ(scan(67, 64, 128), "K 64, columns 32, warps 2, stages 2") << "three of two warps are less than two of four";
  EXPECT_EQ(scan(1, 200, 16), "K 256, columns 32, warps 2, stages 2");
}

TEST(CudaLayout, BlocksOfLowerTriangularMatrices) {
  int next = 0;  // row after row, without gaps
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(chunk_16bit::lower_pitch(i / 16), (i / 16 + 1) * 16);
    for (int j = 0; j < (i / 16 + 1) * 16; ++j) EXPECT_EQ(chunk_16bit::lower_offset(i, j), next++) << i << ", " << j;
  }
  EXPECT_EQ(chunk_16bit::kLowerElements, next);
}

}  // namespace
}  // namespace fastweight::cuda
