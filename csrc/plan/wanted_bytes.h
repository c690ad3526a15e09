#pragma once

// Which bytes a rank wants to read, on their way to the rank that shares out the reading
// (plan/exchange.h).

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

  // As they were added; of what was decoded each once, ascending by name.
  const std::vector<File>& files() const { return files_; }

  std::vector<std::byte> encode();
  // Errors: kCorruption for bytes that encode did not return; kUnsupported for a newer release's.
  static Result<WantedBytes> decode(Bytes bytes);

 private:
  void sort();
  std::vector<File> files_;
};

}  // namespace torch_ckpt
