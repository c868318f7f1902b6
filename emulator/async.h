// Work of a thread that is on its way, and the barriers in shared memory that tell that such work has completed.
//
// Products of a warpgroup and copies from shared memory read their operands when they are issued. Until they are waited
// for, their results are nowhere: accumulators hold NaNs meanwhile, and an operand or an accumulator that is written too
// early ends the program with a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

namespace emulator {

// Ends the program with a message.
[[noreturn]] void fail(const char* message);

// An mbarrier of Hopper, in its eight bytes of shared memory. A phase completes when all arrivals it expects have come
// and all bytes; then the next one begins.
struct TransactionBarrier {
  static constexpr uint64_t kTag = 2;  // neither zeros nor the poison of shared memory
  static constexpr uint32_t kMostArrivals = (1 << 20) - 1;

  uint64_t tag : 2;
  uint64_t phase : 1;   // parity of the one that has not completed
  uint64_t count : 20;  // arrivals that a phase expects
  uint64_t missing : 20;
  int64_t bytes : 21;  // announced and not yet there; negative when they come first

  void init(uint32_t arrivals);
  void arrive();
  void expect(uint32_t more);
  void complete(uint32_t arrived);
  bool completed(bool parity) const;

 private:
  void check() const;
  void turn();
};
static_assert(sizeof(TransactionBarrier) == 8);

// What an operand of a product held in shared memory when it was issued, in segments of 16 bytes.
struct SharedOperand {
  struct Segment {
    const void* at;
    uint16_t elements[8];
  };
  std::vector<Segment> segments;

  bool unchanged() const;
};

class AsyncWork {
 public:
  void reset();  // for another thread

  // Products, in groups (wgmma). A C tile is four accumulators of a thread.

  void fence() { fenced_ = true; }
  // Where the accumulators of a tile are: in the result of a product on its way, or in the registers.
  const float* tile(const float* registers);
  void set_tile(float* registers, const float (&values)[4]);
  // Operands of the products that are being issued, which stay as they are until they are waited for: a fragment in four
  // registers, and one in shared memory.
  void watch_fragment(const uint32_t* registers);
  void watch_operand(std::shared_ptr<const SharedOperand> operand);
  void check_fenced() const;
  void commit_products();
  void wait_products(int pending);

  // Copies from shared to global memory, in groups.

  void begin_store(std::function<bool()> unchanged, std::function<void()> write);
  void commit_stores();
  // Until at most `pending` groups have not been read or, if `written`, have not been written.
  void wait_stores(int pending, bool written);

  // At the end of the thread: null, or what is wrong.
  const char* leave();

 private:
  struct Tile {
    float* registers;
    float values[4];
    int64_t group;
  };
  struct Fragment {
    const uint32_t* registers;
    uint32_t values[4];
    int64_t group;
  };
  struct Operand {
    std::shared_ptr<const SharedOperand> content;
    int64_t group;
  };
  struct Store {
    std::function<bool()> unchanged;
    std::function<void()> write;
  };
  struct StoreGroup {
    std::vector<Store> stores;
    bool read = false;
  };

  size_t place_of(const float* registers);

  bool fenced_ = false;
  int64_t group_ = 0;        // of the products that are being issued
  std::vector<Tile> tiles_;  // in the order of their registers
  std::vector<Fragment> fragments_;
  std::vector<Operand> operands_;
  size_t place_ = 0;  // the last one in tiles_: its neighbour comes next
  std::vector<Store> open_stores_;
  std::deque<StoreGroup> stores_;  // oldest first
};

}  // namespace emulator
