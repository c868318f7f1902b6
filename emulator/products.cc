#include "products.h"

#include <cuda_fp16.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace emulator {
namespace {

// Elements ----------------------------------------------------------------------------------------------------------

float decode_fp16(uint32_t bits) {
  static const std::vector<float> values = [] {
    std::vector<float> all(65536);
    for (uint32_t i = 0; i < all.size(); ++i) all[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(i)));
    return all;
  }();
  return values[bits];
}

// Of the lower 16 bits.
template <Element kElement>
double decode(uint32_t bits) {
  return kElement == Element::kBF16 ? std::bit_cast<float>(bits << 16) : decode_fp16(bits & 0xffff);
}

// The tensor cores add exact products and cut off what a float does not hold.
float cut(double sum) {
  const auto nearest = static_cast<float>(sum);
  const bool too_far = std::fabs(static_cast<double>(nearest)) > std::fabs(sum) && std::isfinite(nearest);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(nearest) - too_far);
}

// Of a warp ---------------------------------------------------------------------------------------------------------

// c += a b into the C fragments of all lanes.
template <int kInner>
void accumulate(void* const* lanes, const double (&a)[16][kInner], const double (&b)[kInner][8]) {
  double c[16][8];
  const auto for_each_element = [&](const auto& visit) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int g = lane / 4, t = lane % 4;
      float* own = static_cast<const Product*>(lanes[lane])->c;
      for (int i = 0; i < 4; ++i) visit(own[i], c[g + i / 2 * 8][2 * t + i % 2]);
    }
  };
  for_each_element([](float own, double& sum) { sum = own; });
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < kInner; ++k) {
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    }
  }
  for_each_element([](float& own, double sum) { own = cut(sum); });
}

}  // namespace

template <Element kElement>
void multiply(void* const* lanes) {
  double a[16][16], b[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto& p = *static_cast<const Product*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      const int shift = 16 * half;
      for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][2 * t + i / 2 * 8 + half] = decode<kElement>(p.a[i] >> shift);
      for (int i = 0; i < 2; ++i) b[2 * t + 8 * i + half][g] = decode<kElement>(p.b[i] >> shift);
    }
  }
  accumulate(lanes, a, b);
}
template void multiply<Element::kBF16>(void* const* lanes);
template void multiply<Element::kFP16>(void* const* lanes);

void multiply_tf32(void* const* lanes) {
  double a[16][8], b[8][8];
  const auto upper_bits = [](uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000u); };
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto& p = *static_cast<const Product*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = upper_bits(p.a[i]);
    for (int i = 0; i < 2; ++i) b[t + 4 * i][g] = upper_bits(p.b[i]);
  }
  accumulate(lanes, a, b);
}

// Of a warpgroup ----------------------------------------------------------------------------------------------------

