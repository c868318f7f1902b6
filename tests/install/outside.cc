// One token through DeltaNet with the installed library: from a zero state, o = scale (q . k) beta v.
#include <fastweight/fastweight.h>

#include <cmath>
#include <cstdio>

int main() {
  const float q[2] = {1, 2}, k[2] = {0.6f, 0.8f}, v[3] = {1, -2, 3}, beta[1] = {0.5f};
  float o[3] = {};
  fastweight::DeltaRuleForward args;
  args.in.q = fastweight::TensorView::dense(q, {1, 1, 1, 2});
  args.in.k = fastweight::TensorView::dense(k, {1, 1, 1, 2});
  args.in.v = fastweight::TensorView::dense(v, {1, 1, 1, 3});
  args.in.beta = fastweight::TensorView::dense(beta, {1, 1, 1});
  args.o = fastweight::TensorView::dense(o, {1, 1, 1, 3});
  args.options.scale = 1;
  const std::string ran = fastweight::delta_rule_forward({}, args);

  std::printf("fastweight %s, %s: %g %g %g\n", fastweight::version().c_str(), ran.c_str(), o[0], o[1], o[2]);
  for (int i = 0; i < 3; ++i) {
    if (std::fabs(o[i] - 1.1f * v[i]) > 1e-5f) return 1;
  }
  return 0;
}
