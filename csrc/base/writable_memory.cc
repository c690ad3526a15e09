#include "base/writable_memory.h"

#include <unistd.h>

#include "base/retry.h"

namespace torch_ckpt {
namespace {

// Calls read(2) or write(2) for one byte, again after an interruption.
template <typename Call, typename Memory>
bool moves_one_byte(Call call, int fd, Memory* memory) {
  return retry_interrupted([&] { return call(fd, memory, 1); }) == 1;
}

}  // namespace

bool is_writable(const void* address) {
  int ends[2];
  if (::pipe(ends) != 0) return true;
  // The kernel copies the byte out and in again. Where it may not, it returns EFAULT.
  const bool ok = moves_one_byte(::write, ends[1], address) &&
                  moves_one_byte(::read, ends[0], const_cast<void*>(address));
  ::close(ends[0]);
  ::close(ends[1]);
  return ok;
}

}  // namespace torch_ckpt
