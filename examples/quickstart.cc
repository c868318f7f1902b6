// A gated delta rule (GDN) forward pass: 2 sequences of 128 tokens, 4 heads of width 64.
#include <cstdio>
#include <vector>

#include "fastweight/fastweight.h"

using fastweight::TensorView;

int main() {
  const int64_t B = 2, T = 128, H = 4, K = 64, V = 64;
  std::vector<float> q(B * T * H * K, 0.1f), k(B * T * H * K, 0.1f), v(B * T * H * V, 1.0f), o(B * T * H * V);
  std::vector<float> g(B * T * H, -0.05f), beta(B * T * H, 0.5f), state(B * H * K * V);

  fastweight::DeltaRuleForward args;
  args.options.gate = fastweight::Gate::kPerHead;
  args.in.q = TensorView::dense(q.data(), {B, T, H, K});
  args.in.k = TensorView::dense(k.data(), {B, T, H, K});
  args.in.v = TensorView::dense(v.data(), {B, T, H, V});
  args.in.g = TensorView::dense(g.data(), {B, T, H});  // the logarithm of the decay
  args.in.beta = TensorView::dense(beta.data(), {B, T, H});
  args.o = TensorView::dense(o.data(), {B, T, H, V});
  args.final_state = TensorView::dense(state.data(), {B, H, K, V});

  try {
    const std::string implementation = fastweight::delta_rule_forward({}, args);
    std::printf("%s: o[0] = %g, o[last] = %g\n", implementation.c_str(), o.front(), o.back());
  } catch (const fastweight::Error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
