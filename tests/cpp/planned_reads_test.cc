#include "engine/load/planned_reads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "support/indexed_checkpoint.h"
#include "support/plan_items.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::planned_reads_test {
namespace {

using ::testing::ElementsAre;

// Wants two tensors of a checkpoint, of the second rows [100, 200) alone, and the object.
struct Wanted {
  Indexed stored;
  std::vector<TestTensor> targets = {
      TestTensor::random("t1", DType::kFloat32, {7, 5}, 50),
      TestTensor::random("t3", DType::kFloat32, {100, 400}, 51),
  };
  TensorBatch batch;
  std::shared_ptr<const ItemTable> table = std::make_shared<ItemTable>(
      table_of({whole_item("t1", float_facts({7, 5})),
                float_shard("t3", {300, 400}, {100, 0}, {100, 400}), object_item("object", 0)}));

  Wanted() {
    for (const TestTensor& target : targets) {
      TensorView view;
      view.dtype = target.live.dtype;
      view.sizes = target.live.sizes;
      view.strides = target.live.strides;
      view.data = target.live.data;
      view.writable = true;
      batch.views.push_back(view);
      batch.kinds.push_back(TensorKind::kPlain);
    }
    batch.views.emplace_back();
    batch.kinds.push_back(TensorKind::kTorchOnly);
  }

  PlannedReads reads() { return *PlannedReads::make(opened(*stored.index), table, false); }
  std::unique_ptr<LoadJob> job(std::shared_ptr<const QuantizedTensors> quantized = nullptr) {
    LoadOptions options;
    options.quantized = std::move(quantized);
    return std::move(*LoadJob::make(stored.fs, "step-1", options));
  }
  PlannedReads::Requests requests(std::shared_ptr<const QuantizedTensors> quantized = nullptr) {
    return *reads().requests(
        *job(std::move(quantized)), batch,
        [](const TensorView& view, std::string_view) { return to_live(view); });
  }
};

TEST(PlannedReadsTest, TensorsAreReadInPlaceAndObjectsAreLeft) {
  Wanted wanted;
  const PlannedReads reads = wanted.reads();
  EXPECT_EQ(reads.size(), 3);
  EXPECT_EQ(reads.nbytes(), wanted.stored.slices[1].nbytes + wanted.stored.slices[3].nbytes +
                                wanted.stored.object.nbytes);
  const PlannedReads::Requests requests = wanted.requests();
  EXPECT_THAT(requests.numbers, ElementsAre(0, 1));
  EXPECT_THAT(requests.left, ElementsAre(2));
  ASSERT_OK(wanted.stored.load(requests.requests));
  EXPECT_EQ(wanted.targets[0].packed(), wanted.stored.saved[1].packed());
  EXPECT_EQ(wanted.targets[1].packed(),
            wanted.stored.saved[3].narrowed({100, 0}, {100, 400}).packed());
}

TEST(PlannedReadsTest, ATensorOfAnotherDtypeOrPlaceIsHandedOver) {
  Wanted wanted;
  wanted.batch.views[0].dtype = DType::kFloat64;
  wanted.batch.views[1].writable = false;
  for (const TensorRequest& request : wanted.requests().requests) {
    EXPECT_EQ(request.live.data, nullptr);
    EXPECT_EQ(request.live.dtype, DType::kFloat32);
  }
  EXPECT_EQ(wanted.reads().requests(*wanted.job()).size(), 2);
}

TEST(PlannedReadsTest, AQuantizedTensorIsReadInPlaceInAnyDtypeThatItIsGivenIn) {
  auto quantized = std::make_shared<QuantizedTensors>();
  (*quantized)["t1"].targets = {DType::kBFloat16, DType::kFloat16};
  Wanted wanted;
  wanted.batch.views[0].dtype = DType::kFloat16;
  EXPECT_NE(wanted.requests(quantized).requests[0].live.data, nullptr);
  EXPECT_EQ(wanted.requests(quantized).requests[0].live.dtype, DType::kFloat16);
  wanted.batch.views[0].dtype = DType::kFloat32;
  EXPECT_EQ(wanted.requests(quantized).requests[0].live.data, nullptr);
  EXPECT_EQ(wanted.requests(quantized).requests[0].live.dtype, DType::kBFloat16);
  EXPECT_EQ(wanted.requests(quantized).requests[1].live.dtype, DType::kFloat32);
}

TEST(PlannedReadsTest, TensorsThatShareMemoryOrHaveOtherSizesAreLeft) {
  Wanted wanted;
  wanted.batch.views[0].data = wanted.batch.views[1].data + 40;
  EXPECT_THAT(wanted.requests().left, ElementsAre(0, 1, 2));
  Wanted other;
  other.batch.views[0].sizes = {5, 7};
  EXPECT_THAT(other.requests().left, ElementsAre(0, 2));
}

TEST(PlannedReadsTest, ABatchOfAnotherLengthIsRefused) {
  Wanted wanted;
  wanted.batch.views.pop_back();
  const auto to_view = [](const TensorView& view, std::string_view) { return to_live(view); };
  EXPECT_CODE(wanted.reads().requests(*wanted.job(), wanted.batch, to_view),
              StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace torch_ckpt::planned_reads_test
