#pragma once

// Indexes and metadata as readers open them, made from values.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/live_tensor.h"
#include "format/index_file.h"
#include "format/metadata_trailer.h"
#include "format/stored_index.h"
#include "plan/layout.h"
#include "support/status_matchers.h"

namespace torch_ckpt {

inline std::vector<std::byte> written(const Index& index) {
  auto bytes = write_index(index);
  EXPECT_OK(bytes);
  return std::move(*bytes);
}

// What an index has of a tensor that is stored whole.
inline IndexedEntry entry_of(const LiveTensor& live, const Slice& slice, int64_t file) {
  return {.fqn = live.name,
          .is_tensor = true,
          .dtype = std::string(dtype_info(live.dtype).name),
          .sizes = live.sizes,
          .boxes = {{Dims(live.sizes.size(), 0), live.sizes, file, slice.offset,
                     slice.total_nbytes(), true}}};
}

// An index that is read from memory, and what has been read of it.
struct ReadLog {
  int64_t reads = 0;
  int64_t nbytes = 0;
};

inline Result<std::shared_ptr<const StoredIndex>> opened(std::vector<std::byte> bytes,
                                                         std::shared_ptr<ReadLog> log = nullptr) {
  const auto kept = std::make_shared<std::vector<std::byte>>(std::move(bytes));
  const auto read = [kept, log](int64_t offset, MutableBytes into) {
    EXPECT_TRUE(range_within(offset, ssize(into), ssize(*kept)));
    const Bytes from = slice(Bytes(*kept), offset, ssize(into));
    std::copy(from.begin(), from.end(), into.begin());
    if (log != nullptr) *log = {log->reads + 1, log->nbytes + ssize(into)};
    return ok_status();
  };
  return StoredIndex::open(read, ssize(*kept), "step-1/.index");
}

inline std::shared_ptr<const StoredIndex> opened(const Index& index) {
  auto stored = opened(written(index));
  EXPECT_OK(stored);
  return *stored;
}

// A pickle, and the trailer that an index of this save id is sealed to.
inline std::string metadata_with_trailer(const std::string& pickle, const std::string& save_id) {
  const auto trailer = write_metadata_trailer({save_id, FileDigest::of(as_bytes(pickle))});
  EXPECT_OK(trailer);
  return pickle + std::string(as_text(*trailer));
}

}  // namespace torch_ckpt
