// A block of threads of a kernel, each a fiber with a stack of its own.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "grid.h"

namespace emulator {

inline constexpr size_t kStackBytes = 256 * 1024;
inline constexpr size_t kSharedBytes = 256 * 1024;  // more than any device has
inline constexpr unsigned char kPoison = 0xff;      // a NaN in every floating-point type
inline constexpr size_t kMostThreads = 1024;
inline constexpr size_t kBarriers = 16;
inline constexpr size_t kWarpsOfGroup = kWarpgroup / kLanes;
inline constexpr int kRegisters = 65536;  // of a multiprocessor

// With its warp, with its warpgroup; at a named barrier, at the phase of a transaction barrier, for other kernels.
enum class State : uint8_t { kReady, kPaused, kTogether, kWithGroup, kAtBarrier, kAtPhase, kAtKernels, kLeft };

struct Copy {
  void* to;
  const void* from;  // null: zeros
  size_t bytes;
};

// Where a fiber or the scheduler goes on: the compiler's own jumps, which save what the function at hand needs and no
// more. A function may not jump to a place of its own.
using Place = void* [5];

struct alignas(64) Fiber {  // what is read at every jump lies together
  bool started = false;
  bool with_group = false;  // what it waits for is of the warpgroup
  uint3 index;              // threadIdx
  Place place;              // where it goes on
  const char* waits_for = "";

  size_t barrier = 0;  // where it stands
  uint32_t phase_barrier = 0;
  bool parity = false;
  bool waited = false;  // for the kernels before this one

  std::vector<Copy> copies;                 // not yet committed
  std::deque<std::vector<Copy>> committed;  // oldest first
  AsyncWork async;
  void* stack = nullptr;
};

inline void* map_pages(size_t bytes) {
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) {
    std::perror("emulator: mmap");
    std::abort();
  }
  return pages;
}

// Where threads stop for other kernels: where they wait for those before theirs, or let the next one start.
struct Hold {
  bool at_wait = false, at_start = false;
};

// A place for one block after the other. The fibers outlive it, each with its stack: entering one for the first time costs
// a system call, going from one to the other does not.
class Block {
 public:
  // Both run threads until all have left, or those that have not wait for other kernels.
  void begin(const Grid& grid, uint3 index, const std::function<void()>& body, Hold hold) {
    grid_ = &grid;
    body_ = &body;
    index_ = index;
    hold_ = hold;
    lets_start_ = false;
    const size_t threads = threads_of_block();
    if (threads == 0 || threads > kMostThreads || threads % kLanes != 0) {
      fail("a block of %zu threads: expected whole warps, at most %zu threads", threads, kMostThreads);
    }
    while (fibers_.size() < threads) fibers_.push_back(std::make_unique<Fiber>());
    prepare_shared(grid.shared_bytes);
    for (Barrier& barrier : barriers_) barrier = {};
    const dim3& n = grid.threads;
    std::fill_n(states_, threads, State::kReady);
    for (unsigned i = 0; i < threads; ++i) {
      fibers_[i]->index = {i % n.x, i / n.x % n.y, i / (n.x * n.y)};
      fibers_[i]->waited = false;
      fibers_[i]->copies.clear();
      fibers_[i]->committed.clear();
      fibers_[i]->async.reset();
    }
    landings_.clear();
    at_phases_ = 0;
    std::fill_n(registers_, kMostThreads / kWarpgroup, even_registers());
    backwards_ = (index.x + index.y + index.z) % 2 == 1;
    go_on();
  }
  void go_on(Hold hold) {
    hold_ = hold;
    std::replace(states_, states_ + threads_of_block(), State::kAtKernels, State::kReady);
    go_on();
  }

  bool has_left() const { return all_are(State::kLeft); }
  bool lets_start() const { return lets_start_; }

