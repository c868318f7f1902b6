// The device's view of sequences and chunks, on the host: the same functions that kernels call.
#include "cuda/common/sequences.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "core/sequences.h"
#include "tests/testing.h"

namespace fastweight::cuda {
namespace {

constexpr int64_t kChunkSizes[] = {16, 32, 64};

TensorView offsets_view(const std::vector<int32_t>& offsets) {
  return TensorView::dense(offsets.data(), DType::kI32, {static_cast<int64_t>(offsets.size())});
}

std::vector<int64_t> first_chunks(const Sequences& sequences, int64_t chunk_size) {
  std::vector<int64_t> first{0};
  for (int64_t n = 0; n < sequences.count; ++n) {
    first.push_back(first.back() + chunks_of(sequence_at(sequences, n).length, chunk_size));
  }
  return first;
}

// Every chunk of the table of the host, in order.
void expect_chunks(const Sequences& sequences, const std::vector<Sequence>& table, int64_t chunk_size) {
  const std::vector<int64_t> first = first_chunks(sequences, chunk_size);
  ChunkedSequences chunked{sequences, sequences.offsets == nullptr ? nullptr : first.data(), chunk_size};
  int64_t chunk = 0;
  for (const Sequence& s : table) {
    EXPECT_EQ(first_chunk_of(chunked, s.index), s.first_chunk);
    for (int64_t begin = 0; begin < s.length; begin += chunk_size, ++chunk) {
      const ChunkSpan span = chunk_at(chunked, chunk);
      EXPECT_EQ(span.sequence, s.index);
      EXPECT_EQ(span.batch, s.batch);
      EXPECT_EQ(span.begin, s.begin + begin);
      EXPECT_EQ(span.length, std::min(chunk_size, s.length - begin));
      EXPECT_EQ(span.position, begin / chunk_size);
    }
  }
  EXPECT_LE(chunk, max_chunks(sequences, chunk_size));
  for (int64_t past = chunk; past < max_chunks(sequences, chunk_size) + 2; ++past) {
    EXPECT_EQ(chunk_at(chunked, past).sequence, -1);
  }
}

TEST(CudaSequences, FixedLength) {
  for (int64_t chunk_size : kChunkSizes) {
    for (int64_t tokens : {0, 1, 63, 64, 65, 200}) {
      for (int64_t batch : {0, 1, 3}) {
        expect_chunks(device_sequences({}, batch, tokens),
                      sequence_table(batch, tokens, {}, static_cast<int32_t>(chunk_size)), chunk_size);
      }
    }
  }
}

TEST(CudaSequences, VariableLengths) {
  test::Dice dice(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<int32_t> offsets{0};
    const int64_t count = dice.between(1, 12);
    for (int64_t n = 0; n < count; ++n) {
      const int64_t length = dice.chance(30) ? 0 : dice.chance(50) ? dice.between(1, 3) : dice.between(1, 200);
      offsets.push_back(offsets.back() + static_cast<int32_t>(length));
    }
    const TensorView view = offsets_view(offsets);
    for (int64_t chunk_size : kChunkSizes) {
      expect_chunks(device_sequences(view, count, offsets.back()),
                    sequence_table(1, offsets.back(), view, static_cast<int32_t>(chunk_size)), chunk_size);
    }
  }
}

TEST(CudaSequences, StridedOffsets) {
  const std::vector<int64_t> memory{0, -7, 5, -7, 69};
  TensorView view = TensorView::dense(memory.data(), DType::kI64, {3});
  view.strides[0] = 2;
  const Sequences sequences = device_sequences(view, 2, 69);
  EXPECT_EQ(sequence_at(sequences, 0).length, 5);
  EXPECT_EQ(sequence_at(sequences, 1).begin, 5);
  EXPECT_EQ(sequence_at(sequences, 1).length, 64);
}

// Whatever the offsets hold, no token outside of the tensor is named, and no chunk is empty.
TEST(CudaSequences, MalformedOffsetsStayInside) {
  constexpr int64_t kTokens = 100;
  test::Dice dice(2);
  for (int round = 0; round < 500; ++round) {
    std::vector<int32_t> offsets;
    for (int64_t n = dice.between(2, 8); n > 0; --n) {
      offsets.push_back(static_cast<int32_t>(dice.chance(20) ? dice.pick<int64_t>({INT32_MIN, INT32_MAX, -1})
                                                             : dice.between(-50, 200)));
    }
    const int64_t count = static_cast<int64_t>(offsets.size()) - 1;
    const Sequences sequences = device_sequences(offsets_view(offsets), count, kTokens);
    for (int64_t n = 0; n < count; ++n) {
      const SequenceSpan span = sequence_at(sequences, n);
      EXPECT_TRUE(span.begin >= 0 && span.length >= 0 && span.begin + span.length <= kTokens);
    }
    for (int64_t chunk_size : kChunkSizes) {
      const std::vector<int64_t> first = first_chunks(sequences, chunk_size);
      const ChunkedSequences chunked{sequences, first.data(), chunk_size};
      for (int64_t chunk = 0; chunk < max_chunks(sequences, chunk_size); ++chunk) {
        const ChunkSpan span = chunk_at(chunked, chunk);
        if (span.sequence < 0) continue;
        EXPECT_TRUE(span.begin >= 0 && span.length > 0 && span.begin + span.length <= kTokens);
      }
    }
  }
}

}  // namespace
}  // namespace fastweight::cuda
