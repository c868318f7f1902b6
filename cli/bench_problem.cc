#include "cli/bench_problem.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "cli/bench_families.h"
#include "cli/flags.h"
#include "cli/text.h"

namespace fastweight::cli {

double view_bytes(const TensorView& view) {
  if (!view.present()) return 0;
  double count = static_cast<double>(element_size(view.dtype));
  for (int axis = 0; axis < view.rank; ++axis) count *= static_cast<double>(view.shape[static_cast<size_t>(axis)]);
  return count;
}

support::Tensor tile(const support::Tensor& block, size_t axis, std::vector<int64_t> shape) {
  if (!block.present()) return {};
  support::Tensor tiled(block.dtype(), std::move(shape));
  const int64_t block_rows = block.shape()[axis];
  const size_t row_bytes =
      static_cast<size_t>(block.size() / block_rows) * static_cast<size_t>(element_size(block.dtype()));
  const int64_t rows = tiled.size() / (block.size() / block_rows);
  for (int64_t row = 0; row < rows; row += block_rows) {
    const size_t count = static_cast<size_t>(std::min(block_rows, rows - row));
    std::memcpy(static_cast<char*>(tiled.data()) + static_cast<size_t>(row) * row_bytes, block.data(),
                count * row_bytes);
  }
  return tiled;
}

std::vector<int64_t> growing_offsets(int64_t tokens, int64_t sequences) {
  std::vector<int64_t> offsets;
  for (int64_t n = 0; n <= sequences; ++n) offsets.push_back(tokens * (n * (n + 1)) / (sequences * (sequences + 1)));
  return offsets;
}

std::string Shape::text() const {
  std::string text =
      format("B=%lld,T=%lld,H=%lld", static_cast<long long>(B), static_cast<long long>(T), static_cast<long long>(H));
  if (HV != H) text += format(",HV=%lld", static_cast<long long>(HV));
  return text + format(",K=%lld,V=%lld", static_cast<long long>(K), static_cast<long long>(V));
}

Shape parse_shape(const std::string& text) {
  Shape shape;
  int64_t D = 0;
  const std::pair<const char*, int64_t*> fields[] = {{"B", &shape.B},   {"T", &shape.T}, {"H", &shape.H}, {"D", &D},
                                                     {"HV", &shape.HV}, {"K", &shape.K}, {"V", &shape.V}};
  std::set<std::string> given;
  for (const std::string& part : split(text, ',')) {
    const size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    const auto field = std::ranges::find_if(fields, [&](const auto& f) { return name == f.first; });
    if (equals == std::string::npos || field == std::end(fields)) {
      throw UsageError("--shape: expected B=..,T=..,H=..,HV=..,K=..,V=.. or D=.., got '" + part + "' in '" + text +
                       "'");
    }
    if (!given.insert(name).second) throw UsageError("--shape: " + name + " is given twice in '" + text + "'");
    *field->second = parse_integer("--shape: " + name, part.substr(equals + 1), 1, std::numeric_limits<int32_t>::max());
  }
  if (D > 0 && (shape.K > 0 || shape.V > 0)) throw UsageError("--shape: D stands for K and V in '" + text + "'");
  if (D > 0) shape.K = shape.V = D;
  for (const auto& [name, value] : {std::pair{"H", shape.H}, {"K", shape.K}, {"V", shape.V}}) {
    if (value == 0) throw UsageError(std::string("--shape: ") + name + " is missing in '" + text + "'");
  }
  if (shape.HV == 0) shape.HV = shape.H;
  return shape;
}

std::unique_ptr<BenchProblem> make_bench_problem(const BenchChoice& choice) {
  if (block_of(choice.op)) return block_bench(choice);
  if (related_of(choice.op)) return related_bench(choice);
  if (choice.op == Op::kDeltaRuleMap) return delta_rule_map_bench(choice);
  if (choice.op == Op::kShortConv) return short_conv_bench(choice);
  if (choice.op == Op::kTttLinear) return ttt_linear_bench(choice);
  return delta_rule_bench(choice);
}

}  // namespace fastweight::cli
