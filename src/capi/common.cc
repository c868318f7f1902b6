// The parts of the C interface that belong to no operator.
#include <string>

#include "capi/convert.h"
#include "fastweight/info.h"

extern "C" {

const char* fw_version(void) {
  static const std::string& text = *new std::string(fastweight::version());
  return text.c_str();
}

fw_tensor fw_tensor_dense(const void* data, int32_t dtype, int32_t rank, const int64_t* shape) {
  fw_tensor tensor = {};
  tensor.data = const_cast<void*>(data);
  tensor.dtype = dtype;
  tensor.rank = rank;
  if (shape == nullptr || rank > FW_MAX_RANK) return tensor;
  uint64_t stride = 1;  // unsigned: a shape that is too large wraps here and is rejected by the call that sees it
  for (int32_t axis = rank - 1; axis >= 0; --axis) {
    tensor.shape[axis] = shape[axis];
    tensor.strides[axis] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(shape[axis]);
  }
  return tensor;
}

void fw_context_init(fw_context* context) { fastweight::capi::init<fastweight::Context>(context); }

}  // extern "C"
