#include "cli/plot.h"

#include <algorithm>

#include "cli/text.h"

namespace fastweight::cli {
namespace {

// All in pixels.
constexpr double kWidth = 960;
constexpr double kMargin = 24;
constexpr double kLabelWidth = 190;
constexpr double kNoteWidth = 250;
constexpr double kBarHeight = 16;
constexpr double kBarStep = 21;
constexpr double kPlotLeft = kMargin + kLabelWidth;
constexpr double kPlotWidth = kWidth - kPlotLeft - kNoteWidth - kMargin;

// Told apart by people with any colour vision, and in grey by their lightness.
constexpr const char* kColours[] = {"#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"};

std::string escape(const std::string& text) {
  std::string escaped;
  for (char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::string text_at(double x, double y, const char* style, const std::string& text) {
  return format("<text x=\"%.1f\" y=\"%.1f\" class=\"%s\">", x, y, style) + escape(text) + "</text>\n";
}

// The distance of the grid lines, for about five of them.
double tick_distance(double largest) {
  double distance = 1;
  for (double next : {2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0}) {
    if (largest / distance <= 6) break;
    distance = next;
  }
  return distance;
}

std::vector<std::string> series_of(const Chart& chart) {
  std::vector<std::string> names;
  for (const Panel& panel : chart.panels) {
    for (const BarGroup& group : panel.groups) {
      for (const Bar& bar : group.bars) {
        if (std::ranges::find(names, bar.series) == names.end()) names.push_back(bar.series);
      }
    }
  }
  return names;
}

class Writer {
 public:
  explicit Writer(const Chart& chart) : series_(series_of(chart)) {
    body_ += text_at(kMargin, y_, "title", chart.title);
    y_ += 22;
    body_ += text_at(kMargin, y_, "small", chart.subtitle);
    y_ += 28;
    legend();
    for (const Panel& panel : chart.panels) add(panel);
  }

  std::string document() const {
    std::string head =
        format("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\">\n",
               kWidth, y_, kWidth, y_);
    head +=
        "<style>text{font-family:Helvetica,Arial,'DejaVu Sans',sans-serif;font-size:12px;fill:#222}"
        ".title{font-size:18px;font-weight:bold}.panel{font-size:14px;font-weight:bold}.small{fill:#555}"
        ".group{font-weight:bold;fill:#444}.label{text-anchor:end}.tick{text-anchor:middle;fill:#555}"
        ".axis{text-anchor:middle}</style>\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
    return head + body_ + "</svg>\n";
  }

 private:
  const char* colour(const std::string& series) const {
    const auto place = static_cast<size_t>(std::ranges::find(series_, series) - series_.begin());
    return kColours[place % std::size(kColours)];
  }

  void legend() {
    double x = kPlotLeft;
    for (const std::string& name : series_) {
      body_ +=
          format("<rect x=\"%.1f\" y=\"%.1f\" width=\"12\" height=\"12\" fill=\"%s\"/>\n", x, y_ - 10, colour(name));
      body_ += text_at(x + 18, y_, "", name);
      x += 40 + 7.5 * static_cast<double>(name.size());
    }
    y_ += 14;
  }

  void add(const Panel& panel) {
    double largest = 1;
    for (const BarGroup& group : panel.groups) {
      for (const Bar& bar : group.bars) largest = std::max(largest, bar.value);
    }
    const double distance = tick_distance(largest);
    const int ticks = static_cast<int>(largest / distance) + 1;
    const double per_unit = kPlotWidth / (ticks * distance);

    y_ += 22;
    body_ += text_at(kMargin, y_, "panel", panel.title);
    y_ += 10;
    const double top = y_;
    std::string bars;
    for (const BarGroup& group : panel.groups) {
      y_ += 18;
      bars += text_at(kPlotLeft + 4, y_, "group", group.title);
      y_ += 7;
      for (const Bar& bar : group.bars) {
        const double length = std::max(bar.value * per_unit, 1.0);
        bars += text_at(kPlotLeft - 8, y_ + kBarHeight - 4, "label", bar.label);
        bars += format("<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\"/>\n", kPlotLeft, y_,
                       length, kBarHeight, colour(bar.series));
        bars += text_at(kPlotLeft + length + 6, y_ + kBarHeight - 4, "", bar.note);
        y_ += kBarStep;
      }
    }
    y_ += 4;
    for (int tick = 0; tick <= ticks; ++tick) {
      const double x = kPlotLeft + tick * distance * per_unit;
      body_ += format("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n", x, top, x, y_,
                      tick == 0 ? "#444" : "#ddd");
      body_ += text_at(x, y_ + 15, "tick", format("%g %%", tick * distance));
    }
    body_ += bars;
    y_ += 33;
    body_ += text_at(kPlotLeft + kPlotWidth / 2, y_, "axis", panel.axis);
    y_ += 14;
  }

  std::vector<std::string> series_;
  std::string body_;
  double y_ = 34;
};

}  // namespace

std::string to_svg(const Chart& chart) { return Writer(chart).document(); }

}  // namespace fastweight::cli
