#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "core/sequences.h"
#include "fastweight/delta_rule.h"

namespace fastweight {
namespace {

void expect_sequence(const Sequence& sequence, int64_t index, int64_t batch, int64_t begin, int64_t length,
                     int64_t first_chunk) {
  SCOPED_TRACE(index);
  EXPECT_EQ(sequence.index, index);
  EXPECT_EQ(sequence.batch, batch);
  EXPECT_EQ(sequence.begin, begin);
  EXPECT_EQ(sequence.length, length);
  EXPECT_EQ(sequence.first_chunk, first_chunk);
}

TEST(SequenceTable, DenseBatch) {
  const auto table = sequence_table(3, 70, {}, 64);
  ASSERT_EQ(table.size(), 3u);
  for (int64_t n = 0; n < 3; ++n) expect_sequence(table[static_cast<size_t>(n)], n, n, 0, 70, 0);
  EXPECT_EQ(delta_rule_num_chunks(70, {}, 64), 2);
}

TEST(SequenceTable, EmptyBatch) {
  EXPECT_TRUE(sequence_table(0, 70, {}, 64).empty());
  EXPECT_EQ(delta_rule_num_chunks(0, {}, 16), 0);
}

template <class Integer>
void check_packed(DType dtype) {
  const std::vector<Integer> offsets = {0, 16, 16, 33, 34, 34};
  const TensorView cu_seqlens = TensorView::dense(offsets.data(), dtype, {6});
  const auto table = sequence_table(1, 34, cu_seqlens, 16);
  ASSERT_EQ(table.size(), 5u);
  expect_sequence(table[0], 0, 0, 0, 16, 0);
  expect_sequence(table[1], 1, 0, 16, 0, 1);
  expect_sequence(table[2], 2, 0, 16, 17, 1);
  expect_sequence(table[3], 3, 0, 33, 1, 3);
  expect_sequence(table[4], 4, 0, 34, 0, 4);
  EXPECT_EQ(delta_rule_num_chunks(34, cu_seqlens, 16), 4);
  EXPECT_EQ(count_chunks(34, cu_seqlens, 16), 4);
}

TEST(SequenceTable, PackedInt32) { check_packed<int32_t>(DType::kI32); }
TEST(SequenceTable, PackedInt64) { check_packed<int64_t>(DType::kI64); }

TEST(SequenceTable, StridedOffsets) {
  const std::vector<int32_t> offsets = {0, -1, 5, -1, 9, -1};
  TensorView cu_seqlens = TensorView::dense(offsets.data(), DType::kI32, {3});
  cu_seqlens.strides[0] = 2;
  const auto table = sequence_table(1, 9, cu_seqlens, 64);
  ASSERT_EQ(table.size(), 2u);
  expect_sequence(table[0], 0, 0, 0, 5, 0);
  expect_sequence(table[1], 1, 0, 5, 4, 1);
}

// Lengths in device memory are not read: every sequence may end in a chunk of its own, but none is without tokens.
TEST(SequenceTable, ChunksOfLengthsOnADevice) {
  TensorView cu_seqlens = TensorView::dense(static_cast<const int32_t*>(nullptr), DType::kI32, {6});
  cu_seqlens.device = {DeviceType::kCuda, 0};
  EXPECT_EQ(count_chunks(34, cu_seqlens, 16), 7);
  EXPECT_EQ(count_chunks(3, cu_seqlens, 16), 3);
}

}  // namespace
}  // namespace fastweight
