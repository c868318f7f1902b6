#include "cpu/parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

namespace fastweight::cpu {
namespace {

using Body = std::function<void(int64_t item, int thread)>;

constexpr int kMaxWorkers = 1023;

// How long a thread looks for work, or for the last item of its loop, before it sleeps. A sleeper needs 50 to 80 us to
// wake up on a virtual machine: a chain of short loops with a little other work between them (a decoding step called
// from Python) keeps its workers awake, an idle process leaves its cores alone.
constexpr std::chrono::microseconds kSpin{200};

int available_cores() {
  for (int cpus = CPU_SETSIZE; cpus <= (1 << 20); cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(cpus));
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(cpus));
    const int status = sched_getaffinity(0, bytes, set);
    const bool too_small = status != 0 && errno == EINVAL;
    const int count = status == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
    if (!too_small) break;
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Condition>
void spin_until(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  while (!condition() && std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 16 && !condition(); ++i) pause();
  }
}

// Those who meet at the pool's mutex hold it for a few instructions: to look again is cheaper than to sleep.
void acquire(std::unique_lock<std::mutex>& lock) {
  for (int i = 0; i < 200; ++i) {
    if (lock.try_lock()) return;
    pause();
  }
  lock.lock();
}

// The items that one thread begins with: [next, end).
struct alignas(64) Share {
  std::atomic<int64_t> next = 0;
  int64_t end = 0;
};

constexpr int kMaxShares = 64;

// One parallel loop. It lives on its caller's stack: a worker touches it only between joining and leaving, both under
// the pool's mutex, and the caller returns only when nobody is in between.
//
// Each thread has a share of neighbouring items, the same one in every loop of this size, and helps with the others'
// when its own is done: what a loop leaves in a core's cache is there for the next one. (A decoding step of 32 heads
// reads and writes 2 MB of states.)
struct Job {
  const Body* body;
  int64_t items;
  int threads;
  std::fenv_t environment;

  Job* next_job = nullptr;       // in the pool's queue
  int joined = 1;                // thread numbers handed out; the caller has 0
  std::atomic<int> running = 0;  // workers between joining and leaving; changed under the mutex
  std::condition_variable left{};

  int num_shares = 1;
  Share shares[kMaxShares];

  void deal() {
    num_shares = std::min(threads, kMaxShares);
    for (int i = 0; i < num_shares; ++i) {
      shares[i].next.store(items * i / num_shares, std::memory_order_relaxed);
      shares[i].end = items * (i + 1) / num_shares;
    }
  }

  // The caller's writes reach the workers, and theirs reach the caller, through the pool's mutex. `worker` is 0 for the
  // caller.
  void run_items(int thread, int worker) {
    for (int i = 0; i < num_shares; ++i) {
      Share& share = shares[(worker + i) % num_shares];
      for (;;) {
        const int64_t item = share.next.fetch_add(1, std::memory_order_relaxed);
        if (item >= share.end) break;
        (*body)(item, thread);
      }
    }
  }
};

// Workers are detached and the pool is never destroyed, so the process can end while they sleep.
class Pool {
 public:
  static Pool& instance() {
    static Pool* const pool = [] {
      // Only the forking thread lives on in a child: the workers are gone, and the mutex may be held by nobody.
      pthread_atfork(nullptr, nullptr, [] { new (&instance()) Pool; });
      return new Pool;
    }();
    return *pool;
  }

  void run(Job& job) {
    std::unique_lock lock(mutex_, std::defer_lock);
    {
      acquire(lock);
      grow(job.threads - 1);
      append(job);
      const int wanted = std::min(job.threads - 1, sleeping_);
      lock.unlock();
      for (int i = 0; i < wanted; ++i) work_.notify_one();
    }

    job.run_items(0, 0);

    acquire(lock);
    remove(job);
    if (job.running.load(std::memory_order_relaxed) == 0) return;
    lock.unlock();
    if (spin_.load(std::memory_order_relaxed)) {
      spin_until([&] { return job.running.load(std::memory_order_relaxed) == 0; });
    }
    acquire(lock);
    job.left.wait(lock, [&] { return job.running.load(std::memory_order_relaxed) == 0; });
  }

 private:
  void grow(int workers) {
    workers = std::min(workers, kMaxWorkers);
    if (workers_ >= workers) return;

    // Signals are for the application's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      while (workers_ < workers) {
        std::thread([this, worker = workers_ + 1] { work(worker); }).detach();
        ++workers_;
      }
    } catch (const std::exception&) {
      // No more threads to be had, or no memory for one: the caller and the workers there are share the items.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    // With more threads than cores a spinning one only holds up the others.
    spin_.store(workers_ < available_cores(), std::memory_order_relaxed);
  }

  void work(int worker) {
    pthread_setname_np(pthread_self(), "fastweight");
    std::unique_lock lock(mutex_);
    for (;;) {
      if (first_ == nullptr && spin_.load(std::memory_order_relaxed)) {
        lock.unlock();
        spin_until([&] { return has_jobs_.load(std::memory_order_relaxed); });
        acquire(lock);
      }
      ++sleeping_;
      work_.wait(lock, [&] { return first_ != nullptr; });
      --sleeping_;

      Job& job = *first_;
      const int thread = job.joined++;
      job.running.fetch_add(1, std::memory_order_relaxed);
      if (job.joined == job.threads) remove(job);
      lock.unlock();

      // An item's result must not depend on who computes it: take on the caller's rounding and denormal modes.
      std::fesetenv(&job.environment);
      job.run_items(thread, worker);

      acquire(lock);
      remove(job);
      if (job.running.fetch_sub(1, std::memory_order_relaxed) == 1) job.left.notify_one();
    }
  }

  void append(Job& job) {
    Job** link = &first_;
    while (*link != nullptr) link = &(*link)->next_job;
    *link = &job;
    has_jobs_.store(true, std::memory_order_relaxed);
  }

  void remove(Job& job) {
    for (Job** link = &first_; *link != nullptr; link = &(*link)->next_job) {
      if (*link != &job) continue;
      *link = job.next_job;
      has_jobs_.store(first_ != nullptr, std::memory_order_relaxed);
      return;
    }
  }

  std::mutex mutex_;
  std::condition_variable work_;
  Job* first_ = nullptr;  // the jobs that a worker may join, oldest first
  int workers_ = 0;
  int sleeping_ = 0;
  std::atomic<bool> has_jobs_ = false;  // first_ != nullptr, for those who spin without the mutex
  std::atomic<bool> spin_ = false;
};

}  // namespace

int num_threads(const Context& context) { return context.num_threads > 0 ? context.num_threads : available_cores(); }

void parallel_for(int64_t items, int threads, const Body& body) {
  threads = static_cast<int>(std::min<int64_t>(threads, items));
  if (threads <= 1) {
    for (int64_t item = 0; item < items; ++item) body(item, 0);
    return;
  }
  Job job{.body = &body, .items = items, .threads = threads, .environment = {}};
  job.deal();
  std::fegetenv(&job.environment);
  Pool::instance().run(job);
}

}  // namespace fastweight::cpu
