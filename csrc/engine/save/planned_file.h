#pragma once

// The tensors of one data file of a planned save: checked against the plan, laid out, written, and
// reported to the coordinator by where they lie. Used by the bindings; SaveJob writes.

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/save/save_job.h"
#include "engine/tensor_view.h"
#include "plan/layout.h"
#include "plan/work.h"

namespace torch_ckpt {

class PlannedFile {
 public:
  // Lays out all tensors of `work` that are not torch's own; `batch` has a view of each item.
  // Errors: kInvalidArgument where a tensor has another dtype or other sizes than planned, or the
  // batch another length than the work.
  static Result<PlannedFile> make(Work work, const TensorBatch& batch);

  // How many tensors are laid out. Their numbers below are in the order of the layout.
  int64_t laid_out() const { return static_cast<int64_t>(views_.size()); }
  const Layout& layout() const { return layout_; }

  // Positions in the work of what only torch can write.
  const std::vector<int64_t>& own() const { return own_; }

  // Numbers of the tensors that have no memory yet: put() gives them a copy.
  const std::vector<int64_t>& copied() const { return copied_; }

  // Position in the work.
  int64_t position(int64_t number) const { return positions_[static_cast<size_t>(number)]; }

  // First row and count of rows that are written of a tensor that is cut.
  std::optional<std::pair<int64_t, int64_t>> rows(int64_t number) const;

  // Gives memory to a tensor that had none: a copy of what is written of it.
  // Errors: kInvalidArgument for another dtype or other sizes.
  Status put(int64_t number, const TensorView& copy);

  // Writes tensors [begin, end). Errors: kInternal for one without memory; those of the job.
  // Requires: 0 <= begin <= end <= laid_out(), and no tensor of them was written before.
  Status write(SaveJob& job, int64_t begin, int64_t end) const;

  // Lets go of the memory of tensors [begin, end).
  void release(int64_t begin, int64_t end);

  // Where everything lies, encoded for the coordinator: what was laid out, and besides that
  // position in the work, offset and length of what was appended.
  std::vector<std::byte> extents(
      const std::vector<std::tuple<int64_t, int64_t, int64_t>>& appended) const;

 private:
  explicit PlannedFile(Work work) : work_(std::move(work)) {}

  // The whole box of an item as it was planned, without memory.
  Result<TensorView> whole(int64_t position) const;

  // kInvalidArgument, naming the item, where dtype or sizes differ.
  Status check(int64_t position, const TensorView& found, const TensorView& planned) const;

  Work work_;
  std::vector<int64_t> positions_;  // In the work, of what is laid out.
  std::vector<TensorView> views_;   // Of the same.
  std::vector<int64_t> own_;
  std::vector<int64_t> copied_;
  Layout layout_;
};

}  // namespace torch_ckpt
