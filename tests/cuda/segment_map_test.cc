// What is special about the map of a segment on a CUDA device: graphs, and offsets that the host cannot check. The cases of
// tests/delta_rule/map_test.cc run on the device as well, see tests/CMakeLists.txt.
#include <gtest/gtest.h>

#include "support/delta_rule_map_case.h"
#include "tests/cuda/testing.h"
#include "tests/delta_rule/grid.h"

namespace fastweight::test {
namespace {

using support::DeltaRuleMapCase;
using support::DeltaRuleMapResults;

constexpr Mode kMapModes[] = {Mode::kForward, Mode::kBackward};

// Of widths that every implementation takes.
DeltaRuleMapCase packed(Gate gate, const std::vector<int64_t>& lengths) {
  DeltaRuleSpec spec = with_lengths(with_heads(spec_of(gate, 0, 32, 24), 1, 2), lengths);
  spec.dtype = DType::kBF16;
  spec.options.chunk_size = 16;
  spec.options.gate_in_kernel = gate != Gate::kNone;
  return {support::draw(spec, 51)};
}

DeltaRuleMapResults run_map(Mode mode, const DeltaRuleMapCase& problem, const std::string& name) {
  DeltaRuleMapResults results = outputs_of(mode, problem);
  results.implementation = call_of(mode, problem, results).run(context_for(name));
  return results;
}

// run(mode, name) for every implementation, as results that say who ran.
template <class Run>
void for_each_map(const Run& run) {
  for (Mode mode : kMapModes) {
    for (const std::string& name : names_of(delta_rule_map_implementations(), mode)) {
      unless_declined(mode, name, [&] { return run(mode, name); });
    }
  }
}

class CudaDeltaRuleMap : public ::testing::TestWithParam<Gate> {};

// One capture serves any lengths that fit: the same bits as a call of its own.
TEST_P(CudaDeltaRuleMap, GraphReplaysWithOtherLengths) {
  const DeltaRuleMapCase problem = packed(GetParam(), {40, 10, 20});
  for_each_map([&](Mode mode, const std::string& name) {
    const DeltaRuleMapResults outputs = outputs_of(mode, problem);
    const CallOnDevice call(call_of(mode, problem, outputs));
    const support::DeviceStream stream;
    Context context = context_for(name);
    context.stream = stream.get();
    DeltaRuleMapResults replayed;
    std::string ran;
    const support::DeviceGraph graph(stream, [&] { ran = call.enqueue(context); });
    for (const auto& offsets : first<std::vector<int64_t>>({{0, 0, 1, 67}, {0, 64, 64, 65}, {0, 0, 0, 0}}, 1)) {
      call["cu_seqlens"].set(offsets_of(offsets));
      call.poison_outputs();
      graph.launch(stream);
      stream.wait();
      replayed = call.results<DeltaRuleMapResults>();
      DeltaRuleMapCase same{slice_tokens(problem, 0, offsets.back())};
      same.spec.cu_seqlens = offsets;
      same.cu_seqlens = offsets_of(offsets);
      expect_same_bits(replayed, run_map(mode, same, name), name);
    }
    replayed.implementation = ran;
    return replayed;
  });
}

// A call looks at the memory around its tensors.
TEST_P(CudaDeltaRuleMap, MalformedOffsetsStayInside) {
  DeltaRuleMapCase problem = packed(GetParam(), {20, 20, 29});
  for (const std::vector<int64_t>& offsets : first(kMalformedOffsets, 1)) {
    problem.cu_seqlens = offsets_of(offsets);
    for_each_map([&](Mode mode, const std::string& name) { return run_map(mode, problem, name); });
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, CudaDeltaRuleMap, ::testing::ValuesIn(kGates),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
