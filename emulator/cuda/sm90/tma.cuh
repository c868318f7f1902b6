// What src/cuda/sm90/tma.cuh names, in C++. The destination of a load holds NaNs until it lands, which is as late as the
// block allows; a store has read its source when it is issued, and finds it the same when it is waited for.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/sm90/barriers.cuh"
#include "cuda/sm90/tensor_map.h"
#include "tensor_map.h"

namespace fastweight::cuda {
namespace emulated {

inline unsigned char* shared_segment(uint32_t address) {
  return static_cast<unsigned char*>(emulator::shared_pointer(address, emulator::kSegment));
}

inline void check_box(const emulator::TensorMapData& map, int rank, const int* place, uint32_t shared) {
  if (map.rank != rank) emulator::fail("a copy of another rank than its tensor map");
  for (int i = 0; i < rank; ++i) {
    if (static_cast<uint32_t>(place[i]) <= map.last[i]) continue;
    const std::string where = std::to_string(place[i]) + " of " + std::to_string(map.last[i] + 1);
    emulator::fail(("a box that begins outside of its tensor, at " + where).c_str());
  }
  if (shared % 128 != 0) emulator::fail("a box in shared memory that is not aligned to 128 bytes");
}

}  // namespace emulated

template <int kRank>
void load_box(uint32_t to, const TensorMap& map, const int (&place)[kRank], TransactionBarrier& barrier) {
  const emulator::TensorMapData data = emulator::data_of(map);
  emulated::check_box(data, kRank, place, to);
  emulator::for_each_in_box(data, place, to, [](uint32_t shared, char*, uint32_t) {
    std::memset(emulated::shared_segment(shared), 0xff, emulator::kSegment);
  });
  std::vector<int> at(place, place + kRank);
  const uint32_t tells = shared_address(&barrier.word);
  emulator::begin_landing([=] {
    emulator::for_each_in_box(data, at.data(), to, [](uint32_t shared, const char* global, uint32_t inside) {
      unsigned char* segment = emulated::shared_segment(shared);
      std::memcpy(segment, global, inside);
      std::memset(segment + inside, 0, emulator::kSegment - inside);
    });
    emulated::barrier_at(tells).complete(box_bytes(data));
  });
}

inline void load_bytes(uint32_t to, const void* from, uint32_t bytes, TransactionBarrier& barrier) {
  if (bytes % 16 != 0 || to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    emulator::fail("a copy of bytes that is not aligned to 16");
  }
  const auto write = [=](const auto& segment) {
    for (uint32_t i = 0; i < bytes; i += 16) segment(emulated::shared_segment(to + i), i);
  };
  write([](unsigned char* segment, uint32_t) { std::memset(segment, 0xff, 16); });
  const uint32_t tells = shared_address(&barrier.word);
  emulator::begin_landing([=] {
    write([&](unsigned char* segment, uint32_t i) { std::memcpy(segment, static_cast<const char*>(from) + i, 16); });
    emulated::barrier_at(tells).complete(bytes);
  });
}

template <int kRank>
void store_box(const TensorMap& map, const int (&place)[kRank], uint32_t from) {
  const emulator::TensorMapData data = emulator::data_of(map);
  emulated::check_box(data, kRank, place, from);
  const std::vector<int> at(place, place + kRank);
  std::vector<unsigned char> content;  // in the order of the visits
  const auto read = [=](std::vector<unsigned char>& into) {
    emulator::for_each_in_box(data, at.data(), from, [&](uint32_t shared, char*, uint32_t) {
      const unsigned char* segment = emulated::shared_segment(shared);
      into.insert(into.end(), segment, segment + emulator::kSegment);
    });
  };
  read(content);
  emulator::async_work().begin_store(
      [=] {
        std::vector<unsigned char> now;
        read(now);
        return now == content;
      },
      [=] {
        const unsigned char* next = content.data();
        emulator::for_each_in_box(data, at.data(), from, [&](uint32_t, char* global, uint32_t inside) {
          std::memcpy(global, next, inside);
          next += emulator::kSegment;
        });
      });
}

inline void commit_stores() { emulator::async_work().commit_stores(); }
template <int kPending>
void wait_stores_read() {
  emulator::async_work().wait_stores(kPending, false);
}
template <int kPending>
void wait_stores() {
  emulator::async_work().wait_stores(kPending, true);
}

inline void prefetch_map(const TensorMap& map) { emulator::data_of(map); }

}  // namespace fastweight::cuda
