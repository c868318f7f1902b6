#include "ops/dispatch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "fastweight/fastweight.h"

namespace fastweight {
namespace {

// A problem that tells each of three implementations what to answer.
struct Toy {
  std::string declines[3];
  bool worthwhile[3];
};

template <size_t kIndex>
Implementation<Toy> toy(const char* name) {
  return {name, [](const Toy& problem) { return problem.declines[kIndex]; },
          [](const Toy& problem) { return problem.worthwhile[kIndex]; }, [](const Toy&, const Context&) {}};
}

Choice<Toy> choose_toy(const Toy& problem, const std::string& name = "") {
  static const Implementation<Toy> list[] = {toy<0>("fast"), toy<1>("plain"), toy<2>("last")};
  return choose<Toy>("toy", list, problem, name);
}

// call() fails with this code and message.
template <class Call>
void expect_error(const Call& call, ErrorCode code, const std::string& message) {
  try {
    call();
    ADD_FAILURE() << "accepted; expected: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    EXPECT_EQ(std::string(error.what()), message);
  }
}

TEST(Dispatch, FirstWorthwhile) {
  const auto choice = choose_toy({{"", "", ""}, {true, true, true}});
  EXPECT_STREQ(choice.implementation->name, "fast");
  EXPECT_EQ(choice.passed_over, "");
}

TEST(Dispatch, PassesOverDeclinersAndTheReluctant) {
  const auto choice = choose_toy({{"needs K = 64", "", ""}, {true, false, true}});
  EXPECT_STREQ(choice.implementation->name, "last");
  EXPECT_EQ(choice.passed_over, "fast: needs K = 64; plain: not worthwhile");
}

TEST(Dispatch, FallsBackToTheFirstThatTakesIt) {
  const auto choice = choose_toy({{"needs K = 64", "", ""}, {true, false, false}});
  EXPECT_STREQ(choice.implementation->name, "plain");
  EXPECT_EQ(choice.passed_over, "fast: needs K = 64");
}

TEST(Dispatch, NobodyTakesIt) {
  expect_error(
      [] {
        choose_toy({{"a", "b", "c"}, {true, true, true}});
      },
      ErrorCode::kUnsupported, "toy: no implementation takes this problem: fast: a; plain: b; last: c");
}

TEST(Dispatch, ByName) {
  const Toy problem{{"needs K = 64", "", ""}, {true, false, true}};
  EXPECT_STREQ(choose_toy(problem, "plain").implementation->name, "plain");
  expect_error([&] { choose_toy(problem, "fast"); }, ErrorCode::kUnsupported, "toy: fast: needs K = 64");
  expect_error([&] { choose_toy(problem, "slow"); }, ErrorCode::kInvalidArgument,
               "implementation: expected one of fast, plain, last, got \"slow\"");
}

// A list in which "chunk" is a form of two entries, and of which one entry begins with another one's name.
Choice<Toy> choose_form(const Toy& problem, const std::string& name) {
  static const Implementation<Toy> list[] = {toy<0>("chunk_narrow"), toy<1>("chunk_wide"), toy<2>("chunky")};
  return choose<Toy>("toy", list, problem, name);
}

TEST(Dispatch, AFormIsTheFirstOfItsEntriesThatTakesIt) {
  // Nobody is asked whether it is worthwhile.
  auto choice = choose_form({{"", "", ""}, {false, true, true}}, "chunk");
  EXPECT_STREQ(choice.implementation->name, "chunk_narrow");
  EXPECT_EQ(choice.passed_over, "");
  choice = choose_form({{"needs K = 64", "", ""}, {true, false, true}}, "chunk");
  EXPECT_STREQ(choice.implementation->name, "chunk_wide");
  EXPECT_EQ(choice.passed_over, "chunk_narrow: needs K = 64");
}

TEST(Dispatch, AFormThatNoneOfItsEntriesTakes) {
  // The last entry would take it, but is of another form.
  expect_error(
      [] {
        choose_form({{"a", "b", ""}, {true, true, true}}, "chunk");
      },
      ErrorCode::kUnsupported, "toy: no chunk takes this problem: chunk_narrow: a; chunk_wide: b");
}

TEST(Dispatch, AnEntryIsNotReplacedByItsForm) {
  const Toy problem{{"a", "", ""}, {true, true, true}};
  expect_error([&] { choose_form(problem, "chunk_narrow"); }, ErrorCode::kUnsupported, "toy: chunk_narrow: a");
  EXPECT_STREQ(choose_form(problem, "chunk_wide").implementation->name, "chunk_wide");
  EXPECT_EQ(choose_form(problem, "chunk_wide").passed_over, "");
  // An entry of exactly this name goes before entries of the form.
  static const Implementation<Toy> list[] = {toy<0>("chunk_narrow"), toy<1>("chunk"), toy<2>("last")};
  EXPECT_STREQ(choose<Toy>("toy", list, {{"", "", ""}, {true, true, true}}, "chunk").implementation->name, "chunk");
  expect_error(
      [&] {
        choose<Toy>("toy", list, {{"", "b", ""}, {true, true, true}}, "chunk");
      },
      ErrorCode::kUnsupported, "toy: chunk: b");
}

TEST(Dispatch, PartsOfNamesAreNoForms) {
  const std::string known = "implementation: expected one of chunk_narrow, chunk_wide, chunky, got \"";
  for (const std::string name : {"chun", "chunk_", "chunk_n", "narrow", "_"}) {
    expect_error(
        [&] {
          choose_form({{"", "", ""}, {true, true, true}}, name);
        },
        ErrorCode::kInvalidArgument, known + name + "\"");
  }
}

// One line with what ran, how it cut the problem, and who was passed over.
TEST(Dispatch, VerboseNamesTheConfig) {
  Implementation<Toy> list[] = {toy<0>("chunk_narrow"), toy<1>("chunk_wide")};
  list[1].config = [](const Toy&, const Context&) { return std::string("columns 64"); };
  const std::span<const Implementation<Toy>> entries = list;
  std::string line;
  Context context;
  context.verbose = true;
  context.log_user = &line;
  context.log = [](void* user, const char* text) { *static_cast<std::string*>(user) = text; };
  const auto describe = [](const Toy&) { return std::string("T=1"); };
  for (const char* name : {"", "chunk"}) {
    context.implementation = name;
    const Toy problem{{"a", "", ""}, {true, true, true}};
    EXPECT_EQ(dispatch<Toy>("toy", context, entries, problem, true, describe), "chunk_wide");
    EXPECT_EQ(line, "fastweight: toy T=1: ran chunk_wide {columns 64} (chunk_narrow: a)");
  }
  context.implementation = "chunk_narrow";
  dispatch<Toy>("toy", context, entries, {{"", "", ""}, {true, true, true}}, true, describe);
  EXPECT_EQ(line, "fastweight: toy T=1: ran chunk_narrow");
}

TEST(DeltaRuleImplementations, ListsEndWithTheReference) {
  std::set<std::string> modes;
  std::string last;
  for (const ImplementationInfo& info : delta_rule_implementations()) {
    if (info.device != "cpu") continue;
    const bool ends_a_list = !modes.empty() && !modes.contains(info.mode);
    if (ends_a_list) {
      EXPECT_EQ(last, "reference");
    }
    modes.insert(info.mode);
    last = info.name;
  }
  EXPECT_EQ(last, "reference");
  EXPECT_EQ(modes, (std::set<std::string>{"backward", "forward", "step"}));
}

class SmallForward : public testing::Test {
 protected:
  SmallForward() {
    args_.in.q = args_.in.k = TensorView::dense(keys_.data(), {1, 3, 2, 4});
    args_.in.v = TensorView::dense(values_.data(), {1, 3, 2, 4});
    args_.o = TensorView::dense(o_.data(), {1, 3, 2, 4});
  }