  void wait_for_previous_kernels() {
    current().waited = true;
    if (hold_.at_wait) stop(State::kAtKernels);
  }
  void let_next_kernel_start() {
    lets_start_ = true;
    if (hold_.at_start) stop(State::kAtKernels);
  }
  // For what a kernel before writes.
  void wait_for_flag() {
    if (hold_.at_wait) stop(State::kAtKernels);
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

  void begin_landing(std::function<void()> landing) { landings_.push_back(std::move(landing)); }
  void wait_for_phase(uint32_t barrier, bool parity) {
    if (transaction_barrier(barrier).completed(parity)) return;
    current().phase_barrier = barrier;
    current().parity = parity;
    ++at_phases_;
    stop(State::kAtPhase);
  }
  int elected_lane() const { return backwards_ ? kLanes - 1 : 0; }

  // The running thread stops in a state, and the next lane of its warp goes on.
  void stop(State state) {
    states_[current_] = state;
    if (__builtin_setjmp(current().place) == 0) run_next_lane();
  }

  // The same, to do something with its warp or warpgroup.
  void meet(const char* name, WarpOperation operation, void* mine, bool with_group) {
    Fiber& fiber = current();
    fiber.waits_for = name;
    fiber.with_group = with_group;
    operations_[current_] = operation;
    mine_[current_] = mine;
    stop(State::kTogether);
  }

  // Of a thread of the running thread's warpgroup, from here on.
  void set_registers(int count) { registers_[current_ / kWarpgroup] = count; }

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

  TransactionBarrier& transaction_barrier(uint32_t address) {
    return *static_cast<TransactionBarrier*>(shared_pointer(address, sizeof(TransactionBarrier)));
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

  void go_on() {
    running = this;
    blockIdx = index_;
    gridDim = grid_->blocks;
    blockDim = grid_->threads;
    const size_t threads = threads_of_block(), warps = threads / kLanes;
    do {
      while (run_next_warp(warps)) open_barriers(threads);
    } while (land_next(threads));
    if (std::find(states_, states_ + threads, State::kAtKernels) == states_ + threads) report_waiting(threads);
    if (has_left()) check_registers(threads);
  }

  // What a thread begins with at most, if its block has the multiprocessor for itself. All together never get more.
  int even_registers() const { return kRegisters / static_cast<int>(threads_of_block()) / 8 * 8; }
  void check_registers(size_t threads) {
    const auto groups = static_cast<int>(threads / kWarpgroup);
    const int all = std::accumulate(registers_, registers_ + groups, 0);
    if (all > groups * even_registers()) fail("%d registers for %d warpgroups: they would wait forever", all, groups);
  }

  bool all_are(State state) const {
    const size_t threads = threads_of_block();
    return std::count(states_, states_ + threads, state) == static_cast<ptrdiff_t>(threads);
  }

  // The first warp that can go on does, as far as it can: it gets ahead of the others by as much as barriers allow.
  // False when none can.
  bool run_next_warp(size_t warps) {
    for (size_t i = 0; i < warps; ++i) {
      const size_t warp = backwards_ ? warps - 1 - i : i;
      State* const states = states_ + warp * kLanes;
      std::replace(states, states + kLanes, State::kPaused, State::kReady);
      if (std::find(states, states + kLanes, State::kReady) == states + kLanes) continue;
      run_warp(warp);
      return true;
    }
    return false;
  }

  // Lets the threads at complete barriers go on.
  void open_barriers(size_t threads) {
    barriers_[0].expected = threads - static_cast<size_t>(std::count(states_, states_ + threads, State::kLeft));
    for (size_t id = 0; id < kBarriers; ++id) {
      Barrier& barrier = barriers_[id];
      if (barrier.arrived == 0 || barrier.arrived != barrier.expected) continue;
      barrier = {};
      for (size_t i = 0; i < threads; ++i) {
        if (states_[i] == State::kAtBarrier && fibers_[i]->barrier == id) states_[i] = State::kReady;
      }
    }
    open_phases(threads);
  }

  // Lets the threads go on whose phase has completed.
  void open_phases(size_t threads) {
    if (at_phases_ == 0) return;
    for (size_t i = 0; i < threads; ++i) {
      if (states_[i] != State::kAtPhase) continue;
      if (!transaction_barrier(fibers_[i]->phase_barrier).completed(fibers_[i]->parity)) continue;
      states_[i] = State::kReady;
      --at_phases_;
    }
  }

  // Copies complete in the order in which they began, or in the opposite one. False when none is on its way.
  bool land_next(size_t threads) {
    if (landings_.empty()) return false;
    const std::function<void()> landing = std::move(backwards_ ? landings_.back() : landings_.front());
    backwards_ ? landings_.pop_back() : landings_.pop_front();
    if (all_are(State::kLeft)) fail("all threads have left while a copy to shared memory is on its way");
    landing();
    open_phases(threads);
    return true;
  }

  void report_waiting(size_t threads) {
    for (size_t i = 0; i < threads; ++i) {
      const Fiber& fiber = *fibers_[i];
      switch (states_[i]) {
        case State::kAtBarrier:
          fail("thread %zu waits at barrier %zu forever", i, fiber.barrier);
        case State::kAtPhase:
          fail("thread %zu waits for parity %d of the transaction barrier at %u forever", i, int{fiber.parity},
               fiber.phase_barrier);
        case State::kWithGroup:
          fail("thread %zu waits at %s for its warpgroup forever", i, fiber.waits_for);
        case State::kTogether:
          fail("thread %zu waits at %s for its warp forever", i, fiber.waits_for);
        default:
          break;
      }
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
    const size_t first = warp * kLanes;
    State* const states = states_ + first;
    for (;;) {
      step_ = backwards_ ? -1 : 1;
      next_lane_ = backwards_ ? kLanes - 1 : 0;
      first_of_warp_ = first;
      if (__builtin_setjmp(scheduler_) == 0) run_next_lane();
      const auto waiting = std::count(states, states + kLanes, State::kTogether);
      if (waiting == 0) return;
      const auto one = static_cast<size_t>(std::find(states, states + kLanes, State::kTogether) - states_);
      for (size_t i = first; i < first + kLanes; ++i) {
        if (states_[i] != State::kTogether || operations_[i] == operations_[one]) continue;
        fail("lanes of a warp at %s and %s", fibers_[one]->waits_for, fibers_[i]->waits_for);
      }
      if (waiting != kLanes) {
        // They come when the phase has completed, or other kernels have.
        const auto comes = [](State state) { return state == State::kAtPhase || state == State::kAtKernels; };
        if (std::find_if(states, states + kLanes, comes) != states + kLanes) return;
        fail("only %d lanes of a warp at %s", static_cast<int>(waiting), fibers_[one]->waits_for);
      }
      if (fibers_[first]->with_group) {
        std::fill_n(states, kLanes, State::kWithGroup);
        if (!run_group(warp / kWarpsOfGroup)) return;
        continue;
      }
      operations_[first](mine_ + first);
      std::fill_n(states, kLanes, State::kReady);
    }
  }

  // Of the warp that is running, until there is none: then the scheduler goes on.
  [[noreturn]] [[gnu::noinline]] void run_next_lane() {
    for (; next_lane_ >= 0 && next_lane_ < kLanes; next_lane_ += step_) {
      const size_t thread = first_of_warp_ + static_cast<size_t>(next_lane_);
      if (states_[thread] != State::kReady) continue;
      next_lane_ += step_;
      current_ = thread;
      Fiber& fiber = *fibers_[thread];
      threadIdx = fiber.index;
      if (fiber.started) __builtin_longjmp(fiber.place, 1);
      start(fiber);
    }
    __builtin_longjmp(scheduler_, 1);
  }

  // The operation for which all warps of a warpgroup wait. False unless all of them do.
  bool run_group(size_t group) {
    const size_t first = group * kWarpgroup;
    if (first + kWarpgroup > threads_of_block()) fail("an operation of a warpgroup in one that is not whole");
    for (size_t i = first; i < first + kWarpgroup; ++i) {
      if (states_[i] != State::kWithGroup) return false;
      if (operations_[i] != operations_[first]) {
        fail("warps of a warpgroup at %s and another %s", fibers_[first]->waits_for, fibers_[i]->waits_for);
      }
    }
    operations_[first](mine_ + first);
    std::fill_n(states_ + first, kWarpgroup, State::kReady);
    return true;
  }

  size_t threads_of_block() const { return size_t{grid_->threads.x} * grid_->threads.y * grid_->threads.z; }

  [[noreturn]] [[gnu::noinline]] void start(Fiber& fiber) {
    fiber.started = true;
    fiber.stack = map_pages(kStackBytes);
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    // Stacks that begin at the same address of their pages would take each other's place in the caches.
    context.uc_stack.ss_size = kStackBytes - current_ * 13 * 64 % (kStackBytes / 4);
    context.uc_link = nullptr;
    makecontext(
        &context, [] { running->live(); }, 0);
    setcontext(&context);
    std::abort();  // it does not return
  }

  // A fiber's life: one thread of a block after the other.
  void live() {
    for (;;) {
      (*body_)();
      if (grid_->overlaps && !current().waited) fail("leaves without having waited for the kernels before");
      if (const char* wrong = current().async.leave()) fail("%s", wrong);
      stop(State::kLeft);
    }
  }

 public:
  static inline Block* running = nullptr;

 private:
  const Grid* grid_ = nullptr;
  const std::function<void()>* body_ = nullptr;
  uint3 index_{};
  Hold hold_;
  bool lets_start_ = false;  // the next kernel
  std::vector<std::unique_ptr<Fiber>> fibers_;
  // Of all threads; the operation and what the thread brings to it while it waits for its warp or warpgroup.
  State states_[kMostThreads];
  WarpOperation operations_[kMostThreads];
  void* mine_[kMostThreads];
  Barrier barriers_[kBarriers];
  bool backwards_ = false;  // the order of warps and lanes
  size_t current_ = 0;
  size_t first_of_warp_ = 0;  // of the running one
  int next_lane_ = 0, step_ = 1;
  std::deque<std::function<void()>> landings_;
  size_t at_phases_ = 0;                      // threads
  int registers_[kMostThreads / kWarpgroup];  // of a thread of each warpgroup
  Place scheduler_;
  unsigned char* arena_ = nullptr;
  unsigned char* shared_ = nullptr;
};

}  // namespace emulator
