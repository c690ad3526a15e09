#pragma once

// The byte ranges that one rank wants to read. Each rank sends them to the rank that distributes
// the reads (plan/exchange.h).

#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "geometry/overlap.h"

namespace torch_ckpt {

class WantedBytes {
 public:
  struct File {
    std::string name;
    std::vector<ByteRange> ranges;
  };

  // Adds a range of a file. Requires: 0 <= begin < end.
  void add(std::string_view file, const ByteRange& range);

  // Whether the rank has all of the bytes in its page cache.
  bool is_cached() const { return is_cached_; }
  void set_cached(bool is_cached) { is_cached_ = is_cached; }

  // Returns the files in insertion order. After `decode`, files are unique and ascending by name.
  const std::vector<File>& files() const { return files_; }

  std::vector<std::byte> encode();
  // Errors: kCorruption for malformed bytes; kUnsupported for another version.
  static Result<WantedBytes> decode(Bytes bytes);

 private:
  void sort();
  std::vector<File> files_;
  bool is_cached_ = false;
};

}  // namespace torch_ckpt
