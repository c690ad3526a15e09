#pragma once

// PlannedFile: the tensors of one data file of a planned save. It checks them against the plan,
// lays them out, writes them through a SaveJob, and encodes their extents for the coordinator. Used
// by the bindings.

#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/save/reuse.h"
#include "engine/save/save_job.h"
#include "engine/tensor_view.h"
#include "plan/layout.h"
#include "plan/work.h"

namespace torch_ckpt {

// Reduces the view of an item's whole box to the rows that the item stores.
// Requires: the view has these rows.
void cut_to_rows(const Work::Item& item, TensorView& view);

class PlannedFile {
 public:
  // Lays out all tensors of `work` except those that only torch can write. `batch` has one view for
  // each item. Errors: kInvalidArgument if a dtype or the sizes differ from the plan, or the batch
  // and the work differ in length.
  static Result<PlannedFile> make(Work work, const TensorBatch& batch);

  const Work& work() const { return work_; }

  // Number of tensors in the layout. The functions below number the tensors in layout order.
  int64_t laid_out() const { return static_cast<int64_t>(views_.size()); }
  const Layout& layout() const { return layout_; }

  // Work positions of the items that only torch can write.
  const std::vector<int64_t>& own() const { return own_; }

  // Numbers of the tensors without memory. The caller passes a copy of each to put().
  const std::vector<int64_t>& copied() const { return copied_; }

  // Work position of a tensor.
  int64_t position(int64_t number) const { return positions_[static_cast<size_t>(number)]; }

  // First row and row count if this rank writes only some rows of the tensor, else nullopt.
  std::optional<std::pair<int64_t, int64_t>> rows(int64_t number) const;

  // Sets the memory of a tensor that had none: a copy of the rows to write.
  // Errors: kInvalidArgument if dtype or sizes differ.
  Status put(int64_t number, const TensorView& copy);

  // Makes the file have digests. `samples` has the digest of the sample of each item, or
  // kUnknownDigest. `write` computes the digest of the others at these work positions.
  // Requires: `samples` has an element for each item, and no tensor has been written.
  void add_digests(std::span<const uint64_t> samples, const std::vector<int64_t>& positions);

  // Returns the digests of the tensors, once all are written; none unless `add_digests` was called.
  const std::vector<SliceDigest>& digests() const { return digests_; }

  // Writes tensors [begin, end). Errors: kInternal for a tensor without memory; those of the job.
  // Requires: 0 <= begin <= end <= laid_out(), and none of these tensors has been written.
  Status write(SaveJob& job, int64_t begin, int64_t end);

  // Releases the memory of tensors [begin, end).
  void release(int64_t begin, int64_t end);

  // Encodes the extents of all items for the coordinator. `appended` has work position, offset and
  // length of each appended item.
  std::vector<std::byte> extents(
      const std::vector<std::tuple<int64_t, int64_t, int64_t>>& appended) const;

 private:
  explicit PlannedFile(Work work) : work_(std::move(work)) {}

  // Returns a view of an item's whole planned box, without memory.
  Result<TensorView> whole(int64_t position) const;

  // Returns kInvalidArgument with the item's name if dtype or sizes differ.
  Status check(int64_t position, const TensorView& found, const TensorView& planned) const;

  Work work_;
  std::vector<int64_t> positions_;  // Work positions, in layout order.
  std::vector<TensorView> views_;   // Views, in layout order.
  std::vector<int64_t> own_;
  std::vector<int64_t> copied_;
  Layout layout_;
  std::vector<SliceDigest> digests_;  // In layout order, or empty.
  std::vector<bool> is_digested_;     // Whether to compute the digest of all elements.
};

}  // namespace torch_ckpt
