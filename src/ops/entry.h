// What the public functions of all operators run in.
#pragma once

#include <new>
#include <string>

#include "fastweight/error.h"

namespace fastweight {

// Runs the body of the public function `entry`: an allocation that fails in its checks, in the run or in the message of
// another error becomes Error(kOutOfMemory).
template <class Body>
auto entry_point(const char* entry, const Body& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kOutOfMemory, std::string(entry) + ": out of host memory");
  }
}

}  // namespace fastweight
