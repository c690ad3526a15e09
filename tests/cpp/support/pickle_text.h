#pragma once

// Pickles written out by hand, piece by piece, for tests of what reads them.

#include <cstdint>
#include <string>

namespace torch_ckpt::pickle_text {

inline std::string bytes_of(uint64_t value, int nbytes) {
  std::string out;
  for (int i = 0; i < nbytes; ++i) out += static_cast<char>(value >> (8 * i));
  return out;
}

inline std::string number(int64_t value) {
  return "\x8a\x08" + bytes_of(static_cast<uint64_t>(value), 8);
}

inline std::string text(const std::string& value) {
  return "X" + bytes_of(value.size(), 4) + value;
}

inline std::string global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}

inline std::string tuple(const std::string& elements) { return "(" + elements + "t"; }

inline std::string storage(const std::string& type, const std::string& key, int64_t numel) {
  return tuple(text("storage") + type + text(key) + text("cpu") + number(numel)) + "Q";
}

// A plain float32 tensor of sizes [2, 3], with any piece exchanged.
struct TensorText {
  std::string function = global("torch._utils", "_rebuild_tensor_v2");
  std::string storage = pickle_text::storage(global("torch", "FloatStorage"), "0", 6);
  std::string offset = number(0);
  std::string sizes = tuple(number(2) + number(3));
  std::string strides = tuple(number(3) + number(1));
  std::string requires_grad = "\x89";
  std::string hooks = global("collections", "OrderedDict") + ")R";
  std::string more = {};

  std::string call() const {
    return function + tuple(storage + offset + sizes + strides + requires_grad + hooks + more) +
           "R";
  }
  std::string pickle() const { return "\x80\x02" + call() + "."; }
};

}  // namespace torch_ckpt::pickle_text
