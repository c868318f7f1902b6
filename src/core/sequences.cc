#include "core/sequences.h"

#include <algorithm>

#include "core/check.h"

namespace fastweight {
namespace {

int64_t chunks_of(int64_t length, int64_t chunk_size) { return length / chunk_size + (length % chunk_size != 0); }

}  // namespace

std::vector<Sequence> sequence_table(int64_t batch, int64_t tokens, const TensorView& cu_seqlens, int64_t chunk_size) {
  std::vector<Sequence> table;
  if (!cu_seqlens.present()) {
    table.reserve(static_cast<size_t>(batch));
    for (int64_t n = 0; n < batch; ++n) table.push_back({n, n, 0, tokens, 0});
    return table;
  }
  const int64_t count = cu_seqlens.shape[0] - 1;
  table.reserve(static_cast<size_t>(count));
  int64_t first_chunk = 0;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t begin = check::integer_at(cu_seqlens, n);
    const int64_t length = check::integer_at(cu_seqlens, n + 1) - begin;
    table.push_back({n, 0, begin, length, first_chunk});
    first_chunk += chunks_of(length, chunk_size);
  }
  return table;
}

int64_t count_chunks(int64_t tokens, const TensorView& cu_seqlens, int64_t chunk_size) {
  if (!cu_seqlens.present()) return chunks_of(tokens, chunk_size);
  const int64_t last = cu_seqlens.shape[0] - 1;
  if (cu_seqlens.device.type != DeviceType::kCpu) return std::min(tokens, tokens / chunk_size + last);
  int64_t count = 0;
  for (int64_t n = 0; n < last; ++n) {
    count += chunks_of(check::integer_at(cu_seqlens, n + 1) - check::integer_at(cu_seqlens, n), chunk_size);
  }
  return count;
}

}  // namespace fastweight
