#pragma once

// Local disks and mounted file systems. Every save and load outside tests uses this file system.

#include <memory>
#include <string>
#include <vector>

#include "io/file_system.h"

namespace torch_ckpt {

// Stateless: safe to use from any thread, and in any number of instances.
class PosixFileSystem : public FileSystem {
 public:
  // kCreate also permits reading. If the file system refuses O_DIRECT, the file is buffered, and
  // its fallback_reason() has the cause.
  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode,
                                     Caching caching) override;
  Status create_directories(const std::string& path) override;
  Result<std::vector<std::string>> list_directory(const std::string& path) override;
  Status rename(const std::string& from, const std::string& to) override;
  Status link(const std::string& from, const std::string& to, bool sync) override;

  // False on FUSE: gateways to object stores rename a directory by copying its files.
  bool renames_directories(const std::string& parent) override;
  Status exchange(const std::string& one, const std::string& other) override;

  // Removes a file or an empty directory.
  Status remove(const std::string& path) override;
  Result<double> modified_s(const std::string& path) override;

  // Also OK on a file system that cannot sync directories.
  Status sync_directory(const std::string& path) override;

  // Uses io_uring if the kernel allows it, else threads. The queue's mode has the choice and the
  // reason. The environment variable TORCH_CKPT_IO=threads forces threads, for machines with
  // forbidden or broken io_uring. Each call reads the variable.
  std::unique_ptr<IoQueue> make_queue(int depth) override;
};

}  // namespace torch_ckpt
