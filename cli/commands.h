// The commands of the `fastweight` tool. Each takes the arguments after its name and returns the exit code: 0 fine,
// 1 something failed. A wrong command line is thrown as UsageError and becomes exit code 2.
#pragma once

#include <string>
#include <vector>

namespace fastweight::cli {

int run_info(const std::vector<std::string>& arguments);
int run_check(const std::vector<std::string>& arguments);
int run_bench(const std::vector<std::string>& arguments);

}  // namespace fastweight::cli
