// What the blocks have to satisfy whatever the reference says: J (I + A) = I, hard triangular systems, the chain of
// blocks as the delta rule, adjoints as transposes, sums by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "fastweight/delta_rule.h"
#include "tests/blocks/grid.h"
#include "tests/differences.h"

namespace fastweight::test {
namespace {

using support::normals;
using support::Random;
using support::unit_rows;

Tensor solve(const Tensor& a, const std::string& implementation, DType type) {
  Tensor j = support::poisoned(type, a.shape());
  SolveTrilForward args;
  args.a = a.view();
  args.j = j.view();
  const Context context = implementation == "reference" ? reference_context() : context_for(implementation);
  EXPECT_EQ(support::run(context, args), implementation);
  return j;
}

// Of [1, T, 1, C] chunk matrices: the largest |((I + A) J - I)_ij| over (1 + |A|) |J|, element by element: the backward
// error of the inverse. Forward substitution keeps it at C roundings, however ill-conditioned I + A is.
double residual(const Tensor& a, const Tensor& j) {
  const int64_t T = a.shape()[1], C = a.shape()[3];
  double worst = 0;
  for (int64_t begin = 0; begin < T; begin += C) {
    const int64_t L = std::min(C, T - begin);
    for (int64_t i = 0; i < L; ++i) {
      for (int64_t m = 0; m < C; ++m) {
        const double own = j[(begin + i) * C + m];
        double sum = own - (i == m ? 1 : 0), size = std::fabs(own);
        for (int64_t n = 0; n < i; ++n) {
          const double term = a[(begin + i) * C + n] * j[(begin + n) * C + m];
          sum += term;
          size += std::fabs(term);
        }
        if (m > i) {
          EXPECT_EQ(own, 0) << "above the diagonal";
        }
        if (m == i) {
          EXPECT_EQ(own, 1) << "on the diagonal";
        }
        worst = std::max(worst, std::fabs(sum) / std::max(size, 1e-30));
      }
    }
  }
  return worst;
}

// A of given keys and step sizes, without a gate.
Tensor gram(const Tensor& k, double beta, int64_t C) {
  const int64_t T = k.shape()[1];
  Tensor a(DType::kF32, {1, T, 1, C}), betas(DType::kF64, {1, T, 1});
  betas.fill(beta);
  ScaledDotKktForward args;
  args.in.k = k.view();
  args.in.beta = betas.view();
  args.a = a.view();
  scaled_dot_kkt_forward(reference_context(), args);
  return a;
}

struct Hard {
  const char* name;
  Tensor a;
};

std::vector<Hard> hard_systems(int64_t C) {
  const int64_t T = 2 * C + 5, K = 24;
  const Tensor random = unit_rows(normals(DType::kF64, {1, T, 1, K}, 1, 1));
  Tensor repeated = random, collinear = random, nearly = random, long_keys = random;
  Random noise(2, 2);
  for (int64_t i = 0; i < T * K; ++i) {
    repeated.set(i, random[i % K]);
    collinear.set(i, random[i % K] * (i / K % 2 == 0 ? 1 : -1));
    nearly.set(i, random[i % K] + 1e-3 * noise.normal());
    long_keys.set(i, 1.5 * random[i]);
  }
  Tensor dense(DType::kF32, {1, T, 1, C});
  for (int64_t i = 0; i < dense.size(); ++i) dense.set(i, 0.4 * noise.normal());
  return {{"random keys", gram(random, 0.9, C)},
          {"repeated keys, beta 1", gram(repeated, 1, C)},
          {"repeated keys, beta near 2", gram(repeated, 1.999, C)},
          {"collinear keys, beta 1.5", gram(collinear, 1.5, C)},
          {"nearly equal keys, beta near 2", gram(nearly, 1.98, C)},
          {"keys of norm 1.5, beta 2", gram(long_keys, 2, C)},
          {"normal entries", dense}};
}

TEST(SolveTril, InvertsHardSystems) {
  for (int64_t C : {16, 32, 64}) {
    for (const Hard& hard : hard_systems(C)) {
      for (const std::string& name : implementations(Block::kSolveTril, Mode::kForward)) {
        // The stored J is rounded: half a unit of fp32 beside the roundings of the substitution.
        EXPECT_LT(residual(hard.a, solve(hard.a, name, DType::kF32)), 2e-6) << name << " " << hard.name << " C=" << C;
      }
      EXPECT_LT(residual(hard.a, solve(hard.a, "reference", DType::kF64)), 1e-14) << hard.name;
    }
  }
}

// Entry by entry where the inverse is known: equal keys of norm 1 give J_ij = -beta (1 - beta)^(i - j - 1).
TEST(SolveTril, RepeatedKeysHaveAKnownInverse) {
  for (double beta : {0.5, 1.0, 1.5, 1.9375}) {  // exact in fp32, and so is A
    for (int64_t C : {16, 32, 64}) {
      Tensor a(DType::kF32, {1, C, 1, C});
      a.fill(beta);  // what is on and above the diagonal is not read
      for (const std::string& name : implementations(Block::kSolveTril, Mode::kForward)) {
        const Tensor j = solve(a, name, DType::kF32);
        for (int64_t i = 0; i < C; ++i) {
          for (int64_t m = 0; m < i; ++m) {
            const double expected = -beta * std::pow(1 - beta, static_cast<double>(i - m - 1));
            EXPECT_NEAR(j[i * C + m], expected, 4e-6) << name << " beta " << beta << " at " << i << ", " << m;
          }
        }
      }
    }
  }
}

TEST(SolveTril, ReadsOnlyBelowTheDiagonal) {
  const int64_t C = 16, T = 20;
  Tensor a = normals(DType::kF32, {1, T, 1, C}, 1, 1), spoiled = a;
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t m = t % C; m < C; ++m) spoiled.set(t * C + m, std::numeric_limits<double>::quiet_NaN());
  }
  for (const std::string& name : implementations(Block::kSolveTril, Mode::kForward)) {
    EXPECT_TRUE(support::same_bits(solve(a, name, DType::kF32), solve(spoiled, name, DType::kF32))) << name;
  }
}

