#pragma once

// Records: the records of torch.save archives that a load reads, and their CRC-32.
//
// An archive has no checksum of a part of a record. So a record is checked only if it is read
// whole: if a load reads almost all of it anyway, or if every record is to be checked before a
// value in it is handed out. LoadBatch then reads the rest as well.
//
// The reader of an open checkpoint makes one, and its load jobs share it.

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "geometry/overlap.h"

namespace torch_ckpt {

// The elements of a stored tensor, or of several ones.
struct StoredRecord {
  ByteRange range;   // In its file.
  uint32_t crc = 0;  // The CRC-32 of all bytes.
};

// Safe to use from several threads.
class Records {
 public:
  // `full`: whether each record is checked once, before a value in it is handed out. `by_file`: the
  // records of files whose index does not state them. Those of a file may not overlap.
  Records(bool full, std::map<std::string, std::vector<StoredRecord>> by_file);

  // Returns the record that contains a range of a file, if there is one.
  std::optional<StoredRecord> find(const std::string& file, const ByteRange& range) const;

  // Whether a record must be checked before a value in it is handed out.
  bool must_check(const std::string& file, const StoredRecord& record) const;

  // Notes that a record is sound.
  void set_checked(const std::string& file, const StoredRecord& record);

 private:
  const bool full_;
  std::map<std::string, std::vector<StoredRecord>> by_file_;  // Ascending.
  mutable std::mutex mutex_;
  std::set<std::pair<std::string, int64_t>> checked_;  // File and begin.
};

}  // namespace torch_ckpt
