#pragma once

// What a rank writes of the items that it listed: all of them, or those that it was assigned, some
// only by rows. Made by the bindings, split over data files there, and written by
// engine/save/planned_file.

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
    int64_t number = 0;  // In the table.
    int64_t first_row = 0;
    int64_t rows = -1;  // All.

    bool operator==(const Item&) const = default;
  };

  // All items.
  explicit Work(std::shared_ptr<const ItemTable> items);

  // The items of an assignment.
  // Errors: those of check_assignment.
  static Result<Work> assigned(std::shared_ptr<const ItemTable> items,
                               const Assignment& assignment);

  // The items at these positions. Requires: each is in [0, size()).
  Work part(const std::vector<int64_t>& positions) const;

  const ItemTable& items() const { return *table_; }
  int64_t size() const { return static_cast<int64_t>(items_.size()); }
  const Item& at(int64_t position) const { return items_[static_cast<size_t>(position)]; }

  // Bytes that are written of one of them; 0 for an object.
  int64_t nbytes(const Item& item) const;

 private:
  std::shared_ptr<const ItemTable> table_;
  std::vector<Item> items_;
};

}  // namespace torch_ckpt
