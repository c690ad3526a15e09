#pragma once

// A FileSystem over an object store.
//
// A path is the key of an object, after the name of its bucket. Folders are prefixes of keys: they
// need not be created, and an empty one does not exist. A created file is a stream: its bytes
// arrive in ascending order, and the file appears with kSync, which ends it.

#include <memory>
#include <string>
#include <vector>

#include "io/file_system.h"
#include "io/object_store.h"

namespace torch_ckpt {

class StoreFileSystem : public FileSystem {
 public:
  explicit StoreFileSystem(std::unique_ptr<ObjectStore> store) : store_(std::move(store)) {}

  const Traits& traits() const override;

  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode,
                                     Caching caching) override;
  Result<std::unique_ptr<File>> open_known(const std::string& path, int64_t nbytes,
                                           Caching caching) override;
  Status create_directories(const std::string& path) override;
  Result<std::vector<std::string>> list_directory(const std::string& path) override;
  // Copies the object, then removes the old one: between the two, both exist.
  Status rename(const std::string& from, const std::string& to) override;
  Status link(const std::string& from, const std::string& to, bool sync) override;
  Status remove(const std::string& path) override;
  Status remove_all(const std::string& path) override;
  Result<double> modified_s(const std::string& path) override;
  Status sync_directory(const std::string& path) override;
  std::unique_ptr<IoQueue> make_queue(int depth) override;

  Status put(const std::string& path, Bytes bytes, OpenMode mode) override;
  Result<std::string> version(const std::string& path) override;
  Status publish(const std::string& path, Bytes bytes, const std::string& version) override;

 private:
  bool is_folder(const std::string& path);
  Status put_if(const std::string& path, Bytes bytes, const Condition& condition);
  Result<bool> has_bytes(const std::string& path, Bytes bytes);

  const std::unique_ptr<ObjectStore> store_;
};

}  // namespace torch_ckpt
