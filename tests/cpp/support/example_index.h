#pragma once

// The checkpoint of the examples in FORMAT.md.

#include <cstddef>
#include <string>
#include <vector>

#include "base/block_sums.h"
#include "format/index_file.h"
#include "format/zip_frame.h"
#include "support/status_matchers.h"

namespace torch_ckpt {

// The bytes 0, 1, 0, 1 and so on.
inline std::vector<std::byte> alternating(int64_t nbytes) {
  std::vector<std::byte> bytes(static_cast<size_t>(nbytes));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i % 2);
  return bytes;
}

// A tensor in two boxes and an object, in one file. `plain` boxes have the length of their frames.
inline Index example_index() {
  const auto frame = TensorFrame::make(DType::kBFloat16, Dims{1, 3});
  EXPECT_OK(frame);
  const int64_t row_nbytes = frame->nbytes();
  constexpr int64_t kSecondRow = 704;
  constexpr int64_t kObject = 1408;
  constexpr int64_t kObjectNbytes = 100;

  Index index;
  index.save_id = "0123456789abcdef";
  index.metadata = FileDigest::of(as_bytes("the metadata"));
  BlockSummer summer(kSumBlockNbytes);
  summer.append(alternating(kObject + kObjectNbytes));
  index.files = {{"__0_0_0123456789abcdef.distcp", summer.finish()}};
  index.has_entries = true;
  index.version = "1.0.0";
  index.entries = {
      {.fqn = "model.w",
       .is_tensor = true,
       .dtype = "bfloat16",
       .memory_format = "contiguous_format",
       .requires_grad = true,
       .sizes = {2, 3},
       .boxes = {{{0, 0}, {1, 3}, 0, 0, row_nbytes, true, {}},
                 {{1, 0}, {1, 3}, 0, kSecondRow, row_nbytes, true, {}}}},
      {.fqn = "steps.0", .boxes = {{{}, {}, 0, kObject, kObjectNbytes, false, {}}}},
  };
  index.has_paths = true;
  index.paths = {{"model.w", {std::string("model"), std::string("w")}},
                 {"steps.0", {std::string("steps"), int64_t{0}}}};
  return index;
}

}  // namespace torch_ckpt
