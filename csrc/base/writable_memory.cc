#include "base/writable_memory.h"

#include <unistd.h>

#include <cerrno>

namespace torch_ckpt {
namespace {

// Calls read(2) or write(2) for one byte, again after an interruption.
template <typename Call, typename Memory>
bool moves_one_byte(Call call, int fd, Memory* memory) {
  ssize_t moved;
  do {
    moved = call(fd, memory, 1);
  } while (moved < 0 && errno == EINTR);
  return moved == 1;
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
