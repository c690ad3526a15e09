#pragma once

// A plan of reads made into requests of a load job: which tensors the engine reads where they are,
// which it hands over, and which are left to torch. Used by the bindings for FastLoadPlanner.

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
    std::vector<int64_t> numbers;  // Of the read of each request.
    std::vector<int64_t> left;     // Numbers of the reads that are left to torch, ascending.
  };

  // A live tensor of a view, for as long as the requests are used.
  using ToLive = std::function<LiveTensor(const TensorView& view, std::string_view name)>;

  // Errors: those of ReadPlan::make.
  static Result<PlannedReads> make(std::shared_ptr<const StoredIndex> index,
                                   std::shared_ptr<const ItemTable> items, bool partial);

  int64_t size() const { return static_cast<int64_t>(plan_.reads().size()); }
  const PlannedRead& at(int64_t number) const { return plan_.reads()[static_cast<size_t>(number)]; }
  const ItemTable& items() const { return *items_; }

  // Of all slices that are read.
  int64_t nbytes() const;
  std::vector<StoredSlice> slices() const;

  // Requests without memory for all that the engine can read.
  std::vector<TensorRequest> requests() const;

  // Requests for these tensors, one for each item of the table. A request has memory where the
  // tensor is plain and of the stored dtype. Tensors that share memory are left to torch, and so
  // are those of other sizes than planned.
  // Errors: kInvalidArgument where the batch has another length than the table.
  Result<Requests> requests(const TensorBatch& batch, const ToLive& to_live) const;

 private:
  PlannedReads(std::shared_ptr<const StoredIndex> index, std::shared_ptr<const ItemTable> items,
               ReadPlan plan)
      : index_(std::move(index)), items_(std::move(items)), plan_(std::move(plan)) {}

  // The dtype of a read that the engine can do; nothing for what is left to torch.
  std::optional<DType> engine_dtype(const PlannedRead& read) const;
  StoredSlice slice(const PlannedRead& read) const;
  TensorRequest without_memory(const PlannedRead& read, DType dtype) const;

  std::shared_ptr<const StoredIndex> index_;
  std::shared_ptr<const ItemTable> items_;
  ReadPlan plan_;
};

}  // namespace torch_ckpt
