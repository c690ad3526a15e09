#pragma once

// PlannedReads: converts a read plan into requests of a load job. The engine reads some tensors in
// place and delivers others in temporary memory. Torch reads the rest. Used by the bindings for
// FastLoadPlanner.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/status.h"
#include "engine/load/load_job.h"
#include "engine/load/read_plan.h"
#include "engine/tensor_view.h"
#include "format/stored_index.h"
#include "plan/item.h"

namespace torch_ckpt {

class PlannedReads {
 public:
  struct Requests {
    std::vector<TensorRequest> requests;
    std::vector<int64_t> numbers;  // Read number of each request.
    std::vector<int64_t> left;     // Numbers of the reads left to torch, ascending.
  };

  // Returns the live tensor of a view. The result stays valid while the requests are in use.
  using ToLive = std::function<LiveTensor(const TensorView& view, std::string_view name)>;

  // Errors: those of ReadPlan::make.
  static Result<PlannedReads> make(std::shared_ptr<const StoredIndex> index,
                                   std::shared_ptr<const ItemTable> items, bool partial);

  int64_t size() const { return static_cast<int64_t>(plan_.reads().size()); }
  const PlannedRead& at(int64_t number) const { return plan_.reads()[static_cast<size_t>(number)]; }
  const ItemTable& items() const { return *items_; }

  // The slices of all reads, and the sum of their lengths.
  int64_t nbytes() const;
  std::vector<StoredSlice> slices() const;

  // Requests without memory for all tensors that `job` can read.
  std::vector<TensorRequest> requests(const LoadJob& job) const;

  // Requests for the tensors of `batch`, which has one for each item of the table. A request has
  // memory if the tensor is plain and has a dtype in which `job` gives the elements. Tensors that
  // share memory, and tensors whose sizes differ from the plan, are left to torch. Errors:
  // kInvalidArgument if batch and table differ in length.
  Result<Requests> requests(const LoadJob& job, const TensorBatch& batch,
                            const ToLive& to_live) const;

  // Sorts the numbers of reads as DCP reads them: file after file, in the order in which all reads
  // first name each.
  void sort(std::vector<int64_t>* numbers) const;

 private:
  PlannedReads(std::shared_ptr<const StoredIndex> index, std::shared_ptr<const ItemTable> items,
               ReadPlan plan)
      : index_(std::move(index)), items_(std::move(items)), plan_(std::move(plan)) {}

  // The dtype in which a target of dtype `target` gets a read; nullopt for one left to torch.
  std::optional<DType> given(const LoadJob& job, const PlannedRead& read,
                             std::optional<DType> target) const;
  StoredSlice slice(const PlannedRead& read) const;
  TensorRequest without_memory(const PlannedRead& read, DType dtype) const;

  std::shared_ptr<const StoredIndex> index_;
  std::shared_ptr<const ItemTable> items_;
  ReadPlan plan_;
};

}  // namespace torch_ckpt
