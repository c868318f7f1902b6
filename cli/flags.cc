#include "cli/flags.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "cli/text.h"

namespace fastweight::cli {

Flags::Flags(std::vector<Flag> known, const std::vector<std::string>& arguments) : known_(std::move(known)) {
  known_.push_back({"--help", "", "this text"});
  for (size_t i = 0; i < arguments.size(); ++i) {
    std::string name = arguments[i] == "-h" ? "--help" : arguments[i];
    const size_t equals = name.find('=');
    const bool attached = name.starts_with("--") && equals != std::string::npos;
    std::string value = attached ? name.substr(equals + 1) : "";
    if (attached) name.resize(equals);

    const auto flag = std::ranges::find(known_, name, &Flag::name);
    if (flag == known_.end()) {
      throw UsageError(name.starts_with("-") ? "unknown flag " + name : "unexpected argument '" + name + "'");
    }
    if (flag->value.empty()) {
      if (attached) throw UsageError(name + " takes no value");
    } else if (!attached) {
      if (i + 1 == arguments.size()) throw UsageError(name + ": expected " + flag->value + ", got nothing");
      value = arguments[++i];
    }
    given_[name].push_back(value);
  }
}

std::string Flags::text(const std::string& name, const std::string& otherwise) const {
  const auto found = given_.find(name);
  return found == given_.end() ? otherwise : found->second.back();
}

double Flags::number(const std::string& name, double otherwise, double least, double most) const {
  return has(name) ? parse_number(name, text(name, ""), least, most) : otherwise;
}

int64_t Flags::integer(const std::string& name, int64_t otherwise, int64_t least, int64_t most) const {
  return has(name) ? parse_integer(name, text(name, ""), least, most) : otherwise;
}

std::vector<std::string> Flags::all(const std::string& name) const {
  const auto found = given_.find(name);
  return found == given_.end() ? std::vector<std::string>{} : found->second;
}

std::vector<std::string> Flags::list(const std::string& name) const {
  std::vector<std::string> items;
  for (const std::string& value : all(name)) {
    for (std::string& item : split(value, ',')) {
      if (item.empty()) throw UsageError(name + ": expected a comma-separated list, got '" + value + "'");
      items.push_back(std::move(item));
    }
  }
  return items;
}

std::string Flags::description() const {
  size_t width = 0;
  for (const Flag& flag : known_) width = std::max(width, flag.name.size() + 1 + flag.value.size());
  std::string lines;
  for (const Flag& flag : known_) {
    const std::string left = flag.value.empty() ? flag.name : flag.name + " " + flag.value;
    std::string help = flag.help;
    for (size_t at = 0; (at = help.find('\n', at)) != std::string::npos; at += width + 5) {
      help.insert(at + 1, std::string(width + 4, ' '));
    }
    lines += "  " + pad(left, width) + "  " + help + "\n";
  }
  return lines;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end; (end = text.find(separator, begin)) != std::string::npos; begin = end + 1) {
    parts.push_back(text.substr(begin, end - begin));
  }
  parts.push_back(text.substr(begin));
  return parts;
}

int64_t parse_integer(const std::string& flag, const std::string& text, int64_t least, int64_t most) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most) {
    const std::string range = most == kAnyInteger ? "of at least " + std::to_string(least)
                                                  : "from " + std::to_string(least) + " to " + std::to_string(most);
    throw UsageError(flag + ": expected an integer " + range + ", got '" + text + "'");
  }
  return value;
}

double parse_number(const std::string& flag, const std::string& text, double least, double most) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  // A NaN is in no range.
  if (error != std::errc() || end != text.data() + text.size() || !(value >= least && value <= most)) {
    throw UsageError(flag + format(": expected a number from %g to %g", least, most) + ", got '" + text + "'");
  }
  return value;
}

}  // namespace fastweight::cli