// The chain of blocks against the delta rule: with R = U - W S,  S+ = exp(gamma_L) * S + (k exp(gamma_L - gamma))^T R.
TEST(Blocks, ChainIsTheDeltaRule) {
  const int64_t T = 40, K = 12, V = 10, C = 64;
  for (Gate gate : {Gate::kNone, Gate::kPerHead, Gate::kPerChannel}) {
    const bool per_channel = gate == Gate::kPerChannel;
    const Tensor k = unit_rows(normals(DType::kF64, {1, T, 1, K}, 1, 1)), v = normals(DType::kF64, {1, T, 1, V}, 1, 2);
    const Tensor S = normals(DType::kF64, {1, 1, K, V}, 1, 3);
    Random random(1, 4);
    const Tensor beta = support::drawn(DType::kF64, {1, T, 1}, [&] { return random.uniform(); });
    const std::vector<int64_t> gate_shape =
        per_channel ? std::vector<int64_t>{1, T, 1, K} : std::vector<int64_t>{1, T, 1};
    const Tensor g = support::drawn(DType::kF64, gate_shape, [&] { return -random.uniform(); });
    Tensor gamma(DType::kF64, gate_shape), a(DType::kF64, {1, T, 1, C}), j(DType::kF64, {1, T, 1, C});
    Tensor w(DType::kF64, {1, T, 1, K}), u(DType::kF64, {1, T, 1, V});
    chunk_local_cumsum({}, {g.view(), {}, static_cast<int32_t>(C), false, gamma.view()});
    const TensorView decay = gate == Gate::kNone ? TensorView() : gamma.view();
    scaled_dot_kkt_forward({}, {{k.view(), beta.view(), decay, {}}, a.view()});
    solve_tril_forward({}, {a.view(), {}, j.view()});
    wy_forward({}, {{k.view(), v.view(), beta.view(), decay, j.view(), {}}, w.view(), u.view()});

    Tensor o(DType::kF64, {1, T, 1, V}), final_state(DType::kF64, {1, 1, K, V});
    DeltaRuleForward rule;
    rule.options.gate = gate;
    rule.in.q = rule.in.k = k.view();
    rule.in.v = v.view();
    rule.in.beta = beta.view();
    if (gate != Gate::kNone) rule.in.g = g.view();
    rule.in.initial_state = S.view();
    rule.o = o.view();
    rule.final_state = final_state.view();
    delta_rule_forward({}, rule);

    const auto gamma_at = [&](int64_t t, int64_t d) {
      return gate == Gate::kNone ? 0 : per_channel ? gamma[t * K + d] : gamma[t];
    };
    for (int64_t d = 0; d < K; ++d) {
      for (int64_t c = 0; c < V; ++c) {
        double state = std::exp(gamma_at(T - 1, d)) * S[d * V + c];
        for (int64_t t = 0; t < T; ++t) {
          double r = u[t * V + c];
          for (int64_t e = 0; e < K; ++e) r -= w[t * K + e] * S[e * V + c];
          state += k[t * K + d] * std::exp(gamma_at(T - 1, d) - gamma_at(t, d)) * r;
        }
        EXPECT_NEAR(final_state[d * V + c], state, 1e-12);
      }
    }
  }
}

