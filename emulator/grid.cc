#include "grid.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {
namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kSharedBytes = 256 * 1024;  // more than any device has
constexpr unsigned char kPoison = 0xff;      // a NaN in every floating-point type
constexpr size_t kBarriers = 16;

enum class State { kReady, kPaused, kTogether, kAtBarrier, kLeft };

struct Copy {
  void* to;
  const void* from;  // null: zeros
  size_t bytes;
};

struct Fiber {
  State state = State::kLeft;
  const char* waits_for = "";
  WarpOperation operation = nullptr;
  void* mine = nullptr;
  size_t barrier = 0;  // where it stands

  bool waited = false;  // for the kernels before this one

  std::vector<Copy> copies;                 // not yet committed
  std::deque<std::vector<Copy>> committed;  // oldest first

  bool started = false;
  jmp_buf place;  // where it goes on
  void* stack = nullptr;
};

void* map_pages(size_t bytes) {
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) {
    std::perror("emulator: mmap");
    std::abort();
  }
  return pages;
}

// One block runs at a time. The fibers outlive it, each with its stack: entering one for the first time costs a system
// call, going from one to the other does not.
class Block {
 public:
  void run(const Grid& grid, uint3 index, const std::function<void()>& body) {
    grid_ = &grid;
    body_ = &body;
    blockIdx = index;
    const size_t threads = size_t{grid.threads.x} * grid.threads.y * grid.threads.z;
    if (threads == 0 || threads > 1024 || threads % kLanes != 0) {
      fail("a block of %zu threads: expected whole warps, at most 1024 threads", threads);
    }
    while (fibers_.size() < threads) fibers_.push_back(std::make_unique<Fiber>());
    prepare_shared(grid.shared_bytes);
    for (Barrier& barrier : barriers_) barrier = {};
    for (size_t i = 0; i < threads; ++i) {
      fibers_[i]->state = State::kReady;
      fibers_[i]->waited = false;
      fibers_[i]->copies.clear();
      fibers_[i]->committed.clear();
    }
    const size_t warps = threads / kLanes;
    backwards_ = (index.x + index.y + index.z) % 2 == 1;
    while (run_next_warp(warps)) open_barriers(threads);
    report_waiting(threads);
  }

  Fiber& current() { return *fibers_[current_]; }

  // Of the running thread. Barrier 0 is for all that have not left, whatever `threads` says.
  void arrive(int id, int threads) {
    Barrier& barrier = barriers_[id];
    const auto expected = static_cast<size_t>(threads);
    if (id > 0 && barrier.arrived > 0) {
      if (barrier.expected != expected) fail("threads disagree about the size of barrier %d", id);
      if (barrier.arrived == expected) fail("too many threads at barrier %d", id);
    }
    barrier.expected = expected;
    ++barrier.arrived;
  }

  void stop(State state) {
    Fiber& fiber = current();
    fiber.state = state;
    if (_setjmp(fiber.place) == 0) _longjmp(scheduler_, 1);
  }

  unsigned char* shared() { return shared_; }
  uint32_t shared_address(const void* pointer) {
    const auto offset = static_cast<const unsigned char*>(pointer) - arena_;
    if (offset < 0 || offset > static_cast<ptrdiff_t>(kSharedBytes)) fail("an address outside dynamic shared memory");
    return static_cast<uint32_t>(offset);
  }
  void* shared_pointer(uint32_t address, size_t bytes) {
    if (arena_ + address < shared_ || address + bytes > kSharedBytes) fail("an address outside dynamic shared memory");
    if (address % bytes != 0) fail("address %zu of shared memory is not aligned to the access", size_t{address});
    return arena_ + address;
  }

  template <class... Args>
  [[noreturn]] void fail(const char* format, Args... args) {
    std::fprintf(stderr, "emulator: block (%u, %u, %u) of a kernel, thread %u: ", blockIdx.x, blockIdx.y, blockIdx.z,
                 threadIdx.x);
    std::fprintf(stderr, format, args...);
    std::fputc('\n', stderr);
    std::abort();
  }

 private:
  struct Barrier {
    size_t arrived = 0, expected = 0;
  };

  // The first warp that can go on does, as far as it can: it gets ahead of the others by as much as barriers allow.
  // False when none can.
  bool run_next_warp(size_t warps) {
    for (size_t i = 0; i < warps; ++i) {
      const size_t warp = backwards_ ? warps - 1 - i : i;
      bool can_go_on = false;
      for (size_t lane = 0; lane < kLanes; ++lane) {
        State& state = fibers_[warp * kLanes + lane]->state;
        if (state == State::kPaused) state = State::kReady;
        can_go_on = can_go_on || state == State::kReady;
      }
      if (!can_go_on) continue;
      run_warp(warp);
      return true;
    }
    return false;
  }

  // Lets the threads at complete barriers go on.
  void open_barriers(size_t threads) {
    size_t left = 0;
    for (size_t i = 0; i < threads; ++i) left += fibers_[i]->state == State::kLeft;
    barriers_[0].expected = threads - left;
    for (size_t id = 0; id < kBarriers; ++id) {
      Barrier& barrier = barriers_[id];
      if (barrier.arrived == 0 || barrier.arrived != barrier.expected) continue;
      barrier = {};
      for (size_t i = 0; i < threads; ++i) {
        if (fibers_[i]->state == State::kAtBarrier && fibers_[i]->barrier == id) fibers_[i]->state = State::kReady;
      }
    }
  }

