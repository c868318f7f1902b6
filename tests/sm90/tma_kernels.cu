#include "tests/sm90/tma_kernels.h"

#include "cuda/common/launch.h"
#include "cuda/sm90/panel_tile.cuh"
#include "cuda/sm90/tma.cuh"

namespace fastweight::cuda {
namespace {

constexpr int kThreads = 64;

// The box begins at a multiple of 1024 bytes, but not at the beginning of shared memory.
template <int kBytes>
struct alignas(1024) Shared {
  TransactionBarrier barrier;
  alignas(1024) unsigned char box[kBytes];
};
constexpr int kMostBytes = 32 * 1024;

template <int kRank>
__device__ __forceinline__ void place_of(const BoxPlace& place, int (&at)[kRank]) {
#pragma unroll
  for (int i = 0; i < kRank; ++i) at[i] = place.at[i];
}

template <int kRank>
__global__ void load_kernel(const __grid_constant__ TensorMap map, BoxPlace place, uint32_t bytes, unsigned char* out) {
  auto& s = aligned_shared<Shared<kMostBytes>>();
  if (threadIdx.x == 0) {
    prefetch_map(map);
    s.barrier.init(1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int at[kRank];
    place_of(place, at);
    s.barrier.arrive_expecting(bytes);
    load_box(shared_address(s.box), map, at, s.barrier);
  }
  s.barrier.wait(0);
  for (uint32_t i = threadIdx.x; i < bytes; i += kThreads) out[i] = s.box[i];
}

template <int kRank>
__global__ void store_kernel(const __grid_constant__ TensorMap map, BoxPlace place, uint32_t bytes,
                             const unsigned char* in) {
  auto& s = aligned_shared<Shared<kMostBytes>>();
  for (uint32_t i = threadIdx.x; i < bytes; i += kThreads) s.box[i] = in[i];
  fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    int at[kRank];
    place_of(place, at);
    store_box(map, at, shared_address(s.box));
    commit_stores();
    wait_stores<0>();
  }
}

__global__ void tile_kernel(const __grid_constant__ TensorMap map, BoxPlace place, uint16_t* out) {
  using Tile = PanelTile<64, 128>;
  auto& s = aligned_shared<Shared<Tile::kBytes>>();
  const Tile tile(s.box);
  if (threadIdx.x == 0) {
    s.barrier.init(1);
    fence_barrier_init();
    s.barrier.arrive_expecting(Tile::kBytes);
    load_box(tile.panel(0), map, {place.at[0], place.at[1]}, s.barrier);
    load_box(tile.panel(1), map, {place.at[0] + Tile::kPanelColumns, place.at[1]}, s.barrier);
  }
  __syncthreads();
  s.barrier.wait(0);
  // As C layouts of the transposed tile, by one warp for 64 columns.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int row = 0; row < 64; row += 16) {
    for (int m = 4 * warp; m < 4 * warp + 4; ++m) {
      uint32_t a[4];
      tile.load_a(row, m, lane, a);
      for (int i = 0; i < 4; ++i) {
        uint16_t* pair = out + (row + lane / 4 + i % 2 * 8) * 128 + 16 * m + lane % 4 * 2 + i / 2 * 8;
        pair[0] = static_cast<uint16_t>(a[i]);
        pair[1] = static_cast<uint16_t>(a[i] >> 16);
      }
    }
  }
}

constexpr int kStages = 3, kTileBytes = 4096, kTileRows = 32;

struct alignas(1024) Ring {
  TransactionBarrier filled[kStages];
  alignas(1024) unsigned char tile[kStages][kTileBytes];
};

__global__ void ring_kernel(const unsigned char* in, int tiles, const __grid_constant__ TensorMap map) {
  auto& s = aligned_shared<Ring>();
  if (threadIdx.x > 0) return;
  for (TransactionBarrier& barrier : s.filled) barrier.init(1);
  fence_barrier_init();
  const auto load = [&](int t) {
    TransactionBarrier& barrier = s.filled[t % kStages];
    barrier.arrive_expecting(kTileBytes);
    load_bytes(shared_address(s.tile[t % kStages]), in + t * kTileBytes, kTileBytes, barrier);
  };
  // Two loads ahead: the third buffer is being stored.
  for (int t = 0; t < 2 && t < tiles; ++t) load(t);
  for (int t = 0; t < tiles; ++t) {
    s.filled[t % kStages].wait(static_cast<uint32_t>(t / kStages % 2));
    store_box(map, {0, t * kTileRows}, shared_address(s.tile[t % kStages]));
    commit_stores();
    if (t + 2 < tiles) {
      wait_stores_read<1>();
      load(t + 2);
    }
  }
  wait_stores_read<0>();
}

// body.template operator()<rank>()
template <class Body>
void with_rank(int rank, const Body& body) {
  if (rank == 2) {
    body.template operator()<2>();
  } else if (rank == 3) {
    body.template operator()<3>();
  } else if (rank == 4) {
    body.template operator()<4>();
  } else {
    body.template operator()<5>();
  }
}

}  // namespace

void load_one_box(const TensorMap& map, int rank, const BoxPlace& place, uint32_t bytes, void* out) {
  with_rank(rank, [&]<int kRank>() {
    launch<load_kernel<kRank>>("load", {}, {1, kThreads, sizeof(Shared<kMostBytes>)}, map, place, bytes,
                               static_cast<unsigned char*>(out));
  });
}

void store_one_box(const TensorMap& map, int rank, const BoxPlace& place, uint32_t bytes, const void* in) {
  with_rank(rank, [&]<int kRank>() {
    launch<store_kernel<kRank>>("store", {}, {1, kThreads, sizeof(Shared<kMostBytes>)}, map, place, bytes,
                                static_cast<const unsigned char*>(in));
  });
}

void read_tile(const TensorMap& map, const BoxPlace& place, uint16_t* out) {
  launch<tile_kernel>("tile", {}, {1, kThreads, sizeof(Shared<PanelTile<64, 128>::kBytes>)}, map, place, out);
}

void copy_through_ring(const void* in, int tiles, const TensorMap& map) {
  launch<ring_kernel>("ring", {}, {1, 32, sizeof(Ring)}, static_cast<const unsigned char*>(in), tiles, map);
}

}  // namespace fastweight::cuda