namespace {

constexpr uint32_t kSegment = 8;  // elements that lie together

// The segment of elements [outer, outer + 8) of one inner index, if outer indices lie together, else of [inner, inner + 8)
// of one outer index, from the bits of a descriptor: its address in units of 16 bytes, with w = 8, 4, 2 or 1 of them in a
// row of the pattern:
//
//     inner index together     (outer % 8) w + outer / 8 SBO + inner / 8                                    (w > 1)
//                              (outer % 8)   + outer / 8 SBO + inner / 8 LBO                                (w = 1)
//     outer index together     outer / 8 % w + outer / 8w LBO + (inner % 8) w + inner / 8 SBO               (w > 1)
//                              outer / 8 SBO + inner % 8 + inner / 8 LBO                                    (w = 1)
uint32_t segment_address(const Descriptor& descriptor, uint32_t outer, uint32_t inner) {
  const auto field = [&](int first) { return static_cast<uint32_t>(descriptor.bits >> first & 0x3fff); };
  const uint32_t start = field(0), lbo = field(16), sbo = field(32);
  const auto mode = static_cast<uint32_t>(descriptor.bits >> 62);
  if ((descriptor.bits >> 49 & 7) != 0) fail("a descriptor of wgmma with a base offset");
  const uint32_t w = mode == 0 ? 1 : mode == 1 ? 8 : mode == 2 ? 4 : 2;
  uint32_t unit = start;
  if (!descriptor.outer_together) {
    unit += outer % 8 * w + outer / 8 * sbo + inner / 8 * (w == 1 ? lbo : 1);
  } else if (w > 1) {
    unit += outer / 8 % w + outer / (8 * w) * lbo + inner % 8 * w + inner / 8 * sbo;
  } else {
    unit += outer / 8 * sbo + inner % 8 + inner / 8 * lbo;
  }
  return (unit ^ (unit >> 3 & (w - 1))) * 16;
}

// visit(outer, inner, bits) for the elements of an operand, which one lane of each warp looks at again when it waits for
// the product.
template <class Visit>
void read_operand(void* const* lanes, const Descriptor& descriptor, uint32_t outer_size, const Visit& visit) {
  const auto content = std::make_shared<SharedOperand>();
  content->segments.reserve(outer_size * 2);
  const bool along = descriptor.outer_together;
  for (uint32_t outer = 0; outer < outer_size; outer += along ? kSegment : 1) {
    for (uint32_t inner = 0; inner < 16; inner += along ? 1 : kSegment) {
      SharedOperand::Segment& segment = content->segments.emplace_back();
      segment.at = shared_pointer(segment_address(descriptor, outer, inner), sizeof(segment.elements));
      std::memcpy(segment.elements, segment.at, sizeof(segment.elements));
      for (uint32_t i = 0; i < kSegment; ++i) {
        visit(along ? outer + i : outer, along ? inner : inner + i, segment.elements[i]);
      }
    }
  }
  for (int warp = 0; warp < kWarpgroup; warp += kLanes) {
    static_cast<const GroupProduct*>(lanes[warp])->work->watch_operand(content);
  }
}

template <Element kElement, int kColumns>
void multiply_group_of(void* const* lanes) {
  const auto part = [&](int lane) -> const GroupProduct& { return *static_cast<const GroupProduct*>(lanes[lane]); };
  double a[64][16], b[16][kColumns];
  read_operand(lanes, part(0).b, kColumns,
               [&](uint32_t n, uint32_t k, uint16_t bits) { b[k][n] = decode<kElement>(bits); });
  if (part(0).a == nullptr) {
    read_operand(lanes, part(0).a_shared, 64,
                 [&](uint32_t m, uint32_t k, uint16_t bits) { a[m][k] = decode<kElement>(bits); });
  } else {
    for (int lane = 0; lane < kWarpgroup; ++lane) {
      const int row = lane / kLanes * 16 + lane % kLanes / 4, t = lane % 4;
      const uint32_t* fragment = part(lane).a;
      for (int i = 0; i < 4; ++i) {
        for (int half = 0; half < 2; ++half) {
          a[row + i % 2 * 8][2 * t + i / 2 * 8 + half] = decode<kElement>(fragment[i] >> (16 * half));
        }
      }
      part(lane).work->watch_fragment(fragment);
    }
  }
  double c[64][kColumns];
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < kColumns; ++column) c[row][column] = 0;
  }
  const auto for_each_tile = [&](const auto& visit) {
    for (int lane = 0; lane < kWarpgroup; ++lane) {
      const int row = lane / kLanes * 16 + lane % kLanes / 4, t = lane % 4;
      for (int n = 0; n < kColumns / 8; ++n) visit(part(lane), part(lane).c[n], &c[row][8 * n + 2 * t]);
    }
  };
  constexpr int kBelow = 8 * kColumns;  // from an element of a tile to the one eight rows below
  if (part(0).accumulate) {
    for_each_tile([](const GroupProduct& p, float* registers, double* sums) {
      const float* before = p.work->tile(registers);
      for (int i = 0; i < 4; ++i) sums[i / 2 * kBelow + i % 2] = before[i];
    });
  }
  for (int row = 0; row < 64; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < kColumns; ++column) c[row][column] += a[row][k] * b[k][column];
    }
  }
  for_each_tile([](const GroupProduct& p, float* registers, const double* sums) {
    float after[4];
    for (int i = 0; i < 4; ++i) after[i] = cut(sums[i / 2 * kBelow + i % 2]);
    p.work->set_tile(registers, after);
  });
}

template <Element kElement>
void multiply_group_of(void* const* lanes, int columns) {
  switch (columns) {
    case 32:
      return multiply_group_of<kElement, 32>(lanes);
    case 64:
      return multiply_group_of<kElement, 64>(lanes);
    case 128:
      return multiply_group_of<kElement, 128>(lanes);
    default:
      fail("a product of a warpgroup of an impossible width");
  }
}

}  // namespace

void multiply_group(void* const* lanes) {
  const auto& first = *static_cast<const GroupProduct*>(lanes[0]);
  for (int lane = 0; lane < kWarpgroup; ++lane) {
    const auto& p = *static_cast<const GroupProduct*>(lanes[lane]);
    if (p.element != first.element || p.columns != first.columns || p.b != first.b || p.a_shared != first.a_shared ||
        p.accumulate != first.accumulate || (p.a == nullptr) != (first.a == nullptr)) {
      fail("threads of a warpgroup disagree about a product");
    }
    p.work->check_fenced();
  }
  if (first.element == Element::kBF16) {
    multiply_group_of<Element::kBF16>(lanes, first.columns);
  } else {
    multiply_group_of<Element::kFP16>(lanes, first.columns);
  }
}

}  // namespace emulator
