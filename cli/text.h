// Formatted text and tables that are printed row by row.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace fastweight::cli {

[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

std::string join(const std::vector<std::string>& parts, const std::string& separator);

// With line breaks in place of blanks, so that no line is longer than `width` unless a word is.
std::string wrap(const std::string& text, size_t width);

// Blanks up to `width` after the text.
std::string pad(const std::string& text, size_t width);

struct Column {
  std::string title;
  size_t width;  // grown to the title's if that is wider
  bool right = false;
};

// Prints to stdout, flushing each row, so that a long run shows what it has.
class Table {
 public:
  explicit Table(std::vector<Column> columns);

  void header() const;
  void row(const std::vector<std::string>& cells) const;

 private:
  std::vector<Column> columns_;
};

}  // namespace fastweight::cli