TEST(ChunkLocalCumsum, SumsByHand) {
  Tensor x(DType::kF32, {1, 35, 2}), y(DType::kF32, {1, 35, 2});
  for (int64_t i = 0; i < x.size(); ++i) x.set(i, static_cast<double>(i % 7 - 3));
  for (const std::string& name : implementations(Block::kChunkLocalCumsum, Mode::kForward)) {
    for (bool reverse : {false, true}) {
      EXPECT_EQ(support::run(context_for(name), ChunkLocalCumsum{x.view(), {}, 16, reverse, y.view()}), name);
      for (int64_t t = 0; t < 35; ++t) {
        const int64_t begin = t / 16 * 16, end = std::min<int64_t>(begin + 16, 35);
        for (int64_t h = 0; h < 2; ++h) {
          double sum = 0;
          for (int64_t s = reverse ? t : begin; s < (reverse ? end : t + 1); ++s) sum += x[2 * s + h];
          EXPECT_EQ(y[2 * t + h], sum) << name << " token " << t;
        }
      }
    }
  }
}

// A row of zeros has no direction: y = 0, and its gradient is dy / sqrt(eps).
TEST(L2Norm, ZeroRow) {
  Tensor x(DType::kF32, {2, 5}), y(DType::kF32, {2, 5}), rstd(DType::kF32, {2}), dy(DType::kF32, {2, 5});
  for (int64_t i = 5; i < 10; ++i) x.set(i, 2);
  dy.fill(1);
  for (const std::string& name : implementations(Block::kL2Norm, Mode::kForward)) {
    Tensor dx = support::poisoned(DType::kF32, {2, 5});
    support::run(context_for(name), L2NormForward{x.view(), 1e-6, y.view(), rstd.view()});
    support::run(context_for(name), L2NormBackward{y.view(), rstd.view(), dy.view(), dx.view()});
    for (int64_t i = 0; i < 5; ++i) {
      EXPECT_EQ(y[i], 0) << name;
      EXPECT_NEAR(dx[i], 1000, 1e-3) << name;
      EXPECT_NEAR(y[5 + i], 1 / std::sqrt(5.0), 1e-6) << name;
      EXPECT_NEAR(dx[5 + i], 0, 1e-6) << name;  // dy along y
    }
    EXPECT_NEAR(rstd[0], 1000, 1e-3) << name;
  }
}

// Values at which softplus changes its form, and far out.
TEST(GateActivation, Extremes) {
  const std::vector<double> values = {-200, -30, -1, 0, 1, 19.9, 20.1, 80, 1e4};
  const int64_t T = static_cast<int64_t>(values.size());
  const Tensor x(DType::kF32, {1, T, 1, 1}, values), a_log(DType::kF32, {1}, std::vector<double>{0});
  Tensor g(DType::kF32, {1, T, 1, 1});
  for (const std::string& name : implementations(Block::kGateActivation, Mode::kForward)) {
    GateActivationForward args;
    args.in.x = x.view();
    args.in.a_log = a_log.view();
    args.g = g.view();
    support::run(context_for(name), args);
    for (int64_t t = 0; t < T; ++t) {
      const double z = x[t], expected = z > 0 ? -(z + std::log1p(std::exp(-z))) : -std::log1p(std::exp(z));
      EXPECT_NEAR(g[t], expected, 1e-6 * std::fabs(expected) + 1e-12) << name << " at " << z;
    }
    args.options.lower_bound = -5;
    support::run(context_for(name), args);
    for (int64_t t = 0; t < T; ++t) {
      const double expected = -5 / (1 + std::exp(-x[t]));
      EXPECT_NEAR(g[t], expected, 1e-6) << name << " at " << x[t];
    }
  }
}

