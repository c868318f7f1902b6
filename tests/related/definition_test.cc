// The reference against the definitions of the headers, written out once more, and against the delta rule where a
// related operator becomes one.
#include <gtest/gtest.h>

#include <cmath>

#include "support/delta_rule_case.h"
#include "tests/related/grid.h"

namespace fastweight::test {
namespace {

using support::DeltaRuleCase;
using support::DeltaRuleResults;
using support::DeltaRuleSpec;

class Definition : public ::testing::TestWithParam<RelatedOp> {};

// Row (t, h) of x, which may be absent (0), one number per head, or one per channel.
double element(const Tensor& x, const RelatedSpec& spec, int64_t t, int64_t h, int64_t d) {
  if (!x.present()) return 0;
  const int64_t width = x.shape().size() == 3 ? 1 : x.shape()[3];
  return x[(t * spec.H + h) * width + (width == 1 ? 0 : d)];
}

// S_t of one head from S_{t-1}, as the headers have it.
std::vector<double> next_state(const RelatedCase& problem, int64_t t, int64_t h, const std::vector<double>& S) {
  const RelatedSpec& spec = problem.spec;
  std::vector<double> next(S.size());
  for (int64_t j = 0; j < spec.V; ++j) {
    double by_p = 0, by_a = 0;
    for (int64_t d = 0; d < spec.K; ++d) {
      by_p += element(problem.p, spec, t, h, d) * S[static_cast<size_t>(d * spec.V + j)];
      by_a += element(problem.a, spec, t, h, d) * S[static_cast<size_t>(d * spec.V + j)];
    }
    const double v = element(problem.v, spec, t, h, j);
    const double u = spec.op == RelatedOp::kComba ? element(problem.beta, spec, t, h, 0) * (v - by_p) : v;
    for (int64_t d = 0; d < spec.K; ++d) {
      const size_t at = static_cast<size_t>(d * spec.V + j);
      next[at] = std::exp(element(problem.g, spec, t, h, d)) * S[at] + element(problem.k, spec, t, h, d) * u +
                 element(problem.b, spec, t, h, d) * by_a;
    }
  }
  return next;
}

TEST_P(Definition, Forward) {
  RelatedSpec spec = spec_of(GetParam(), 21, 5, 3, 2);
  spec.dtype = spec.gate_dtype = DType::kF64;
  spec.scale = 0.6;
  const RelatedCase problem = support::draw(spec, 5);
  const RelatedResults results = support::forward(problem, reference_context());
  const int64_t KV = spec.K * spec.V;
  for (int64_t h = 0; h < spec.H; ++h) {
    std::vector<double> S = slice(problem.initial_state, 1, h, h + 1).values();
    for (int64_t t = 0; t < spec.T; ++t) {
      S = next_state(problem, t, h, S);
      for (int64_t j = 0; j < spec.V; ++j) {
        double o = 0;
        for (int64_t d = 0; d < spec.K; ++d) {
          o += spec.scale * element(problem.q, spec, t, h, d) * S[static_cast<size_t>(d * spec.V + j)];
        }
        ASSERT_NEAR(element(results.o, spec, t, h, j), o, 1e-12) << t << " " << h << " " << j;
      }
    }
    for (int64_t i = 0; i < KV; ++i) ASSERT_NEAR(results.final_state[h * KV + i], S[static_cast<size_t>(i)], 1e-12);
  }
}

// g_gamma is a g that every token shares.
TEST(Identities, ConstantDecay) {
  RelatedSpec spec = spec_of(RelatedOp::kSimpleGla, 70, 12, 20, 3);
  spec.B = 2;
  spec.g_gamma = true;
  const RelatedCase constant = support::draw(spec, 6);
  RelatedCase spread = constant;
  spread.spec.g_gamma = false;
  spread.g_gamma = {};
  spread.g = Tensor(DType::kF32, {spec.B, spec.T, spec.H});
  for (int64_t i = 0; i < spread.g.size(); ++i) spread.g.set(i, constant.g_gamma[i % spec.H]);
  for (const std::string& name : implementations(spec.op, Mode::kForward)) {
    expect_same_bits(support::forward(constant, context_for(name)), support::forward(spread, context_for(name)), name);
  }
  for (const std::string& name : implementations(spec.op, Mode::kStep)) {
    expect_same_bits(support::step(constant, context_for(name)), support::step(spread, context_for(name)), name);
  }
  for (const std::string& name : implementations(spec.op, Mode::kBackward)) {
    RelatedResults expected = support::backward(spread, context_for(name));
    expected.dg = {};
    expect_same_bits(support::backward(constant, context_for(name)), expected, name);
  }
}

DeltaRuleCase delta_rule_of(Gate gate) {
  DeltaRuleSpec spec;
  spec.options.gate = gate;
  spec.dtype = spec.gate_dtype = DType::kF64;
  spec.B = 2, spec.T = 40, spec.H = spec.HV = 2, spec.K = 7, spec.V = 5;
  return support::draw(spec, 7);
}

RelatedCase related_of(const DeltaRuleCase& from, RelatedOp op) {
  RelatedSpec spec = spec_of(op, from.spec.T, from.spec.K, from.spec.V, from.spec.H);
  spec.B = from.spec.B;
  spec.dtype = spec.gate_dtype = DType::kF64;
  RelatedCase result;
  result.spec = spec;
  result.q = from.q;
  result.k = from.k;
  result.v = from.v;
  result.g = from.g;
  result.initial_state = from.initial_state;
  result.d_o = from.d_o;
  result.d_final_state = from.d_final_state;
  return result;
}

void expect_equal(const Tensor& a, const Tensor& b, const char* what) {
  EXPECT_LT(support::compare(a, b).relative_rms, 1e-12) << what;
}

TEST(Identities, CombaWithDecayedKeysIsTheGatedDeltaRule) {
  const DeltaRuleCase gdn = delta_rule_of(Gate::kPerHead);
  RelatedCase comba = related_of(gdn, RelatedOp::kComba);
  comba.beta = gdn.beta;
  comba.p = gdn.k;
  for (int64_t i = 0; i < comba.p.size(); ++i) comba.p.set(i, std::exp(gdn.g[i / gdn.spec.K]) * gdn.k[i]);
  const DeltaRuleResults expected = support::forward(gdn, reference_context());
  const RelatedResults results = support::forward(comba, reference_context());
  expect_equal(results.o, expected.o, "o");
  expect_equal(results.final_state, expected.final_state, "final_state");
  const DeltaRuleResults expected_gradients = support::backward(gdn, reference_context());
  const RelatedResults gradients = support::backward(comba, reference_context());
  for (const auto& [a, b, what] : {std::tuple(&gradients.dq, &expected_gradients.dq, "dq"),
                                   {&gradients.dv, &expected_gradients.dv, "dv"},
                                   {&gradients.dbeta, &expected_gradients.dbeta, "dbeta"},
                                   {&gradients.d_initial_state, &expected_gradients.d_initial_state, "dS"}}) {
    expect_equal(*a, *b, what);
  }
}

TEST(Identities, LowRankIsTheDeltaRule) {
  for (Gate gate : {Gate::kNone, Gate::kPerChannel}) {
    const DeltaRuleCase rule = delta_rule_of(gate);
    RelatedCase low_rank = related_of(rule, gate == Gate::kNone ? RelatedOp::kIplr : RelatedOp::kDplr);
    const int64_t K = rule.spec.K, V = rule.spec.V;
    low_rank.a = low_rank.b = rule.k;
    for (int64_t i = 0; i < rule.k.size(); ++i) {
      low_rank.a.set(i, -rule.beta[i / K] * rule.k[i] * (gate == Gate::kNone ? 1 : std::exp(rule.g[i])));
    }
    for (int64_t i = 0; i < rule.v.size(); ++i) low_rank.v.set(i, rule.beta[i / V] * rule.v[i]);
    const DeltaRuleResults expected = support::forward(rule, reference_context());
    const RelatedResults results = support::forward(low_rank, reference_context());
    expect_equal(results.o, expected.o, "o");
    expect_equal(results.final_state, expected.final_state, "final_state");
    const DeltaRuleResults expected_gradients = support::backward(rule, reference_context());
    const RelatedResults gradients = support::backward(low_rank, reference_context());
    expect_equal(gradients.dq, expected_gradients.dq, "dq");
    expect_equal(gradients.d_initial_state, expected_gradients.d_initial_state, "dS");
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, Definition, ::testing::ValuesIn(kRelatedOps),
                         [](const auto& instance) { return name_of(instance.param); });

}  // namespace
}  // namespace fastweight::test
