#include "engine/load/records.h"

#include <algorithm>

namespace torch_ckpt {

Records::Records(bool full, std::map<std::string, std::vector<StoredRecord>> by_file)
    : full_(full), by_file_(std::move(by_file)) {
  for (auto& [file, records] : by_file_) {
    std::sort(records.begin(), records.end(), [](const StoredRecord& a, const StoredRecord& b) {
      return a.range.begin < b.range.begin;
    });
  }
}

std::optional<StoredRecord> Records::find(const std::string& file, const ByteRange& range) const {
  const auto of_file = by_file_.find(file);
  if (of_file == by_file_.end()) return std::nullopt;
  const std::vector<StoredRecord>& records = of_file->second;
  auto next = std::upper_bound(
      records.begin(), records.end(), range.begin,
      [](int64_t begin, const StoredRecord& record) { return begin < record.range.begin; });
  if (next == records.begin()) return std::nullopt;
  const StoredRecord& record = *--next;
  if (range.end > record.range.end) return std::nullopt;
  return record;
}

bool Records::must_check(const std::string& file, const StoredRecord& record) const {
  if (!full_) return false;
  const std::scoped_lock lock(mutex_);
  return !checked_.contains({file, record.range.begin});
}

void Records::set_checked(const std::string& file, const StoredRecord& record) {
  if (!full_) return;
  const std::scoped_lock lock(mutex_);
  checked_.emplace(file, record.range.begin);
}

}  // namespace torch_ckpt