  std::vector<float> keys_ = std::vector<float>(24, 0.5f), values_ = keys_, o_ = keys_;
  DeltaRuleForward args_;
};

TEST_F(SmallForward, EveryImplementationRunsByName) {
  for (const ImplementationInfo& info : delta_rule_implementations()) {
    if (info.mode != "forward" || info.device != "cpu") continue;
    Context context;
    context.implementation = info.name;
    EXPECT_EQ(delta_rule_forward(context, args_), info.name);
  }
}

TEST_F(SmallForward, VerboseSaysWhatRanInOneLine) {
  std::vector<std::string> lines;
  Context context;
  context.verbose = true;
  context.log_user = &lines;
  context.log = [](void* user, const char* line) { static_cast<std::vector<std::string>*>(user)->push_back(line); };
  const std::string name = delta_rule_forward(context, args_);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("delta_rule_forward B=1 T=3 H=2 HV=2 K=4 V=4 N=1 C=64, gate none, fp32: ran " + name),
            std::string::npos)
      << lines[0];
  EXPECT_EQ(lines[0].find('\n'), std::string::npos);
}

TEST_F(SmallForward, WorkspaceThatIsRefused) {
  Context context;
  context.workspace.allocate = [](void*, size_t) -> void* { return nullptr; };
  context.workspace.release = [](void*, void*, size_t) {};
  for (const ImplementationInfo& info : delta_rule_implementations()) {
    if (info.mode != "forward" || info.device != "cpu") continue;
    SCOPED_TRACE(info.name);
    context.implementation = info.name;
    try {
      delta_rule_forward(context, args_);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
      EXPECT_EQ(o_, keys_);
    }
  }
}

TEST(Info, NamesTheMachine) {
  EXPECT_FALSE(version().empty());
  EXPECT_GE(default_num_threads(), 1);
  const std::vector<std::string> targets = cpu_targets();
  EXPECT_NE(std::find(targets.begin(), targets.end(), cpu_target()), targets.end()) << cpu_target();
}

}  // namespace
}  // namespace fastweight
