// Malformed calls, for every family alike: the error's code, its text, and that nothing was written.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "fastweight/info.h"
#include "tests/testing.h"

namespace fastweight::test {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline const std::vector<Mode> kAllModes{kModes.begin(), kModes.end()};
inline const std::vector<Mode> kWithOutput{Mode::kForward, Mode::kStep};
inline const std::vector<Mode> kWithInitialState{Mode::kForward, Mode::kBackward};
inline const std::vector<Mode> kOnlyForward{Mode::kForward}, kOnlyBackward{Mode::kBackward}, kOnlyStep{Mode::kStep};

// A valid call of one mode with all its tensors, to be spoiled in one place. A step has 5 slots and their indices.
template <class Case>
class Subject {
 public:
  static constexpr int64_t kSlots = 5;
  using Spec = decltype(Case::spec);

  Subject(Mode mode_, const Spec& spec) : mode(mode_), problem(draw(spec, 3)), outputs(outputs_of(mode, problem)) {
    for (const auto& field : outputs.fields()) {
      Tensor& x = outputs.*field.tensor;
      if (!x.present()) continue;
      if (mode == Mode::kStep && field.part == Part::kEnd) {
        std::vector<int64_t> shape = x.shape();
        shape[0] = kSlots;
        x = Tensor(x.dtype(), shape);
      }
      x.fill(support::is_floating(x.dtype()) ? kPoison : 3);  // a count of tokens in an open mini-batch
    }
    rebuild();
    if (mode == Mode::kStep) {
      const bool packed = !spec.cu_seqlens.empty();
      indices_ = integers(packed ? std::vector<double>{3, -1, 0} : std::vector<double>{3, 0});
    }
    if (mode == Mode::kBackward && call->has("chunk_states")) {
      saved_ = input(outputs_of(Mode::kForward, problem).at("chunk_states"));
    }
    rebuild();
  }

  // After a change of the options.
  void rebuild() {
    call.emplace(call_of(mode, problem, outputs));
    if (indices_.present()) (*this)["state_indices"] = indices_;
    if (saved_.present()) (*this)["chunk_states"] = saved_;
  }

  TensorView& operator[](const std::string& name) const { return (*call)[name]; }
  TensorView input(const Tensor& x) { return inputs_.emplace_back(x).view(); }
  TensorView input(DType dtype, const std::vector<int64_t>& shape) {
    inputs_.emplace_back(dtype, shape).fill(0.25);
    return inputs_.back().view();
  }
  TensorView output(DType dtype, const std::vector<int64_t>& shape) {
    outputs_.emplace_back(dtype, shape).fill(kPoison);
    return outputs_.back().view();
  }
  TensorView integers(const std::vector<double>& values, DType dtype = DType::kI32) {
    return input(Tensor(dtype, {static_cast<int64_t>(values.size())}, values));
  }

  std::string run() const { return call->enqueue(context); }

  std::vector<std::vector<double>> written() const {
    std::vector<std::vector<double>> values;
    for (const auto& [name, tensor] : outputs.named()) values.push_back(tensor->values());
    for (const Tensor& tensor : outputs_) values.push_back(tensor.values());
    return values;
  }

  Mode mode;
  Case problem;
  decltype(outputs_of(Mode::kForward, std::declval<Case>())) outputs;
  Context context;
  std::optional<support::Call> call;

