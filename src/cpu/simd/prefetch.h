// Rows that will be needed soon, brought into the second-level cache a few lines at a time between pieces of
// arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fastweight::cpu {

// A head's rows lie heads * width elements apart, often one to a page, where hardware prefetchers give up; and asking
// for more lines at once than the core has miss buffers (22 to 24 on the measured ones) stalls as the loads would.
class RowPrefetcher {
 public:
  void clear() {
    count_ = next_ = 0;
    line_ = end_ = nullptr;
  }

  void add(const char* row, int64_t bytes) {
    if (count_ < kMost) rows_[count_++] = {row, bytes};
  }

  // The next `lines` lines, as far as there are any.
  void issue(int64_t lines) {
    for (; lines > 0; --lines) {
      if (line_ >= end_) {
        if (next_ == count_) return;
        line_ = rows_[next_].data;
        end_ = line_ + rows_[next_].bytes;
        ++next_;
      }
      __builtin_prefetch(line_, 0, 2);
      line_ += kLine;
    }
  }

  // An equal share of the rows that are left, when this is the first of `calls` calls.
  void issue_share(int64_t calls) {
    const int64_t end = next_ + (count_ - next_ + calls - 1) / calls;
    while (next_ < end || line_ < end_) issue(1);
  }

 private:
  static constexpr int64_t kMost = 256, kLine = 64;
  struct Row {
    const char* data;
    int64_t bytes;
  };
  Row rows_[kMost];
  int64_t count_ = 0, next_ = 0;
  const char* line_ = nullptr;  // the rest of row next_ - 1
  const char* end_ = nullptr;
};

}  // namespace fastweight::cpu
