// The short convolution in double precision: the definition as loops. It takes every valid problem and is what all
// other implementations are measured against. An item is one channel of all sequences.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "cpu/parallel.h"
#include "cpu/reference.h"
#include "cpu/scalar_types.h"
#include "cpu/short_conv/kernels.h"

namespace fastweight::cpu::short_conv {
namespace {

using Taps = std::array<double, 16>;  // one number per tap or state slot; W of them count

// One channel.
struct Filter {
  const ShortConvInputs& in;
  int64_t W;
  int64_t d;
  bool silu;
  Taps w;
  double bias;

  // Token t of the sequence, or, below 0, what slot t + W of its state held before.
  double input(const Sequence& s, const Taps& before, int64_t t) const {
    return t < 0 ? before[static_cast<size_t>(t + W)] : load(in.x, at(in.x, {s.batch, s.begin + t, d}));
  }
  double z(const Sequence& s, const Taps& before, int64_t t) const {
    double sum = bias;
    for (int64_t i = 0; i < W; ++i) sum += w[static_cast<size_t>(i)] * input(s, before, t - W + 1 + i);
    return sum;
  }
  double activation(double z) const { return silu ? z * sigmoid(z) : z; }
  double derivative(double z) const { return silu ? sigmoid(z) * (1 + z * (1 - sigmoid(z))) : 1; }

  Taps load_state(const TensorView& state, int64_t slot) const {
    Taps result{};
    for (int64_t c = 0; c < W && state.present(); ++c) {
      result[static_cast<size_t>(c)] = load(state, at(state, {slot, d, c}));
    }
    return result;
  }
  void store_state(const TensorView& state, int64_t slot, const Taps& values) const {
    for (int64_t c = 0; c < W && state.present(); ++c) {
      store(state, at(state, {slot, d, c}), values[static_cast<size_t>(c)]);
    }
  }
  Taps state_after(const Sequence& s, const Taps& before) const {
    Taps result{};
    for (int64_t c = 0; c < W; ++c) result[static_cast<size_t>(c)] = input(s, before, s.length - W + c);
    return result;
  }
};

// body(filter) for every channel.
template <class Problem, class Body>
void for_each_channel(const Problem& problem, const Context& context, const Body& body) {
  const ShortConvInputs& in = problem.args.in;
  const ShortConvSizes& sizes = problem.sizes;
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(context), sizes.channels));
  parallel_for(sizes.channels, threads, [&](int64_t d, int) {
    Filter filter{in, sizes.width, d, problem.args.options.activation == Activation::kSilu, {}, 0};
    for (int64_t i = 0; i < sizes.width; ++i) filter.w[static_cast<size_t>(i)] = load(in.w, at(in.w, {d, i}));
    if (in.bias.present()) filter.bias = load(in.bias, at(in.bias, {d}));
    body(filter);
  });
}

void run(const Filter& filter, const Sequence& s, const Taps& before, const TensorView& residual, const TensorView& y) {
  for (int64_t t = 0; t < s.length; ++t) {
    double value = filter.activation(filter.z(s, before, t));
    if (residual.present()) value += load(residual, at(residual, {s.batch, s.begin + t, filter.d}));
    store(y, at(y, {s.batch, s.begin + t, filter.d}), value);
  }
}

}  // namespace

void reference_forward(const ShortConvForwardProblem& problem, const Context& context) {
  const ShortConvForward& args = problem.args;
  for_each_channel(problem, context, [&](const Filter& filter) {
    for (const Sequence& s : problem.sequences) {
      const Taps before = filter.load_state(args.in.initial_state, s.index);
      run(filter, s, before, args.residual, args.y);
      filter.store_state(args.final_state, s.index, filter.state_after(s, before));
    }
  });
}

void reference_step(const ShortConvStepProblem& problem, const Context& context) {
  const ShortConvStep& args = problem.args;
  for_each_channel(problem, context, [&](const Filter& filter) {
    for (const Sequence& s : problem.sequences) {
      const TensorView& indices = args.state_indices;
      const int64_t slot =
          indices.present() ? load_integer(indices.data, indices.dtype, at(indices, {s.index})) : s.index;
      if (slot < 0) {
        for (int64_t t = 0; t < s.length; ++t) store(args.y, at(args.y, {s.batch, s.begin + t, filter.d}), 0);
        continue;
      }
      const Taps before = filter.load_state(args.state, slot);
      run(filter, s, before, args.residual, args.y);
      filter.store_state(args.state, slot, filter.state_after(s, before));
    }
  });
}

void reference_backward(const ShortConvBackwardProblem& problem, const Context& context) {
  const ShortConvBackward& args = problem.args;
  for_each_channel(problem, context, [&](const Filter& filter) {
    const int64_t W = filter.W, d = filter.d;
    Taps dw{};
    double dbias = 0;
    for (const Sequence& s : problem.sequences) {
      const Taps before = filter.load_state(args.in.initial_state, s.index);
      const Taps d_after = filter.load_state(args.d_final_state, s.index);
      const auto delta = [&](int64_t t) {
        if (t < 0 || t >= s.length || !args.dy.present()) return 0.0;
        const double dy = load(args.dy, at(args.dy, {s.batch, s.begin + t, d}));
        return dy * filter.derivative(filter.z(s, before, t));
      };
      // The gradient of the input at position t: of token t, or, below 0, of slot t + W of the initial state.
      const auto d_input = [&](int64_t t) {
        const int64_t slot = t - (s.length - W);
        double sum = slot >= 0 ? d_after[static_cast<size_t>(slot)] : 0;
        for (int64_t i = W - 1; i >= 0; --i) sum += filter.w[static_cast<size_t>(W - 1 - i)] * delta(t + i);
        return sum;
      };
      for (int64_t t = 0; t < s.length; ++t) {
        if (args.dx.present()) store(args.dx, at(args.dx, {s.batch, s.begin + t, d}), d_input(t));
        const double delta_t = delta(t);
        dbias += delta_t;
        for (int64_t i = 0; i < W; ++i) {
          dw[static_cast<size_t>(i)] += delta_t * filter.input(s, before, t - W + 1 + i);
        }
      }
      if (args.d_initial_state.present()) {
        Taps d_before{};
        for (int64_t c = 0; c < W; ++c) d_before[static_cast<size_t>(c)] = d_input(c - W);
        filter.store_state(args.d_initial_state, s.index, d_before);
      }
    }
    for (int64_t i = 0; i < W && args.dw.present(); ++i) {
      store(args.dw, at(args.dw, {d, i}), dw[static_cast<size_t>(i)]);
    }
    if (args.dbias.present()) store(args.dbias, at(args.dbias, {d}), dbias);
  });
}

}  // namespace fastweight::cpu::short_conv
