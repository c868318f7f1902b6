// JSON texts, all in one place because the JSON library is slow to compile.
#pragma once

#include <string>
#include <vector>

#include "cli/bench_record.h"
#include "cli/machine.h"

namespace fastweight::cli {

// A list with one object for each record.
std::string to_json(const std::vector<Record>& records, const Machine& machine);

// What `info` tells.
std::string to_json(const Machine& machine, double first_call_ms, double second_call_ms);

}  // namespace fastweight::cli
