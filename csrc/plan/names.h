#pragma once

// A string table: each distinct string is stored once, in one text buffer, and identified by a
// number. A hundred thousand FQNs then cost a few allocations instead of two each.
//
// `EntryTable` uses this class for FQNs and facts, `global_plan.cc` for sets of plans.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace torch_ckpt {

class Names {
 public:
  int64_t size() const { return static_cast<int64_t>(ends_.size()); }

  // Returns the total length of all names.
  int64_t text_nbytes() const { return static_cast<int64_t>(text_.size()); }

  // Returns the name with number i. Valid until the next insertion. Requires: 0 <= i < size().
  std::string_view operator[](int64_t i) const {
    const auto at = static_cast<size_t>(i);
    const size_t begin = at == 0 ? 0 : static_cast<size_t>(ends_[at - 1]);
    return std::string_view(text_).substr(begin, static_cast<size_t>(ends_[at]) - begin);
  }

  // Returns the number of a name, or -1.
  int64_t find(std::string_view name) const;

  // Returns the number of a name. A new name is inserted with the number size().
  // Requires: size() < 2^31.
  int64_t intern(std::string_view name);

  // Reserves memory for `count` names.
  void reserve(int64_t count);

 private:
  // Returns the slot of a name in `slots_`, or the slot to insert it at.
  size_t slot_of(std::string_view name) const;
  void resize_slots(size_t count);

  std::string text_;
  std::vector<int64_t> ends_;
  std::vector<int32_t> slots_;  // Open-addressing hash table of numbers; -1 marks an empty slot.
};

}  // namespace torch_ckpt
