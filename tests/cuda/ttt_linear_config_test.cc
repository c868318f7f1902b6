// How TTT-linear's chunk kernels lie on a device, on the host.
#include <gtest/gtest.h>

#include "cuda/ttt_linear/chunk_chain/config.h"
#include "cuda/ttt_linear/chunk_fp32/config.h"
#include "cuda/ttt_linear/chunk_tiles/config.h"

namespace fastweight::cuda::ttt {
namespace {

TEST(CudaTttLinearConfig, Chain) {
  EXPECT_EQ(chain_config(64).text(), "D = 64, 256 threads, 68352 bytes of shared memory");
  EXPECT_EQ(chain_config(128).text(), "D = 128, 512 threads, 143872 bytes of shared memory");
  EXPECT_EQ(chain_config(1).text(), "D < 64, 64 threads, 68352 bytes of shared memory");
  EXPECT_EQ(chain_config(33).text(), "D < 64, 192 threads, 68352 bytes of shared memory");
  EXPECT_EQ(chain_config(65).text(), "D < 128, 320 threads, 143872 bytes of shared memory");
}

// For D = 64, unless shared memory is short, as on sm_89, partners are single warps; two blocks fit on a multiprocessor.
TEST(CudaTttLinearConfig, Forward) {
  constexpr size_t kSm90 = 227 * 1024, kSm89 = 99 * 1024;
  EXPECT_EQ(forward_config(64, kSm90).text(),
            "D = 64, a mini-batch per partner, 256 threads, 110592 bytes of shared memory");
  EXPECT_LE(2 * (forward_config(64, kSm90).shared_bytes + 1024), 228 * 1024u);
  EXPECT_EQ(forward_config(64, kSm89).text(), chain_config(64).text());
  EXPECT_EQ(forward_config(63, kSm90).text(), chain_config(63).text());
  EXPECT_EQ(forward_config(128, kSm90).text(), chain_config(128).text());
}

// Four groups of one warp for D = 64; one group on sm_80, which has less shared memory.
TEST(CudaTttLinearConfig, ChainInReverse) {
  constexpr size_t kSm90 = 227 * 1024, kSm80 = 163 * 1024;
  EXPECT_EQ(reverse_config(64, kSm90).text(), "D = 64, 4 groups, 256 threads, 206080 bytes of shared memory");
  EXPECT_EQ(reverse_config(20, kSm90).text(), "D < 64, 2 groups, 192 threads, 227840 bytes of shared memory");
  EXPECT_EQ(reverse_config(64, kSm80).text(), "D = 64, 1 group, 256 threads, 115072 bytes of shared memory");
  EXPECT_EQ(reverse_config(128, kSm90).text(), "D = 128, 1 group, 512 threads, 185088 bytes of shared memory");
  EXPECT_EQ(reverse_config(65, kSm90).text(), "D < 128, 1 group, 320 threads, 185088 bytes of shared memory");
  EXPECT_GT(reverse_config(128, kSm80).shared_bytes, kSm80) << "the way back is that of chunk_fp32";
}

// As many stages as a block's shared memory holds, on devices of sm_90, sm_80 and sm_89.
TEST(CudaTttLinearConfig, Tiles) {
  constexpr size_t kSm90 = 227 * 1024, kSm80 = 163 * 1024, kSm89 = 99 * 1024;
  EXPECT_EQ(tiles_config(64, 32, kSm90).text(), "D <= 64, C = 32, 128 threads, 4 stages, 60928 bytes of shared memory");
  EXPECT_EQ(tiles_config(128, 64, kSm90).text(),
            "D <= 128, C = 64, 256 threads, 4 stages, 226304 bytes of shared memory");
  EXPECT_EQ(tiles_config(100, 64, kSm80).text(),
            "D <= 128, C = 64, 224 threads, 2 stages, 127488 bytes of shared memory");
  EXPECT_EQ(tiles_config(20, 64, kSm89).text(), "D <= 64, C = 64, 64 threads, 3 stages, 97024 bytes of shared memory");
  EXPECT_GT(tiles_config(128, 64, kSm89).shared_bytes, kSm89) << "the caller declines";
  EXPECT_EQ(tiles_config(128, 64, kSm89).stages, 2);
}

// Matrices that do not fit into a block's shared memory lie in scratch memory, and few blocks go round.
TEST(CudaTttLinearConfig, Fp32) {
  constexpr size_t kSm90 = 227 * 1024, kSm89 = 99 * 1024;
  EXPECT_EQ(chunk_fp32::forward_config(64, 16, 128, 132, kSm90).text(), "256 threads, 43392 bytes of shared memory");
  EXPECT_EQ(chunk_fp32::backward_config(64, 16, 128, 132, kSm90).text(), "256 threads, 79232 bytes of shared memory");
  EXPECT_EQ(chunk_fp32::backward_config(64, 16, 1000, 132, kSm90).blocks, 1000);
  const chunk_fp32::Config wide = chunk_fp32::backward_config(128, 64, 1000, 132, kSm89);
  EXPECT_EQ(wide.text(), "256 threads, 494336 bytes of scratch memory");
  EXPECT_EQ(wide.blocks, 264);
  EXPECT_EQ(wide.shared_bytes(), 0u);
}

}  // namespace
}  // namespace fastweight::cuda::ttt
