#include "plan/work.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "support/plan_items.h"
#include "support/status_matchers.h"

namespace torch_ckpt::work_test {
namespace {

using ::testing::ElementsAre;

std::shared_ptr<const ItemTable> three_items() {
  return std::make_shared<ItemTable>(
      table_of({whole_item("a", float_facts({10, 3})), object_item("b", 500),
                whole_item("c", float_facts({8}))}));
}

std::vector<Work::Item> items_in(const Work& work) {
  std::vector<Work::Item> out;
  for (int64_t i = 0; i < work.size(); ++i) out.push_back(work.at(i));
  return out;
}

TEST(WorkTest, WithoutAnAssignmentIsEveryItemWhole) {
  const Work work(three_items());
  using Item = Work::Item;
  EXPECT_THAT(items_in(work), ElementsAre(Item{0}, Item{1}, Item{2}));
  EXPECT_EQ(work.nbytes(work.at(0)), 120);
  EXPECT_EQ(work.nbytes(work.at(1)), 500);
}

TEST(WorkTest, AnAssignmentLeavesItemsOutAndCutsOthersByRows) {
  const Assignment assignment = {
      .item_count = 3, .runs = {{0, 1}, {2, 1}}, .cuts = {{.item = 0, .first_row = 4, .rows = 5}}};
  ASSERT_OK_AND_ASSIGN(const Work work, Work::assigned(three_items(), assignment));
  EXPECT_THAT(items_in(work), ElementsAre(Work::Item{0, 4, 5}, Work::Item{2}));
  EXPECT_EQ(work.nbytes(work.at(0)), 5 * 3 * 4);
  EXPECT_EQ(work.nbytes(work.at(1)), 8 * 4);
  const Work part = work.part({1});
  EXPECT_THAT(items_in(part), ElementsAre(Work::Item{2}));
  EXPECT_EQ(&part.items(), &work.items());
}

TEST(WorkTest, AnAssignmentOfAnotherTableIsRefused) {
  EXPECT_CODE(Work::assigned(three_items(), {.item_count = 2, .runs = {{0, 2}}, .cuts = {}}),
              StatusCode::kCorruption);
}

}  // namespace
}  // namespace torch_ckpt::work_test