// Sums over many tokens of one sign: an fp32 sum of a million equal terms would be off by several percent.
TEST(GateActivation, ParameterGradientsDoNotDrift) {
  const int64_t T = 400'000;
  Tensor x(DType::kBF16, {1, T, 1}), dg(DType::kBF16, {1, T, 1}), dx(DType::kBF16, {1, T, 1});
  x.fill(0.3);
  dg.fill(0.7);
  Tensor a_log(DType::kF32, {1}), dt_bias(DType::kF32, {1}), da_log(DType::kF32, {1}), ddt_bias(DType::kF32, {1});
  dt_bias.fill(0.1);
  const double z = x[0] + dt_bias[0];
  for (const std::string& name : implementations(Block::kGateActivation, Mode::kBackward)) {
    GateActivationBackward args;
    args.in.x = x.view();
    args.in.a_log = a_log.view();
    args.in.dt_bias = dt_bias.view();
    args.dg = dg.view();
    args.dx = dx.view();
    args.da_log = da_log.view();
    args.ddt_bias = ddt_bias.view();
    support::run(context_for(name), args);
    const double slope = -dg[0] / (1 + std::exp(-z)), value = -dg[0] * std::log1p(std::exp(z));
    EXPECT_NEAR(ddt_bias[0] / (static_cast<double>(T) * slope), 1, 5e-7) << name;
    EXPECT_NEAR(da_log[0] / (static_cast<double>(T) * value), 1, 5e-7) << name;
    EXPECT_GT(std::fabs(dx[0] / slope - 1), 1e-4) << "dx itself is rounded to bf16: the sums were made before";
  }
}

void check_gradients(const BlockSpec& spec, const std::vector<std::string>& without_input = {}) {
  const auto how = [](const std::string&) { return Differences{.bound = 1e-7}; };
  expect_gradients_match_differences(support::in_double(support::draw(spec, 11)), how, without_input);
}

TEST(Gradients, MatchCentralDifferences) {
  for (Gate gate : {Gate::kNone, Gate::kPerHead, Gate::kPerChannel}) {
    BlockSpec spec = with_lengths(spec_of(Block::kScaledDotKkt, 0, 16, gate), {19, 0, 1, 3});
    spec = with_heads(spec, 1, 2, 5, 4);
    check_gradients(spec);
    spec.block = Block::kWy;
    check_gradients(spec, {"da"});
    if (gate == Gate::kNone) continue;
    for (bool bounded : {false, gate == Gate::kPerChannel}) {
      for (int64_t C : {0, 16}) {
        spec.block = Block::kGateActivation;
        spec.lower_bound = bounded;
        spec.C = C;
        check_gradients(spec);
      }
    }
  }
  check_gradients(with_lengths(spec_of(Block::kSolveTril, 0, 16), {19, 0, 1, 3}));
  check_gradients(with_heads(spec_of(Block::kL2Norm, 9), 1, 1, 7));
}

// wy_backward's dA is what reaches A through J: <dW, W(J(A))> + <dU, U(J(A))>.
TEST(Gradients, WyReachesA) {
  BlockSpec spec = spec_of(Block::kWy, 21, 16, Gate::kPerHead);
  spec.K = 5;
  spec.V = 4;
  BlockCase problem = support::in_double(support::draw(spec, 11));
  Tensor a = normals(DType::kF64, problem.j.shape(), 3, 3);
  for (int64_t i = 0; i < a.size(); ++i) a.set(i, 0.2 * a[i]);
  problem.j = solve(a, "reference", DType::kF64);
  const Tensor da = support::backward(problem, reference_context()).da;
  for (int64_t i = 0; i < a.size(); ++i) {
    constexpr double kStep = 1e-5;
    BlockCase moved = problem;
    Tensor moved_a = a;
    moved_a.set(i, a[i] + kStep);
    moved.j = solve(moved_a, "reference", DType::kF64);
    const double above = loss(moved);
    moved_a.set(i, a[i] - kStep);
    moved.j = solve(moved_a, "reference", DType::kF64);
    EXPECT_NEAR(da[i], (above - loss(moved)) / (2 * kStep), 1e-7 * (1 + support::rms(da))) << i;
  }
}

}  // namespace
}  // namespace fastweight::test
