#include "cpu/parallel.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

namespace fastweight::cpu {
namespace {

// Runs a loop and returns what is wrong with it: an item not run exactly once, a thread number out of range, or one
// number at work twice at a time.
std::string check_loop(int64_t items, int threads, const std::function<void(int64_t)>& work) {
  std::vector<int> runs(static_cast<size_t>(items));
  const auto busy = std::make_unique<std::atomic<int>[]>(static_cast<size_t>(threads));
  std::atomic<bool> in_range = true;
  std::atomic<bool> unique = true;
  parallel_for(items, threads, [&](int64_t item, int thread) {
    if (thread < 0 || thread >= threads || item < 0 || item >= items) {
      in_range = false;
      return;
    }
    if (busy[static_cast<size_t>(thread)].exchange(1) != 0) unique = false;
    ++runs[static_cast<size_t>(item)];
    work(item);
    busy[static_cast<size_t>(thread)] = 0;
  });
  if (!in_range) return "item or thread out of range";
  if (!unique) return "two items at once with the same thread";
  for (size_t item = 0; item < runs.size(); ++item) {
    if (runs[item] != 1) return "item " + std::to_string(item) + " ran " + std::to_string(runs[item]) + " times";
  }
  return "";
}

void no_work(int64_t) {}
void yielding_work(int64_t) { std::this_thread::yield(); }

TEST(Parallel, EveryItemRunsOnce) {
  for (int threads : {1, 2, 3, 4, 7, 16}) {
    for (int64_t items : {0, 1, 2, 3, 5, 64, 1000}) {
      for (int repeat = 0; repeat < 5; ++repeat) {
        EXPECT_EQ(check_loop(items, threads, no_work), "") << threads << " threads, " << items << " items";
        EXPECT_EQ(check_loop(items, threads, yielding_work), "") << threads << " threads, " << items << " items";
      }
    }
  }
}

TEST(Parallel, ManyShortLoops) {
  int64_t sum = 0;
  for (int loop = 0; loop < 5000; ++loop) {
    int64_t parts[4] = {};
    parallel_for(4, 4, [&](int64_t item, int) { parts[item] = item; });
    sum += parts[0] + parts[1] + parts[2] + parts[3];
  }
  EXPECT_EQ(sum, 5000 * 6);
}

TEST(Parallel, OneThreadRunsInOrderOnTheCaller) {
  const auto caller = std::this_thread::get_id();
  std::vector<int64_t> order;
  parallel_for(10, 1, [&](int64_t item, int thread) {
    EXPECT_EQ(thread, 0);
    EXPECT_EQ(std::this_thread::get_id(), caller);
    order.push_back(item);
  });
  ASSERT_EQ(order.size(), 10u);
  for (size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], static_cast<int64_t>(i));
}

// Each of the two items waits until the other has begun, so they have to run at once.
TEST(Parallel, WorkersTakePart) {
  std::atomic<int> begun = 0;
  parallel_for(2, 2, [&](int64_t, int) {
    ++begun;
    while (begun < 2) std::this_thread::yield();
  });
  EXPECT_EQ(begun, 2);
}

TEST(Parallel, WorkersWakeAfterIdling) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> begun = 0;
    parallel_for(3, 3, [&](int64_t, int) {
      ++begun;
      while (begun < 3) std::this_thread::yield();
    });
    EXPECT_EQ(begun, 3);
  }
}

TEST(Parallel, ConcurrentCallers) {
  std::atomic<int> wrong = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&wrong, caller] {
      for (int loop = 0; loop < 100; ++loop) {
        if (!check_loop(17 + caller, 1 + caller, loop % 2 ? no_work : yielding_work).empty()) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

// The other caller's loop holds every worker until this one has finished.
TEST(Parallel, ProgressWhileWorkersAreBusy) {
  constexpr int kThreads = 4;
  std::atomic<int> held = 0;
  std::atomic<bool> release = false;
  std::thread other([&] {
    parallel_for(64, 64, [&](int64_t, int) {
      ++held;
      while (!release) std::this_thread::yield();
    });
  });
  while (held < 1) std::this_thread::yield();
  EXPECT_EQ(check_loop(50, kThreads, no_work), "");
  release = true;
  other.join();
}

TEST(Parallel, NestedLoops) {
  std::atomic<int> wrong = 0;
  const std::string outer = check_loop(8, 3, [&](int64_t) {
    if (!check_loop(9, 4, yielding_work).empty()) ++wrong;
  });
  EXPECT_EQ(outer, "");
  EXPECT_EQ(wrong, 0);
}

TEST(Parallel, ResultsAreVisibleToTheCaller) {
  std::vector<int64_t> squares(10000);
  parallel_for(10000, 5, [&](int64_t item, int) { squares[static_cast<size_t>(item)] = item * item; });
  for (size_t i = 0; i < squares.size(); ++i) ASSERT_EQ(squares[i], static_cast<int64_t>(i * i));
}

TEST(Parallel, WorkersTakeOnTheRoundingMode) {
  for (int mode : {FE_UPWARD, FE_TONEAREST}) {
    ASSERT_EQ(std::fesetround(mode), 0);
    std::atomic<int> same = 0;
    std::atomic<int> begun = 0;
    parallel_for(3, 3, [&](int64_t, int) {
      if (std::fegetround() == mode) ++same;
      ++begun;
      while (begun < 3) std::this_thread::yield();
    });
    EXPECT_EQ(same, 3);
  }
}

// gcc defines macros for its sanitizers, clang has features.
#ifndef __has_feature
#define __has_feature(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || __has_feature(address_sanitizer) || \
    __has_feature(thread_sanitizer)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// Forks and runs loops in the child; true when they went well.
bool child_succeeds() {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    std::atomic<int> begun = 0;
    parallel_for(3, 3, [&](int64_t, int) {
      ++begun;
      while (begun < 3) std::this_thread::yield();
    });
    _exit(check_loop(100, 4, yielding_work).empty() ? 0 : 1);
  }
  int status = -1;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(Parallel, WorksInAForkedChild) {
  if (kSanitized) GTEST_SKIP() << "the sanitizers' own locks do not survive a fork beside threads";
  ASSERT_EQ(check_loop(100, 4, yielding_work), "");
  for (int repeat = 0; repeat < 5; ++repeat) {
    EXPECT_TRUE(child_succeeds());
    EXPECT_EQ(check_loop(100, 4, yielding_work), "");
  }
}

TEST(Parallel, WorksInAChildForkedWhileThePoolIsBusy) {
  if (kSanitized) GTEST_SKIP() << "the sanitizers' own locks do not survive a fork beside threads";
  std::atomic<bool> stop = false;
  std::thread other([&] {
    while (!stop) parallel_for(8, 4, [](int64_t, int) {});
  });
  for (int repeat = 0; repeat < 10; ++repeat) EXPECT_TRUE(child_succeeds());
  stop = true;
  other.join();
}

TEST(NumThreads, FollowsContextThenAffinity) {
  EXPECT_EQ(num_threads(Context{.num_threads = 3}), 3);
  cpu_set_t before;
  CPU_ZERO(&before);
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  EXPECT_EQ(num_threads(Context{}), CPU_COUNT(&before));

  cpu_set_t one;
  CPU_ZERO(&one);
  int cpu = 0;
  while (!CPU_ISSET(cpu, &before)) ++cpu;
  CPU_SET(cpu, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(num_threads(Context{}), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

}  // namespace
}  // namespace fastweight::cpu
