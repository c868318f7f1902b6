#include "cli/text.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <utility>

namespace fastweight::cli {

std::string format(const char* pattern, ...) {
  va_list arguments, again;
  va_start(arguments, pattern);
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, pattern, arguments);
  va_end(arguments);
  std::string text(static_cast<size_t>(std::max(length, 0)), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(again);
  return text;
}

std::string join(const std::vector<std::string>& parts, const std::string& separator) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : separator) + part;
  return text;
}

std::string wrap(const std::string& text, size_t width) {
  std::string wrapped = text;
  size_t line = 0, blank = std::string::npos;  // where the line begins, and its last blank
  for (size_t i = 0; i < wrapped.size(); ++i) {
    if (wrapped[i] == ' ') blank = i;
    if (i - line < width || blank == std::string::npos) continue;
    wrapped[blank] = '\n';
    line = blank + 1;
    blank = std::string::npos;
  }
  return wrapped;
}

std::string pad(const std::string& text, size_t width) {
  return text.size() < width ? text + std::string(width - text.size(), ' ') : text;
}

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {
  for (Column& column : columns_) column.width = std::max(column.width, column.title.size());
}

void Table::header() const {
  std::vector<std::string> titles, rules;
  for (const Column& column : columns_) {
    titles.push_back(column.title);
    rules.push_back(std::string(column.width, '-'));
  }
  row(titles);
  row(rules);
}

void Table::row(const std::vector<std::string>& cells) const {
  std::string line;
  for (size_t i = 0; i < cells.size(); ++i) {
    const size_t width = columns_[i].width;
    const std::string padded = pad(cells[i], width);
    const size_t blanks = padded.size() - cells[i].size();
    line += (i == 0 ? "" : "  ") + (columns_[i].right ? std::string(blanks, ' ') + cells[i] : padded);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

}  // namespace fastweight::cli
