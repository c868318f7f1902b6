#include "async.h"

#include <algorithm>
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

bool SharedOperand::unchanged() const {
  return std::all_of(segments.begin(), segments.end(), [](const Segment& segment) {
    return std::memcmp(segment.at, segment.elements, sizeof(segment.elements)) == 0;
  });
}

// Where the tile of these registers is in tiles_, or would be.
size_t AsyncWork::place_of(const float* registers) {
  const auto before = [&](size_t i) { return i >= tiles_.size() || registers <= tiles_[i].registers; };
  const auto behind = [&](size_t i) { return i == 0 || (i <= tiles_.size() && tiles_[i - 1].registers < registers); };
  for (const size_t next : {place_, place_ + 1}) {
    if (before(next) && behind(next)) return place_ = next;
  }
  const auto found = std::lower_bound(tiles_.begin(), tiles_.end(), registers,
                                      [](const Tile& tile, const float* at) { return tile.registers < at; });
  return place_ = static_cast<size_t>(found - tiles_.begin());
}

const float* AsyncWork::tile(const float* registers) {
  const size_t place = place_of(registers);
  return place < tiles_.size() && tiles_[place].registers == registers ? tiles_[place].values : registers;
}

void AsyncWork::set_tile(float* registers, const float (&values)[4]) {
  const size_t place = place_of(registers);
  if (place == tiles_.size() || tiles_[place].registers != registers) {
    tiles_.insert(tiles_.begin() + static_cast<ptrdiff_t>(place), Tile{registers, {}, 0});
  } else if (!is_poisoned(registers)) {
    fail("an accumulator of wgmma was written before it was waited for");
  }
  Tile& tile = tiles_[place];
  std::memcpy(tile.values, values, sizeof(values));
  tile.group = group_;
  std::memset(registers, 0xff, sizeof(values));
}

void AsyncWork::watch_fragment(const uint32_t* registers) {
  Fragment& fragment = fragments_.emplace_back();
  fragment.registers = registers;
  std::memcpy(fragment.values, registers, sizeof(fragment.values));
  fragment.group = group_;
}

void AsyncWork::watch_operand(std::shared_ptr<const SharedOperand> operand) {
  operands_.push_back({std::move(operand), group_});
}

void AsyncWork::check_fenced() const {
  if (!fenced_) fail("a group of wgmma that does not begin with a fence");
}

void AsyncWork::commit_products() {
  ++group_;
  fenced_ = false;
}

void AsyncWork::wait_products(int pending) {
  const auto completed = [&](const auto& work) { return work.group + pending < group_; };
  const auto check = [](bool unchanged) {
    if (!unchanged) fail("an operand of wgmma was written before the product was waited for");
  };
  std::erase_if(fragments_, [&](const Fragment& fragment) {
    if (!completed(fragment)) return false;
    check(std::memcmp(fragment.registers, fragment.values, sizeof(fragment.values)) == 0);
    return true;
  });
  std::erase_if(operands_, [&](const Operand& operand) {
    if (!completed(operand)) return false;
    check(operand.content->unchanged());
    return true;
  });
  std::erase_if(tiles_, [&](const Tile& tile) {
    if (!completed(tile)) return false;
    if (!is_poisoned(tile.registers)) fail("an accumulator of wgmma was written before it was waited for");
    std::memcpy(tile.registers, tile.values, sizeof(tile.values));
    return true;
  });
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
  fragments_.clear();
  operands_.clear();
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
