#pragma once

// Names: many strings, each kept once and known by a number, in one run of text. A hundred thousand
// FQNs then cost a few allocations, not two each.
//
// `ItemTable` numbers FQNs with it, and whatever else is to be interned by its bytes.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace torch_ckpt {

class Names {
 public:
  int64_t size() const { return static_cast<int64_t>(ends_.size()); }

  // The bytes of all names.
  int64_t text_nbytes() const { return static_cast<int64_t>(text_.size()); }

  // The name of a number; valid until the next one is added. Requires: 0 <= i < size().
  std::string_view operator[](int64_t i) const {
    const auto at = static_cast<size_t>(i);
    const size_t begin = at == 0 ? 0 : static_cast<size_t>(ends_[at - 1]);
    return std::string_view(text_).substr(begin, static_cast<size_t>(ends_[at]) - begin);
  }

  // The number of a name, or -1 where it has none.
  int64_t find(std::string_view name) const;

  // The number of a name, which is given the next one where it has none: then it is what size() was
  // before. Requires: fewer than 2^31 names have one.
  int64_t intern(std::string_view name);

  // Makes room, so that as many names can be added without the table growing meanwhile.
  void reserve(int64_t count);

 private:
  // Where a name's number stands in `slots_`, or would stand.
  size_t slot_of(std::string_view name) const;
  void resize_slots(size_t count);

  std::string text_;
  std::vector<int64_t> ends_;
  std::vector<int32_t> slots_;  // An open hash table of numbers; -1 where nothing stands.
};

}  // namespace torch_ckpt