 private:
  static constexpr double kPoison = 77;
  std::deque<Tensor> inputs_, outputs_;
  TensorView indices_, saved_;
};

// The call fails with this code and nothing was written. Returns the message.
template <class Case>
std::string expect_refused(const Subject<Case>& subject, ErrorCode code = ErrorCode::kInvalidArgument) {
  const auto before = subject.written();
  std::string message;
  try {
    subject.run();
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    message = error.what();
    EXPECT_EQ(error.code(), code) << message;
  }
  EXPECT_TRUE(subject.written() == before) << message;
  return message;
}

// A row of a family's table.
template <class Case>
struct Malformed {
  using Spec = decltype(Case::spec);
  std::string name;
  std::string expected;  // the argument that the message begins with, or how it begins
  std::function<void(Subject<Case>&)> spoil;
  std::vector<Mode> modes = kAllModes;
  std::function<bool(const Spec&)> where;  // empty: everywhere
};

template <class Case>
void expect_invalid(const std::vector<decltype(Case::spec)>& specs, const std::vector<Malformed<Case>>& rows) {
  for (const Malformed<Case>& row : rows) {
    size_t tried = 0;
    for (const auto& spec : specs) {
      for (Mode mode : row.modes) {
        if ((row.where && !row.where(spec)) || implementations(spec, mode).empty()) continue;
        SCOPED_TRACE(row.name + ", " + name_of(mode) + " of " + describe(spec));
        ++tried;
        Subject<Case> subject(mode, spec);
        row.spoil(subject);
        const std::string message = expect_refused(subject);
        const bool whole = row.expected.find(':') != std::string::npos;
        EXPECT_EQ(message.rfind(whole ? row.expected : row.expected + ":", 0), 0u) << message;
        EXPECT_NE(message.find(": expected "), std::string::npos) << message;
        EXPECT_NE(message.find("got "), std::string::npos) << message;
      }
    }
    EXPECT_GT(tried, 0u) << row.name << " was never tried";
  }
}

// What rows are made of ---------------------------------------------------------------------------------------------

using Shape = std::vector<int64_t>;

inline auto absent(const std::string& name) {
  return [=](auto& c) { c[name] = {}; };
}
inline auto as_input(const std::string& name, DType dtype, const Shape& shape) {
  return [=](auto& c) { c[name] = c.input(dtype, shape); };
}
inline auto as_output(const std::string& name, DType dtype, const Shape& shape) {
  return [=](auto& c) { c[name] = c.output(dtype, shape); };
}
inline auto as_integers(const std::string& name, const std::vector<double>& values, DType dtype = DType::kI32) {
  return [=](auto& c) { c[name] = c.integers(values, dtype); };
}
inline auto over(const std::string& name, const std::string& other) {
  return [=](auto& c) { c[name] = c[other]; };
}
inline auto in_memory_of(const std::string& name, const std::string& other) {
  return [=](auto& c) { c[name].data = c[other].data; };
}
inline auto typed(const std::string& name, DType dtype) {
  return [=](auto& c) { c[name].dtype = dtype; };
}
inline auto strided(const std::string& name, size_t axis, int64_t stride) {
  return [=](auto& c) { c[name].strides[axis] = stride; };
}
inline auto extent(const std::string& name, size_t axis, int64_t size) {
  return [=](auto& c) { c[name].shape[axis] = size; };
}
// change(spec)
template <class Change>
auto with_spec(const Change& change) {
  return [=](auto& c) {
    change(c.problem.spec);
    c.rebuild();
  };
}
inline void shift(TensorView& view, int64_t bytes) { view.data = static_cast<std::byte*>(view.data) + bytes; }

// What every family checks ------------------------------------------------------------------------------------------

struct ViewSpoil {
  const char* name;
  std::function<void(TensorView&)> spoil;
  bool outputs_only = false;
};

// Each makes any view of any argument wrong.
inline const std::vector<ViewSpoil>& view_spoils() {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 2;
  // One with more than one entry, and not the one along which there may be any number of slots.
  const auto axis = [](const TensorView& x) {
    size_t i = x.rank > 1 ? 1 : 0;
    while (i + 1 < static_cast<size_t>(x.rank) && x.shape[i] == 1) ++i;
    return i;
  };
  static const std::vector<ViewSpoil> all = {
      {"no memory", [](TensorView& x) { x.data = nullptr; }},
      {"rank 0", [](TensorView& x) { x.rank = 0; }},
      {"another rank", [](TensorView& x) { x.rank = x.rank == 1 ? 2 : 1; }},
      {"a negative rank", [](TensorView& x) { x.rank = -1; }},
      {"rank 6", [](TensorView& x) { x.rank = kMaxRank + 1; }},
      {"a longer axis", [=](TensorView& x) { ++x.shape[axis(x)]; }},
      {"a negative first extent", [](TensorView& x) { x.shape[0] = -3; }},
      {"a negative extent", [=](TensorView& x) { x.shape[axis(x)] = -1; }},
      {"a huge extent", [](TensorView& x) { x.shape[0] = kHuge; }},
      {"extents that overflow", [](TensorView& x) { x.shape[0] = x.shape[1] = kHuge; }},
      {"a negative stride", [](TensorView& x) { x.strides[0] = -1; }},
      {"a huge stride", [=](TensorView& x) { x.strides[axis(x)] = kHuge; }},
      {"an end past the address space", [](TensorView& x) { x.data = reinterpret_cast<void*>(~uintptr_t{7}); }},
      {"an unknown type", [](TensorView& x) { x.dtype = static_cast<DType>(17); }},
      {"a negative type", [](TensorView& x) { x.dtype = static_cast<DType>(-1); }},
      {"bytes for numbers", [](TensorView& x) { x.dtype = support::is_floating(x.dtype) ? DType::kI32 : DType::kF32; }},
      {"an odd address", [](TensorView& x) { shift(x, 1); }},
      {"another device",
       [](TensorView& x) {
         x.device = {DeviceType::kCuda, 0};
       }},
      {"an unknown device", [](TensorView& x) { x.device.type = static_cast<DeviceType>(9); }},
      {"elements that share memory", [](TensorView& x) { x.strides = {}; }, true},
  };
  return all;
}

// Every tensor of every mode with every spoil. The message names the tensor, unless others take their sizes from it.
template <class Case>
void expect_every_view_is_checked(const std::vector<decltype(Case::spec)>& specs,
                                  const std::vector<std::string>& gives_sizes) {
  for (const auto& spec : specs) {
    for (Mode mode : kModes) {
      if (implementations(spec, mode).empty()) continue;
      const size_t count = Subject<Case>(mode, spec).call->views().size();
      for (const ViewSpoil& spoil : view_spoils()) {
        for (size_t i = 0; i < count; ++i) {
          Subject<Case> subject(mode, spec);
          const support::NamedView& named = subject.call->views()[i];
          if (!named.view->present() || (spoil.outputs_only && !named.written)) continue;
          SCOPED_TRACE(std::string(named.name) + " with " + spoil.name + ", " + name_of(mode) + " of " +
                       describe(spec));
          spoil.spoil(*named.view);
          const std::string message = expect_refused(subject);
          EXPECT_NE(message.find(": expected "), std::string::npos) << message;
          EXPECT_NE(message.find("got "), std::string::npos) << message;
          if (std::count(gives_sizes.begin(), gives_sizes.end(), named.name) > 0) continue;
          EXPECT_EQ(message.rfind(std::string(named.name) + ":", 0), 0u) << message;
        }
      }
    }
  }
}

// For a packed problem of 10 tokens in sequences of 4, 0 and 6.
template <class Case>
std::vector<Malformed<Case>> malformed_sequences() {
  const std::string name = "cu_seqlens";
  return {
      {"first not 0", name, as_integers(name, {1, 4, 4, 10})},
      {"first negative", name, as_integers(name, {-1, 4, 4, 10})},
      {"decreasing", name, as_integers(name, {0, 4, 3, 10})},
      {"beyond the tokens inside", name, as_integers(name, {0, 11, 4, 10})},
      {"last too small", name, as_integers(name, {0, 4, 4, 9})},
      {"last too large", name, as_integers(name, {0, 4, 4, 11})},
      {"no element", name, extent(name, 0, 0)},
      {"floating", name, typed(name, DType::kF64)},
      {"rank 2", name, as_input(name, DType::kI64, {1, 4})},
      {"broadcast", name, strided(name, 0, 0)},
  };
}

// `first` is the tensor that a context on another device is compared with.
template <class Case>
std::vector<Malformed<Case>> malformed_contexts(const std::string& first) {
  return {
      {"threads negative", "num_threads", [](auto& c) { c.context.num_threads = -1; }},
      {"device unknown", "device", [](auto& c) { c.context.device.type = static_cast<DeviceType>(5); }},
      {"device index negative", "device", [](auto& c) { c.context.device.index = -1; }},
      {"second cpu", "device", [](auto& c) { c.context.device.index = 1; }},
      {"allocate without release", "workspace",
       [](auto& c) { c.context.workspace.allocate = [](void*, size_t) -> void* { return nullptr; }; }},
      {"release without allocate", "workspace",
       [](auto& c) { c.context.workspace.release = [](void*, void*, size_t) {}; }},
      {"implementation unknown", "implementation", [](auto& c) { c.context.implementation = "nonsense"; }},
      {"context on another device", first,
       [](auto& c) {
         c.context.device = Device{DeviceType::kCuda, 0};
       }},
  };
}

template <class Case>
std::vector<Malformed<Case>> malformed_slots() {
  const std::string name = "state_indices";
  return {
      {"state of another count without indices", "state", absent(name), kOnlyStep},
      {"state indices of another count", name, as_integers(name, {0, 1, 2, 3}), kOnlyStep},
      {"state index below -1", name, as_integers(name, {0, -2}, DType::kI64), kOnlyStep},
      {"state index beyond the slots", name, as_integers(name, {0, 5}, DType::kI64), kOnlyStep},
      {"state index twice", name, as_integers(name, {2, 2}), kOnlyStep},
      {"state indices floating", name, as_input(name, DType::kF32, {2}), kOnlyStep},
      {"state indices broadcast", name, strided(name, 0, 0), kOnlyStep},
      {"state indices of rank 2", name, as_input(name, DType::kI32, {2, 1}), kOnlyStep},
  };
}

template <class Case>
void expect_out_of_memory(const decltype(Case::spec)& spec) {
  for (Mode mode : kModes) {
    if (implementations(spec, mode).empty()) continue;
    Subject<Case> subject(mode, spec);
    subject.context.workspace.allocate = [](void*, size_t) -> void* { return nullptr; };
    subject.context.workspace.release = [](void*, void*, size_t) {};
    expect_refused(subject, ErrorCode::kOutOfMemory);
  }
}

// A call with host memory that claims to be the device's.
template <class Case>
void expect_no_cuda_memory(const decltype(Case::spec)& spec) {
  Subject<Case> subject(Mode::kForward, spec);
  const Device device{DeviceType::kCuda, 0};
  subject.context.device = device;
  for (const support::NamedView& named : subject.call->views()) {
    if (named.view->present()) named.view->device = device;
  }
  // With CUDA: there is no device, or the pointers are not its own.
  const ErrorCode code = built_with_cuda() ? ErrorCode::kInvalidArgument : ErrorCode::kUnsupported;
  const std::string message = expect_refused(subject, code);
  EXPECT_NE(message.find(built_with_cuda() ? "cuda:0" : "without CUDA"), std::string::npos) << message;
}

// The unusual calls that are valid: change(subject), in every mode.
template <class Case, class Change>
void expect_valid(const std::string& name, const std::vector<decltype(Case::spec)>& specs, const Change& change,
                  const std::vector<Mode>& modes = kAllModes) {
  for (const auto& spec : specs) {
    for (Mode mode : modes) {
      SCOPED_TRACE(name + ", " + name_of(mode) + " of " + describe(spec));
      Subject<Case> subject(mode, spec);
      change(subject);
      EXPECT_NO_THROW(EXPECT_NE(subject.run(), ""));
    }
  }
}

// The line that a verbose call writes.
template <class Case>
std::string verbose_line(const decltype(Case::spec)& spec) {
  std::string line;
  Subject<Case> subject(Mode::kForward, spec);
  subject.context.verbose = true;
  subject.context.log = [](void* user, const char* text) { *static_cast<std::string*>(user) += text; };
  subject.context.log_user = &line;
  subject.run();
  return line;
}

}  // namespace fastweight::test
