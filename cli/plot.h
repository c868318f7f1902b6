// Bar charts as SVG texts.
#pragma once

#include <string>
#include <vector>

namespace fastweight::cli {

struct Bar {
  std::string label;   // beside the bar
  std::string series;  // decides the colour and stands in the legend
  double value;        // in percent
  std::string note;    // after the bar
};

struct BarGroup {
  std::string title;
  std::vector<Bar> bars;
};

// One axis: its bars share a scale from 0 to at least the largest value.
struct Panel {
  std::string title;
  std::string axis;
  std::vector<BarGroup> groups;
};

struct Chart {
  std::string title;
  std::string subtitle;
  std::vector<Panel> panels;
};

std::string to_svg(const Chart& chart);

}  // namespace fastweight::cli
