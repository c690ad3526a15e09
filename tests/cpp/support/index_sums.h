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
#include "format/checked_blocks.h"
#include "format/index_records.h"

namespace torch_ckpt {

// Puts the sums of the blocks of `bytes` where a section is, as far as there is room.
inline void put_sums(std::vector<std::byte>& bytes, Bytes of,
                     const index_records::Section& section) {
  if (section.offset > bytes.size() || section.nbytes > bytes.size() - section.offset) return;
  BlockSummer summer(CheckedBlocks::kBlockNbytes);
  summer.append(of);
  const BlockSums sums = summer.finish();
  const Bytes made = std::as_bytes(std::span(sums.sums));
  std::copy_n(made.begin(), std::min(made.size(), static_cast<size_t>(section.nbytes)),
              bytes.begin() + static_cast<std::ptrdiff_t>(section.offset));
}

inline void fix_sums(std::vector<std::byte>& bytes) {
  namespace records = index_records;
  records::Header header;
  if (bytes.size() < sizeof(header)) return;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const auto part = [&](const records::Section& section) {
    const size_t begin = std::min<size_t>(section.offset, bytes.size());
    return Bytes(bytes).subspan(begin, std::min<size_t>(section.nbytes, bytes.size() - begin));
  };
  const size_t body =
      std::min(part(header.table).data() - bytes.data() + part(header.table).size(), bytes.size());
  put_sums(bytes, Bytes(bytes).subspan(body), header.table);
  put_sums(bytes, part(header.table), header.top);
  header.top_sum = xxh3(part(header.top));
  std::memcpy(bytes.data(), &header, sizeof(header));
  header.header_sum = xxh3(Bytes(bytes).first(offsetof(records::Header, header_sum)));
  std::memcpy(bytes.data(), &header, sizeof(header));
}

}  // namespace torch_ckpt
