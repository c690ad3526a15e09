#pragma once

// An index whose bytes were changed, with every checksum made true again: what somebody would do
// who wants to do harm. Also used by fuzz/index_fuzzer.cc.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "base/block_sums.h"
#include "base/bytes.h"
#include "format/index_records.h"

namespace torch_ckpt {

inline void reseal(std::vector<std::byte>& bytes) {
  namespace records = index_records;
  records::Header header;
  if (bytes.size() < sizeof(header)) return;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const records::Section& table = header.table;
  if (table.offset >= sizeof(header) && table.offset <= bytes.size() &&
      table.nbytes <= bytes.size() - table.offset) {
    BlockSummer summer(records::kTableBlockNbytes);
    summer.append(Bytes(bytes).subspan(sizeof(header), table.offset - sizeof(header)));
    const BlockSums sums = summer.finish();
    const Bytes made = std::as_bytes(std::span(sums.sums));
    std::copy_n(made.begin(), std::min(made.size(), static_cast<size_t>(table.nbytes)),
                bytes.begin() + static_cast<std::ptrdiff_t>(table.offset));
    header.table_sum = xxh3(Bytes(bytes).subspan(table.offset, table.nbytes));
  }
  std::memcpy(bytes.data(), &header, sizeof(header));
  header.header_sum = xxh3(Bytes(bytes).first(offsetof(records::Header, header_sum)));
  std::memcpy(bytes.data(), &header, sizeof(header));
}

}  // namespace torch_ckpt
