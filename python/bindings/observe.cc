#include "observe.h"

#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <string_view>

namespace fastweight::bindings {
namespace {

using Log = void (*)(const char* line);

std::atomic<Log> g_log{nullptr};
std::atomic<bool> g_any_chosen{false};  // spares calls the lock
std::atomic<int> g_segment_chunks{0};
std::mutex g_mutex;  // of what follows

// Never destroyed: threads may still call when the process ends.
std::map<std::string, std::string, std::less<>>& chosen() {  // family, implementation
  static auto& map = *new std::map<std::string, std::string, std::less<>>;
  return map;
}

struct Last {
  const char* entry = "";
  std::string implementation;
};
std::map<std::string_view, std::string>& last_by_entry() {
  static auto& map = *new std::map<std::string_view, std::string>;
  return map;
}
Last& last() {
  static auto& value = *new Last;
  return value;
}

// The family of a function: its name without the mode.
std::string_view family_of(std::string_view entry) {
  for (const std::string_view mode : {"_forward", "_backward", "_step"}) {
    if (entry.ends_with(mode)) return entry.substr(0, entry.size() - mode.size());
  }
  return entry;
}

}  // namespace

void prepare(const char* entry, Context& context) {
  if (g_any_chosen.load(std::memory_order_acquire)) {
    const std::lock_guard lock(g_mutex);
    const auto found = chosen().find(family_of(entry));
    if (found != chosen().end()) context.implementation = found->second;
  }
  context.segment_chunks = g_segment_chunks.load(std::memory_order_relaxed);
  if (g_log.load(std::memory_order_acquire) == nullptr) return;
  context.verbose = true;
  context.log = [](void*, const char* line) {
    if (const Log log = g_log.load(std::memory_order_acquire)) log(line);
  };
}

void remember(const char* entry, const std::string& implementation) {
  const std::lock_guard lock(g_mutex);
  last_by_entry()[entry] = implementation;
  last() = {entry, implementation};
}

}  // namespace fastweight::bindings

// For python/fastweight/_observe.py, which finds them in the module by name.
extern "C" {

// Null: no lines are made.
[[gnu::visibility("default")]] void fastweight_set_log(void (*log)(const char* line)) {
  fastweight::bindings::g_log.store(log, std::memory_order_release);
}

// An empty implementation: the library chooses.
[[gnu::visibility("default")]] void fastweight_choose(const char* family, const char* implementation) {
  using namespace fastweight::bindings;
  const std::lock_guard lock(g_mutex);
  if (*implementation == '\0') {
    chosen().erase(family);
  } else {
    chosen()[family] = implementation;
  }
  g_any_chosen.store(!chosen().empty(), std::memory_order_release);
}

// Context::segment_chunks of the calls from here on.
[[gnu::visibility("default")]] void fastweight_set_segments(int chunks) {
  fastweight::bindings::g_segment_chunks.store(chunks, std::memory_order_relaxed);
}

// Writes "function implementation", or nothing, as of snprintf. An empty entry: the last call of any function.
[[gnu::visibility("default")]] int fastweight_last(const char* entry, char* text, int size) {
  using namespace fastweight::bindings;
  const std::lock_guard lock(g_mutex);
  std::string found;
  if (*entry == '\0') {
    found = last().entry + (" " + last().implementation);
  } else if (const auto at = last_by_entry().find(entry); at != last_by_entry().end()) {
    found = std::string(at->first) + " " + at->second;
  }
  return snprintf(text, static_cast<size_t>(size), "%s", found.c_str());
}

}  // extern "C"
