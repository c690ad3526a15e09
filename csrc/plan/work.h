#pragma once

// The items that one rank writes: all items of its table, or the assigned ones, some of them cut to
// a range of rows. The bindings create a `Work` and split it over data files;
// engine/save/planned_file writes it.

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "plan/assignment.h"
#include "plan/item.h"

namespace torch_ckpt {

class Work {
 public:
  struct Item {
    int64_t number = 0;  // Index in the table.
    int64_t first_row = 0;
    int64_t rows = -1;  // Number of rows; -1 means all.

    bool operator==(const Item&) const = default;
  };

  // Contains all items of the table.
  explicit Work(std::shared_ptr<const ItemTable> items);

  // Contains the items of an assignment.
  // Errors: those of check_assignment.
  static Result<Work> assigned(std::shared_ptr<const ItemTable> items,
                               const Assignment& assignment);

  // Returns the work of the items at these positions. Requires: each position is in [0, size()).
  Work part(const std::vector<int64_t>& positions) const;

  const ItemTable& items() const { return *table_; }
  int64_t size() const { return static_cast<int64_t>(items_.size()); }
  const Item& at(int64_t position) const { return items_[static_cast<size_t>(position)]; }

  // Returns the number of payload bytes of an item; 0 for an object.
  int64_t nbytes(const Item& item) const;

 private:
  std::shared_ptr<const ItemTable> table_;
  std::vector<Item> items_;
};

}  // namespace torch_ckpt
