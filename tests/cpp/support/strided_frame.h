#pragma once

// A stored tensor with any strides, as torch.save writes views. Our own frames are contiguous.

#include <cstdint>
#include <string>

#include "base/bytes.h"
#include "base/crc.h"
#include "base/strided.h"
#include "support/pickle_text.h"

namespace torch_ckpt {

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

  std::string out;
  std::string directory;
  const auto add = [&](const std::string& name, const std::string& data) {
    const std::string fields = bytes_of(20, 2) + bytes_of(0, 8) +
                               bytes_of(crc32(0, as_bytes(data)), 4) + bytes_of(data.size(), 4) +
                               bytes_of(data.size(), 4) + bytes_of(name.size(), 2) + bytes_of(0, 2);
    directory += "PK\x01\x02" + bytes_of(20, 2) + fields + std::string(10, '\0') +
                 bytes_of(out.size(), 4) + name;
    out += "PK\x03\x04" + fields + name + data;
  };
  const int64_t count = extra.empty() ? 2 : 3;
  if (!extra.empty()) add("r/extra", extra);
  add("r/data.pkl", tensor.pickle());
  add("r/data/0", payload);
  return out + directory + "PK\x05\x06" + bytes_of(0, 4) + bytes_of(count, 2) + bytes_of(count, 2) +
         bytes_of(directory.size(), 4) + bytes_of(out.size(), 4) + bytes_of(0, 2);
}

}  // namespace torch_ckpt
