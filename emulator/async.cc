#include "async.h"

#include <cstddef>
#include <cstring>
#include <utility>

namespace emulator {

// Transaction barriers --------------------------------------------------------------------------------------------

void TransactionBarrier::check() const {
  if (tag != kTag) fail("a transaction barrier that was not initialized, or was overwritten");
}

void TransactionBarrier::init(uint32_t arrivals) {
  if (arrivals < 1 || arrivals > kMostArrivals) fail("a transaction barrier for an impossible number of arrivals");
  tag = kTag;
  phase = 0;
  count = missing = arrivals;
  bytes = 0;
}

void TransactionBarrier::turn() {
  if (missing > 0 || bytes != 0) return;
  phase = !phase;
  missing = count;
}

void TransactionBarrier::arrive() {
  check();
  if (missing == 0) fail("more arrivals at a transaction barrier than its phase expects");
  --missing;
  turn();
}

void TransactionBarrier::expect(uint32_t more) {
  check();
  if (bytes + int64_t{more} > int64_t{kMostArrivals}) fail("a transaction barrier expects too many bytes");
  bytes += more;
}

void TransactionBarrier::complete(uint32_t arrived) {
  check();
  if (bytes - int64_t{arrived} < -int64_t{kMostArrivals}) fail("too many bytes at a transaction barrier");
  bytes -= arrived;
  turn();
}

bool TransactionBarrier::completed(bool parity) const {
  check();
  return phase != uint64_t{parity};
}

// Products --------------------------------------------------------------------------------------------------------

namespace {

bool is_poisoned(const float* registers) {
  uint32_t bits[4];
  std::memcpy(bits, registers, sizeof(bits));
  return (bits[0] & bits[1] & bits[2] & bits[3]) == 0xffffffffu;
}

}  // namespace

const float* AsyncWork::tile(const float* registers) const {
  const auto found = tiles_.find(const_cast<float*>(registers));
  return found == tiles_.end() ? registers : found->second.values;
}

void AsyncWork::set_tile(float* registers, const float (&values)[4]) {
  const auto [found, fresh] = tiles_.try_emplace(registers);
  if (!fresh && !is_poisoned(registers)) fail("an accumulator of wgmma was written before it was waited for");
  Tile& tile = found->second;
  std::memcpy(tile.values, values, sizeof(values));
  tile.group = group_;
  std::memset(registers, 0xff, sizeof(values));
}

void AsyncWork::watch(std::function<bool()> unchanged) { watches_.push_back({group_, std::move(unchanged)}); }

void AsyncWork::check_fenced() const {
  if (!fenced_) fail("a group of wgmma that does not begin with a fence");
}

void AsyncWork::commit_products() {
  ++group_;
  fenced_ = false;
}

void AsyncWork::wait_products(int pending) {
  const auto completed = [&](int64_t group) { return group + pending < group_; };
  for (auto it = watches_.begin(); it != watches_.end();) {
    if (!completed(it->group)) {
      ++it;
      continue;
    }
    if (!it->unchanged()) fail("an operand of wgmma was written before the product was waited for");
    it = watches_.erase(it);
  }
  for (auto it = tiles_.begin(); it != tiles_.end();) {
    if (!completed(it->second.group)) {
      ++it;
      continue;
    }
    if (!is_poisoned(it->first)) fail("an accumulator of wgmma was written before it was waited for");
    std::memcpy(it->first, it->second.values, sizeof(it->second.values));
    it = tiles_.erase(it);
  }
}

// Copies to global memory -----------------------------------------------------------------------------------------

void AsyncWork::begin_store(std::function<bool()> unchanged, std::function<void()> write) {
  open_stores_.push_back({std::move(unchanged), std::move(write)});
}

void AsyncWork::commit_stores() {
  stores_.push_back({std::move(open_stores_)});
  open_stores_.clear();
}

void AsyncWork::wait_stores(int pending, bool written) {
  const size_t completed = stores_.size() > static_cast<size_t>(pending) ? stores_.size() - pending : 0;
  for (size_t i = 0; i < completed; ++i) {
    StoreGroup& group = stores_[i];
    for (const Store& store : group.stores) {
      if (!group.read && !store.unchanged())
        fail("the source of a bulk store was written before the store had read it");
      if (written) store.write();
    }
    group.read = true;
  }
  if (written) stores_.erase(stores_.begin(), stores_.begin() + static_cast<ptrdiff_t>(completed));
}

void AsyncWork::reset() {
  fenced_ = false;
  group_ = 0;
  tiles_.clear();
  watches_.clear();
  open_stores_.clear();
  stores_.clear();
}

const char* AsyncWork::leave() {
  if (!tiles_.empty()) return "leaves while products of its warpgroup are on their way";
  if (!open_stores_.empty()) return "leaves with bulk stores that were not committed";
  for (const StoreGroup& group : stores_) {
    if (!group.read) return "leaves while bulk stores read its shared memory";
  }
  if (!stores_.empty()) wait_stores(0, true);
  return nullptr;
}

}  // namespace emulator
