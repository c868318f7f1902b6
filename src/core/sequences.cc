#include "core/sequences.h"
#include "core/check.h"

namespace fastweight {

std::vector<Sequence> sequence_table(int64_t batch, int64_t tokens, const TensorView& cu_seqlens, int32_t chunk_size) {
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
    first_chunk += length / chunk_size + (length % chunk_size != 0);
  }
  return table;
}

}  // namespace fastweight
