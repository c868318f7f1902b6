#include "grid.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "block.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {
namespace {

std::vector<std::unique_ptr<Block>>& free_places() {
  static auto* const places = new std::vector<std::unique_ptr<Block>>;
  return *places;
}

// A kernel of which blocks have stopped for others, or have yet to begin.
class Kernel {
 public:
  Kernel(const Grid& grid, std::function<void()> body) : grid_(grid), body_(std::move(body)) {}

  void begin(Hold hold) {
    while (next_ < count() && blocks_.size() < kMostHeld) begin_next(hold);
  }
  void go_on(Hold hold) {
    for (auto& block : blocks_) {
      if (!block->has_left()) block->go_on(hold);
    }
    give_back();
  }
  // All that is left of it, when the kernels before it have completed.
  void finish() {
    go_on({});
    while (next_ < count()) begin_next({});
  }

  // As far as blocks have begun.
  bool lets_next_start() const {
    return !blocks_.empty() && std::all_of(blocks_.begin(), blocks_.end(), [](auto& x) { return x->lets_start(); });
  }

 private:
  static constexpr size_t kMostHeld = 6;  // blocks at once

  uint64_t count() const { return uint64_t{grid_.blocks.x} * grid_.blocks.y * grid_.blocks.z; }

  void begin_next(Hold hold) {
    auto& places = free_places();
    if (places.empty()) places.push_back(std::make_unique<Block>());
    blocks_.push_back(std::move(places.back()));
    places.pop_back();
    const auto x = grid_.blocks.x, y = grid_.blocks.y;
    const uint3 index{static_cast<unsigned>(next_ % x), static_cast<unsigned>(next_ / x % y),
                      static_cast<unsigned>(next_ / x / y)};
    ++next_;
    blocks_.back()->begin(grid_, index, body_, hold);
    give_back();
  }
  void give_back() {
    for (auto& block : blocks_) {
      if (block->has_left()) free_places().push_back(std::move(block));
    }
    std::erase(blocks_, nullptr);
  }

  Grid grid_;
  std::function<void()> body_;
  uint64_t next_ = 0;  // the first block that has not begun
  std::vector<std::unique_ptr<Block>> blocks_;
};

// Kernels that overlap, in the order of their stream. What one may not rely on: the first blocks of the next one do all that
// they do before they wait for it when its own first blocks let the next one start, and it goes on when somebody needs it.
class Kernels {
 public:
  static Kernels& instance() {
    static auto* const kernels = new Kernels;
    return *kernels;
  }

  void run(cudaStream_t stream, const Grid& grid, std::function<void()> body) {
    if (!grid.overlaps || stream != stream_) finish();
    stream_ = stream;
    while (!begun_.empty() && !begun_.back()->lets_next_start()) let_last_go_on();
    const bool first = begun_.empty();
    begun_.push_back(std::make_unique<Kernel>(grid, std::move(body)));
    begun_.back()->begin({.at_wait = !first, .at_start = first});
    if (first && !begun_.back()->lets_next_start()) finish();
  }

  void finish() {
    for (; !begun_.empty(); begun_.pop_front()) begun_.front()->finish();
  }

 private:
  // Until it lets the next one start, or to its end.
  void let_last_go_on() {
    for (; begun_.size() > 1; begun_.pop_front()) begun_.front()->finish();
    begun_.front()->go_on({.at_start = true});
    if (!begun_.front()->lets_next_start()) finish();
  }

  std::deque<std::unique_ptr<Kernel>> begun_;
  cudaStream_t stream_ = nullptr;
};

std::mutex& kernels_mutex() {
  static std::mutex one_at_a_time;
  return one_at_a_time;
}

void perform(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    if (copy.from == nullptr) {
      std::memset(copy.to, 0, copy.bytes);
    } else {
      std::memcpy(copy.to, copy.from, copy.bytes);
    }
  }
}

}  // namespace

void run(cudaStream_t stream, const Grid& grid, std::function<void()> body) {
  const std::lock_guard lock(kernels_mutex());
  Kernels::instance().run(stream, grid, std::move(body));
}
void finish() {
  const std::lock_guard lock(kernels_mutex());
  Kernels::instance().finish();
}

void together(const char* name, WarpOperation operation, void* mine) {
  Block::running->meet(name, operation, mine, false);
}
void warpgroup_together(const char* name, WarpOperation operation, void* mine) {
  Block::running->meet(name, operation, mine, true);
}

void set_registers(int count) { Block::running->set_registers(count); }

int elected_lane() { return Block::running->elected_lane(); }

void wait_for_phase(uint32_t barrier, bool parity) { Block::running->wait_for_phase(barrier, parity); }
void begin_landing(std::function<void()> landing) { Block::running->begin_landing(std::move(landing)); }
AsyncWork& async_work() { return Block::running->current().async; }
void fail(const char* message) { Block::running->fail("%s", message); }

void block_barrier() { named_barrier(0, 0); }

void named_barrier(int id, int threads) {
  Block& block = *Block::running;
  block.arrive(id, threads);
  block.current().barrier = static_cast<size_t>(id);
  block.stop(State::kAtBarrier);
}

// Those who waited may get ahead of the one that arrives.
void arrive_at_named_barrier(int id, int threads) {
  Block::running->arrive(id, threads);
  Block::running->stop(State::kPaused);
}

void wait_for_previous_kernels() { Block::running->wait_for_previous_kernels(); }
void let_next_kernel_start() { Block::running->let_next_kernel_start(); }
void wait_for_flag() { Block::running->wait_for_flag(); }

unsigned char* shared_memory() { return Block::running->shared(); }
uint32_t shared_address(const void* pointer) { return Block::running->shared_address(pointer); }
void* shared_pointer(uint32_t address, size_t bytes) { return Block::running->shared_pointer(address, bytes); }

void begin_copy(void* to, const void* from, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(from) % bytes != 0)
    Block::running->fail("a copy from an address that is not aligned");
  Block::running->current().copies.push_back({to, from, bytes});
}

void commit_copies() {
  Fiber& fiber = Block::running->current();
  fiber.committed.push_back(std::move(fiber.copies));
  fiber.copies.clear();
}

void wait_copies(int pending) {
  auto& committed = Block::running->current().committed;
  while (committed.size() > static_cast<size_t>(pending)) {
    perform(committed.front());
    committed.pop_front();
  }
}

}  // namespace emulator
