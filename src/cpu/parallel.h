// The parallel loop.
#pragma once

#include <cstdint>
#include <functional>

#include "fastweight/context.h"

namespace fastweight::cpu {

// The thread count that a context asks for: num_threads, or every core the process may use.
int num_threads(const Context& context);

// Runs body(item, thread) for item = 0 .. items - 1, thread in [0, threads), and returns when all are done. Each
// thread begins with a share of neighbouring items, in order, one at a time, and then helps with the others': put long
// items first. No two items run at once with the same `thread`, which may index scratch memory. The caller's thread
// takes part: the loop makes progress even when every worker is busy for another caller. `body` must not throw.
void parallel_for(int64_t items, int threads, const std::function<void(int64_t item, int thread)>& body);

}  // namespace fastweight::cpu
