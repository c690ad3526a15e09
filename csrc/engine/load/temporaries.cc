#include "engine/load/temporaries.h"

#include <cerrno>
#include <new>
#include <utility>

namespace torch_ckpt {

void Temporaries::expect(int64_t request, int64_t nbytes) {
  Expected& expected = expected_[request];
  expected.nbytes = nbytes;
  ++expected.pieces;
}

Result<std::byte*> Temporaries::memory(int64_t request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Expected& expected = expected_[request];
  if (expected.data == nullptr) {
    expected.data.reset(new (std::nothrow) std::byte[static_cast<size_t>(expected.nbytes)]);
    if (expected.data == nullptr) {
      return errno_status(ENOMEM, str_cat("cannot allocate ", expected.nbytes, " bytes"));
    }
  }
  return expected.data.get();
}

Status Temporaries::arrived(int64_t request) {
  LoadedBytes bytes;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = expected_.find(request);
    if (--found->second.pieces > 0) return ok_status();
    bytes = {std::move(found->second.data), found->second.nbytes};
    expected_.erase(found);
  }
  if (!hand_over_) {
    return internal_error("cannot load request ", request, ": it has no memory and no receiver");
  }
  const std::lock_guard<std::mutex> lock(handing_over_);
  return hand_over_(request, std::move(bytes));
}

}  // namespace torch_ckpt
