#pragma once

// Digests of test tensors.

#include "base/xxh3.h"
#include "engine/tensor_view.h"
#include "engine/value_digest.h"
#include "support/test_tensor.h"

namespace torch_ckpt {

inline Digest128 full_digest_of(const TestTensor& tensor, int threads = 1) {
  const TensorView view = view_of(tensor);
  const TensorView* const views[] = {&view};
  return full_digests(views, threads).front();
}

}  // namespace torch_ckpt
