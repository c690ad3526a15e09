#pragma once

// A file of the operating system. `PosixFileSystem` opens it; the queues in this directory use its
// descriptors.
//
// A kDirect file has two descriptors: an O_DIRECT one for large aligned transfers, and a buffered
// one for everything else (buffered requests, the unaligned rest of a short transfer, sync,
// preallocate, truncate).

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "io/file_system.h"

namespace torch_ckpt {

// A file descriptor, closed by the destructor; -1 means none.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Immutable after opening, so safe to use from any thread.
class PosixFile : public File {
 public:
  // The alignment of direct transfers. No common disk has larger sectors, and the file formats here
  // align to the same size.
  static constexpr int64_t kDirectAlignment = 4096;

  static Result<std::unique_ptr<PosixFile>> open(const std::string& path, OpenMode mode,
                                                 Caching caching);

  const std::string& path() const override { return path_; }
  Result<int64_t> size() const override;
  int64_t alignment() const override { return direct_.valid() ? kDirectAlignment : 1; }
  const std::string& fallback_reason() const override { return fallback_reason_; }
  bool is_resident(int64_t offset, int64_t nbytes) const override;
  Status read(int64_t offset, MutableBytes memory) override;
  Status write(int64_t offset, Bytes bytes) override;
  Status preallocate(int64_t nbytes) override;
  Status truncate(int64_t nbytes) override;

  int buffered_fd() const { return buffered_.get(); }
  int direct_fd() const { return direct_.get(); }  // -1 when alignment() is 1.

 private:
  explicit PosixFile(std::string path) : path_(std::move(path)) {}

  // Opens both descriptors. ESTALE if they refer to different files.
  Status open_descriptors(OpenMode mode, Caching caching);
  Status open_direct(OpenMode mode);
  Status transfer(IoRequest::Kind kind, int64_t offset, MutableBytes memory);

  const std::string path_;
  Descriptor buffered_;
  Descriptor direct_;
  std::string fallback_reason_;
};

}  // namespace torch_ckpt
