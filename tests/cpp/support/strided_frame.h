#pragma once

// Zip archives, and in them tensors with any strides, as torch.save writes views. Our own frames
// are contiguous.

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/crc.h"
#include "base/strided.h"
#include "support/pickle_text.h"

namespace torch_ckpt {

// A record of a zip archive, with any oddity.
struct Record {
  std::string name;
  std::string data;
  uint16_t method = 0;
  uint16_t flags = 0;
  bool in_directory = true;
};

// An archive written independently of the code under test.
inline std::string zip(const std::vector<Record>& records, const std::string& comment = "") {
  std::string out;
  std::string directory;
  int count = 0;
  for (const Record& record : records) {
    const std::string fields =
        pickle_text::bytes_of(20, 2) + pickle_text::bytes_of(record.flags, 2) +
        pickle_text::bytes_of(record.method, 2) + pickle_text::bytes_of(0, 4) +
        pickle_text::bytes_of(crc32(0, as_bytes(record.data)), 4) +
        pickle_text::bytes_of(record.data.size(), 4) +
        pickle_text::bytes_of(record.data.size(), 4) +
        pickle_text::bytes_of(record.name.size(), 2) + pickle_text::bytes_of(0, 2);
    if (record.in_directory) {
      directory += "PK\x01\x02" + pickle_text::bytes_of(20, 2) + fields + std::string(10, '\0') +
                   pickle_text::bytes_of(out.size(), 4) + record.name;
      ++count;
    }
    out += "PK\x03\x04" + fields + record.name + record.data;
  }
  return out + directory + "PK\x05\x06" + pickle_text::bytes_of(0, 4) +
         pickle_text::bytes_of(count, 2) + pickle_text::bytes_of(count, 2) +
         pickle_text::bytes_of(directory.size(), 4) + pickle_text::bytes_of(out.size(), 4) +
         pickle_text::bytes_of(comment.size(), 2) + comment;
}

// A float32 tensor over the storage `payload`, behind a record `extra` unless that is empty.
// Strides and offset are in elements.
inline std::string strided_frame(const Dims& sizes, const Dims& strides, int64_t storage_offset,
                                 const std::string& payload, const std::string& extra = "") {
  using namespace pickle_text;  // NOLINT(google-build-using-namespace)
  const auto numbers = [](const Dims& dims) {
    std::string out;
    for (const int64_t dim : dims) out += number(dim);
    return tuple(out);
  };
  TensorText tensor;
  tensor.storage = pickle_text::storage(global("torch", "FloatStorage"), "0",
                                        static_cast<int64_t>(payload.size() / 4));
  tensor.offset = number(storage_offset);
  tensor.sizes = numbers(sizes);
  tensor.strides = numbers(strides);

  std::vector<Record> records = {{"r/data.pkl", tensor.pickle()}, {"r/data/0", payload}};
  if (!extra.empty()) records.insert(records.begin(), {"r/extra", extra});
  return zip(records);
}

}  // namespace torch_ckpt
