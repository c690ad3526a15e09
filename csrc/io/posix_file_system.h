#pragma once

// The disks of this machine, and whatever the operating system mounts like one. The file system
// that every save and load uses outside tests.

#include <memory>
#include <string>
#include <vector>

#include "io/file_system.h"

namespace torch_ckpt {

// Holds no state: any thread may use it, and any number may exist.
class PosixFileSystem : public FileSystem {
 public:
  // kCreate opens for reading too. A direct file whose file system refuses O_DIRECT is buffered
  // instead, and its fallback_reason() says so.
  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode,
                                     Caching caching) override;
  Status create_directories(const std::string& path) override;
  Result<std::vector<std::string>> list_directory(const std::string& path) override;
  Status rename(const std::string& from, const std::string& to) override;

  // A file, or an empty folder.
  Status remove(const std::string& path) override;

  // OK, too, on a file system that cannot sync a folder: there is nothing more to ask of it.
  Status sync_directory(const std::string& path) override;

  // io_uring where the kernel allows it, else threads; the mode of the queue says which, and why.
  // The environment variable TORCH_CKPT_IO=threads forces threads, for a machine whose io_uring is
  // forbidden or broken. It is read at every call.
  std::unique_ptr<IoQueue> make_queue(int depth, MutableBytes registered = {}) override;
};

}  // namespace torch_ckpt
