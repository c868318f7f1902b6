// A C struct that has grown since it was first released.
#include "capi/convert.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "fastweight/error.h"

namespace fastweight {

struct GrownOptions {
  int32_t width = 3;
  double scale = 0.5;
};

namespace test {

struct FirstRelease {
  size_t struct_size;
  int32_t width;
};

struct Grown {
  size_t struct_size;
  int32_t width;
  double scale;
};

}  // namespace test

template <class S>
inline constexpr auto kOptions<GrownOptions, S> = std::make_tuple(option("width", &S::width),
                                                                  option("scale", &S::scale));

template <>
inline constexpr size_t capi::kFirstSize<test::Grown> = offsetof(test::Grown, scale);

namespace test {
namespace {

Grown read(const void* pointer) { return capi::required<GrownOptions>("options", static_cast<const Grown*>(pointer)); }

TEST(CapiConvert, FieldsThatAnOlderProgramDoesNotHaveGetTheirDefaults) {
  // Exactly the older struct's memory: the address sanitizer sees a read beyond it.
  const auto old = std::make_unique<FirstRelease>(FirstRelease{offsetof(Grown, scale), 7});
  const Grown grown = read(old.get());
  EXPECT_EQ(grown.width, 7);
  EXPECT_EQ(grown.scale, 0.5);

  const Grown whole = read(std::make_unique<Grown>(Grown{sizeof(Grown), 7, 2.0}).get());
  EXPECT_EQ(whole.scale, 2.0);
}

TEST(CapiConvert, OtherSizesAreRefused) {
  for (const size_t size : {size_t{0}, sizeof(size_t), offsetof(Grown, scale) - 1, sizeof(Grown) + 1}) {
    const Grown grown{size, 7, 2.0};
    try {
      read(&grown);
      FAIL() << size;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      const std::string expected = "options: expected struct_size " + std::to_string(offsetof(Grown, scale)) + " to " +
                                   std::to_string(sizeof(Grown)) + ", got " + std::to_string(size);
      EXPECT_EQ(error.what(), expected);
    }
  }
}

}  // namespace
}  // namespace test
}  // namespace fastweight
