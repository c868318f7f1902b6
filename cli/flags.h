// A small parser for `--name value`, `--name=value` and `--switch`.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace fastweight::cli {

// A wrong command line; the message names the flag.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr int64_t kAnyInteger = std::numeric_limits<int64_t>::max();
inline constexpr int64_t kMostThreads = 1024;  // of --threads

struct Flag {
  std::string name;   // with its dashes
  std::string value;  // what the help calls the value; empty: a switch
  std::string help;
};

class Flags {
 public:
  // `--help` and `-h` are always known.
  Flags(std::vector<Flag> known, const std::vector<std::string>& arguments);

  bool has(const std::string& name) const { return given_.contains(name); }
  bool help() const { return has("--help"); }

  // The last value given.
  std::string text(const std::string& name, const std::string& otherwise) const;
  double number(const std::string& name, double otherwise, double least, double most) const;
  int64_t integer(const std::string& name, int64_t otherwise, int64_t least, int64_t most = kAnyInteger) const;

  // Every value of a flag that may repeat; `list` also splits at commas.
  std::vector<std::string> all(const std::string& name) const;
  std::vector<std::string> list(const std::string& name) const;

  // The flags with their explanations, one per line.
  std::string description() const;

 private:
  std::vector<Flag> known_;
  std::map<std::string, std::vector<std::string>> given_;
};

std::vector<std::string> split(const std::string& text, char separator);

// Throws UsageError(flag: expected .., got ..) unless all of `text` is a number of at least `least` and at most `most`.
int64_t parse_integer(const std::string& flag, const std::string& text, int64_t least, int64_t most = kAnyInteger);
double parse_number(const std::string& flag, const std::string& text, double least, double most);

}  // namespace fastweight::cli