  void report_waiting(size_t threads) {
    for (size_t i = 0; i < threads; ++i) {
      if (fibers_[i]->state == State::kAtBarrier)
        fail("thread %zu waits at barrier %zu forever", i, fibers_[i]->barrier);
    }
  }

  void prepare_shared(size_t bytes) {
    if (arena_ == nullptr) {
      const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
      arena_ = static_cast<unsigned char*>(map_pages(kSharedBytes + page));
      mprotect(arena_ + kSharedBytes, page, PROT_NONE);
    }
    const size_t rounded = (bytes + 127) / 128 * 128;
    if (rounded > kSharedBytes) fail("%zu bytes of shared memory", bytes);
    shared_ = arena_ + kSharedBytes - rounded;
    std::memset(shared_, kPoison, rounded);
  }

  // Until every lane has left, pauses or stands at a barrier.
  void run_warp(size_t warp) {
    for (;;) {
      for (size_t i = 0; i < kLanes; ++i) {
        const size_t thread = warp * kLanes + (backwards_ ? kLanes - 1 - i : i);
        if (fibers_[thread]->state == State::kReady) resume(thread);
      }
      void* mine[kLanes];
      WarpOperation operation = nullptr;
      int waiting = 0;
      const char* name = "";
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const Fiber& fiber = *fibers_[warp * kLanes + lane];
        if (fiber.state != State::kTogether) continue;
        if (waiting > 0 && fiber.operation != operation) fail("lanes of a warp at %s and %s", name, fiber.waits_for);
        operation = fiber.operation;
        name = fiber.waits_for;
        mine[lane] = fiber.mine;
        ++waiting;
      }
      if (waiting == 0) return;
      if (waiting != kLanes) fail("only %d lanes of a warp at %s", waiting, name);
      operation(mine);
      for (size_t lane = 0; lane < kLanes; ++lane) fibers_[warp * kLanes + lane]->state = State::kReady;
    }
  }

  void resume(size_t index) {
    current_ = index;
    const auto i = static_cast<unsigned>(index);
    const dim3& n = grid_->threads;
    threadIdx = {i % n.x, i / n.x % n.y, i / (n.x * n.y)};
    if (_setjmp(scheduler_) != 0) return;
    Fiber& fiber = *fibers_[index];
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    fiber.stack = map_pages(kStackBytes);
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(
        &context, [] { instance().live(); }, 0);
    setcontext(&context);
  }

  // A fiber's life: one thread of a block after the other.
  void live() {
    for (;;) {
      (*body_)();
      if (grid_->overlaps && !current().waited) fail("leaves without having waited for the kernels before");
      stop(State::kLeft);
    }
  }

 public:
  static Block& instance() {
    static Block* const block = new Block;
    return *block;
  }

 private:
  const Grid* grid_ = nullptr;
  const std::function<void()>* body_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  Barrier barriers_[kBarriers];
  bool backwards_ = false;  // the order of warps and lanes
  size_t current_ = 0;
  jmp_buf scheduler_;
  unsigned char* arena_ = nullptr;
  unsigned char* shared_ = nullptr;
};

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

void run(const Grid& grid, const std::function<void()>& body) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  gridDim = grid.blocks;
  blockDim = grid.threads;
  uint3 index;
  for (index.z = 0; index.z < grid.blocks.z; ++index.z) {
    for (index.y = 0; index.y < grid.blocks.y; ++index.y) {
      for (index.x = 0; index.x < grid.blocks.x; ++index.x) Block::instance().run(grid, index, body);
    }
  }
}

void together(const char* name, WarpOperation operation, void* mine) {
  Fiber& fiber = Block::instance().current();
  fiber.waits_for = name;
  fiber.operation = operation;
  fiber.mine = mine;
  Block::instance().stop(State::kTogether);
}

void block_barrier() { named_barrier(0, 0); }

void named_barrier(int id, int threads) {
  Block& block = Block::instance();
  block.arrive(id, threads);
  block.current().barrier = static_cast<size_t>(id);
  block.stop(State::kAtBarrier);
}

// Those who waited may get ahead of the one that arrives.
void arrive_at_named_barrier(int id, int threads) {
  Block::instance().arrive(id, threads);
  Block::instance().stop(State::kPaused);
}

void wait_for_previous_kernels() { Block::instance().current().waited = true; }

unsigned char* shared_memory() { return Block::instance().shared(); }
uint32_t shared_address(const void* pointer) { return Block::instance().shared_address(pointer); }
void* shared_pointer(uint32_t address, size_t bytes) { return Block::instance().shared_pointer(address, bytes); }

void begin_copy(void* to, const void* from, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(from) % bytes != 0)
    Block::instance().fail("a copy from an address that is not aligned");
  Block::instance().current().copies.push_back({to, from, bytes});
}

void commit_copies() {
  Fiber& fiber = Block::instance().current();
  fiber.committed.push_back(std::move(fiber.copies));
  fiber.copies.clear();
}

void wait_copies(int pending) {
  auto& committed = Block::instance().current().committed;
  while (committed.size() > static_cast<size_t>(pending)) {
    perform(committed.front());
    committed.pop_front();
  }
}

}  // namespace emulator
