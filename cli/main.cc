// The command-line tool: `fastweight info | check | bench`.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/flags.h"
#include "fastweight/info.h"

namespace fastweight::cli {
namespace {

struct Command {
  const char* name;
  const char* summary;
  int (*run)(const std::vector<std::string>& arguments);
};

constexpr Command kCommands[] = {
    {"info", "what this build is and what it found on this machine", run_info},
    {"check", "compare every implementation with the fp64 reference and the golden cases", run_check},
    {"bench", "measure the operators against the machine's FMA peak and memcpy rate", run_bench},
};

void print_help(std::FILE* stream) {
  std::fprintf(stream,
               "fastweight %s: delta-rule sequence operators (DeltaNet, GDN, KDA, TTT-linear)\n\n"
               "usage: fastweight COMMAND [FLAGS]\n\ncommands:\n",
               version().c_str());
  for (const Command& command : kCommands) std::fprintf(stream, "  %-7s %s\n", command.name, command.summary);
  std::fprintf(stream,
               "\nflags:\n  --help     this text; after a command, its flags\n  --version  the version\n\n"
               "exit codes: 0 fine, 1 something failed, 2 wrong command line\n");
}

int run_command(const Command& command, const std::vector<std::string>& arguments) {
  try {
    return command.run(arguments);
  } catch (const UsageError& error) {
    std::fprintf(stderr, "fastweight %s: %s\nTry 'fastweight %s --help'.\n", command.name, error.what(), command.name);
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fastweight %s: %s\n", command.name, error.what());
    return 1;
  }
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.empty()) {
    print_help(stderr);
    return 2;
  }
  const std::string& first = arguments[0];
  if (first == "--help" || first == "-h" || first == "help") {
    print_help(stdout);
    return 0;
  }
  if (first == "--version") {
    std::printf("fastweight %s\n", version().c_str());
    return 0;
  }
  for (const Command& command : kCommands) {
    if (first == command.name) return run_command(command, {arguments.begin() + 1, arguments.end()});
  }
  std::fprintf(stderr, "fastweight: unknown %s '%s'\nTry 'fastweight --help'.\n",
               first.starts_with("-") ? "flag" : "command", first.c_str());
  return 2;
}

}  // namespace
}  // namespace fastweight::cli

int main(int argc, char** argv) {
  const int code = fastweight::cli::run({argv + 1, argv + argc});
  const bool flushed = std::fflush(stdout) == 0;
  if (flushed && std::ferror(stdout) == 0) return code;
  std::fprintf(stderr, "fastweight: cannot write to stdout\n");
  return code == 0 ? 1 : code;
}
