// The file is read back by the parser of its frames.

#include "engine/save/planned_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "format/zip_frame.h"
#include "plan/item_extents.h"
#include "support/memory_file_system.h"
#include "support/plan_items.h"
#include "support/saved_file.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::planned_file_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Three matrices of floats; of the middle one only rows [2, 5) are written.
struct Planned {
  std::vector<TestTensor> tensors;
  TensorBatch batch;
  std::shared_ptr<const ItemTable> table;

  Planned() {
    std::vector<PlanItem> items;
    for (uint32_t i = 0; i < 3; ++i) {
      const std::string fqn = "t" + std::to_string(i);
      tensors.push_back(TestTensor::random(fqn, DType::kFloat32, {7 + i, 30}, i));
      items.push_back(whole_item(fqn, float_facts({7 + i, 30})));
      batch.views.push_back(view_of(tensors.back()));
      batch.kinds.push_back(TensorKind::kPlain);
    }
    table = std::make_shared<ItemTable>(table_of(items));
  }

  Work work() const {
    const Assignment assignment = {.item_count = 3, .runs = {{0, 3}}, .cuts = {{1, 2, 3}}};
    return *Work::assigned(table, assignment);
  }
};

// What was written to the file, read as a frame at each extent.
std::vector<std::string> payloads(const MemoryFileSystem& fs,
                                  const std::vector<ItemExtent>& extents) {
  std::vector<std::string> out;
  const std::string contents = *fs.contents("c/a");
  for (const ItemExtent& extent : extents) {
    const Bytes stored = slice(as_bytes(contents), extent.offset, extent.nbytes);
    const auto parsed = parse_frame(stored, stored, extent.nbytes);
    EXPECT_OK(parsed);
    out.emplace_back(as_text(slice(stored, parsed->payload_offset, parsed->payload_nbytes)));
  }
  return out;
}

TEST(PlannedFileTest, WritesWhatWasAssignedAndReportsWhereItLies) {
  const Planned planned;
  ASSERT_OK_AND_ASSIGN(PlannedFile file, PlannedFile::make(planned.work(), planned.batch));
  EXPECT_EQ(file.laid_out(), 3);
  EXPECT_EQ(file.rows(0), std::nullopt);
  EXPECT_EQ(file.rows(1), std::pair(int64_t{2}, int64_t{3}));

  MemoryFileSystem fs;
  const auto pool = make_pool(1 << 20, 64 << 10);
  ASSERT_OK_AND_ASSIGN(auto job, SaveJob::start(fs, "c/a", file.layout(), *pool, {}));
  ASSERT_OK(file.write(*job, 0, 2));
  ASSERT_OK(file.write(*job, 2, 3));
  ASSERT_OK(job->finish());

  ASSERT_OK_AND_ASSIGN(const auto extents, decode_extents(file.extents({})));
  std::vector<int64_t> items;
  for (const ItemExtent& extent : extents) items.push_back(extent.item);
  EXPECT_THAT(items, ElementsAre(0, 1, 2));
  EXPECT_THAT(payloads(fs, extents),
              ElementsAre(planned.tensors[0].packed(),
                          planned.tensors[1].narrowed({2, 0}, {3, 30}).packed(),
                          planned.tensors[2].packed()));
}

TEST(PlannedFileTest, WhatOnlyTorchStoresIsLeftAndWhatIsElsewhereNeedsACopy) {
  Planned planned;
  planned.batch.kinds[0] = TensorKind::kTorchOnly;
  planned.batch.kinds[1] = TensorKind::kNeedsCopy;
  planned.batch.views[1].data = nullptr;
  ASSERT_OK_AND_ASSIGN(PlannedFile file, PlannedFile::make(planned.work(), planned.batch));
  EXPECT_THAT(file.own(), ElementsAre(0));
  EXPECT_THAT(file.copied(), ElementsAre(0));
  EXPECT_EQ(file.position(0), 1);

  MemoryFileSystem fs;
  const auto pool = make_pool(1 << 20, 64 << 10);
  {
    ASSERT_OK_AND_ASSIGN(auto job, SaveJob::start(fs, "c/b", file.layout(), *pool, {}));
    EXPECT_CODE(file.write(*job, 0, 1), StatusCode::kInternal);
  }
  EXPECT_CODE(file.put(0, view_of(planned.tensors[1])), StatusCode::kInvalidArgument);
  const TestTensor rows = planned.tensors[1].narrowed({2, 0}, {3, 30});
  ASSERT_OK(file.put(0, view_of(rows)));
  ASSERT_OK_AND_ASSIGN(auto job, SaveJob::start(fs, "c/a", file.layout(), *pool, {}));
  ASSERT_OK(file.write(*job, 0, file.laid_out()));
  ASSERT_OK(job->finish());
  ASSERT_OK_AND_ASSIGN(const auto extents, decode_extents(file.extents({{0, 9000, 10}})));
  ASSERT_EQ(extents.size(), 3);
  EXPECT_EQ(extents[0].item, 0);
  EXPECT_EQ(extents[0].offset, 9000);
  EXPECT_EQ(payloads(fs, {extents[1]})[0], rows.packed());
}

TEST(PlannedFileTest, ATensorThatIsNotWhatWasPlannedIsRefusedByName) {
  Planned planned;
  planned.batch.views[2].sizes = {8, 30};
  const auto refused = PlannedFile::make(planned.work(), planned.batch);
  EXPECT_CODE(refused, StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), HasSubstr("cannot write 't2'"));
  planned.batch.views.pop_back();
  EXPECT_CODE(PlannedFile::make(planned.work(), planned.batch), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace torch_ckpt::planned_file_test
