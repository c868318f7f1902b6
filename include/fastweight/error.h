// The one exception type of the library.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace fastweight {

enum class ErrorCode : int32_t {
  kInvalidArgument = 1,  // an argument is malformed; the message names it, what was expected and what was found
  kUnsupported = 2,      // valid, but no implementation takes it; the message lists each one's reason
  kOutOfMemory = 3,      // the workspace or other memory of the call could not be had; the outputs are undefined
  kDevice = 4,           // the device or its driver failed; the outputs are undefined, what was enqueued still runs
};

// The only exception of the operators. A refused call, one of the first two codes, has written nothing. std::bad_alloc
// is left where not even the message of an error finds memory, and to the functions that return lists or strings of
// what the library holds (version, cpu_targets, delta_rule_implementations and the like).
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace fastweight
