#include "plan/assignment.h"

#include <gtest/gtest.h>

#include <vector>

#include "support/damaged_frame.h"
#include "support/plan_items.h"
#include "support/status_matchers.h"

namespace torch_ckpt::assignment_test {
namespace {

const Assignment kSample = {
    300, {{0, 5}, {17, 200}, {250, 50}}, {{3, 0, 7}, {4, 9, 1}, {260, 5, 300}}};

void expect_sound(const Assignment& assignment) {
  int64_t end = -1;
  for (const Run& run : assignment.runs) {
    ASSERT_GT(run.first, end);
    ASSERT_GT(run.count, 0);
    end = run.first + run.count;
  }
  ASSERT_LE(end, assignment.item_count);
  int64_t former = -1;
  for (const Cut& cut : assignment.cuts) {
    ASSERT_GT(cut.item, former);
    ASSERT_GT(cut.rows, 0);
    ASSERT_GE(cut.first_row, 0);
    former = cut.item;
    bool is_written = false;
    for (const Run& run : assignment.runs) {
      is_written |= run.first <= cut.item && cut.item < run.first + run.count;
    }
    ASSERT_TRUE(is_written);
  }
}

TEST(AssignmentTest, WhatIsEncodedIsDecoded) {
  for (const Assignment& assignment : {Assignment{}, Assignment{7, {}, {}}, kSample}) {
    ASSERT_OK_AND_ASSIGN(const Assignment read, decode_assignment(encode(assignment)));
    EXPECT_EQ(read, assignment);
  }
}

TEST(AssignmentTest, EverythingUncutTakesFewBytes) {
  EXPECT_LE(encode({100000, {{0, 100000}}, {}}).size(), 32u);
}

TEST(AssignmentTest, AnyDamageIsRefused) {
  expect_damage_is_refused(encode(kSample), decode_assignment);
}

TEST(AssignmentTest, NoSealedNonsenseIsBelieved) {
  expect_nonsense_is_refused(
      encode(kSample), decode_assignment,
      [](const Assignment& read, const std::vector<std::byte>&) { expect_sound(read); });
}

TEST(AssignmentTest, OnlyRowsThatThereAreCanBeCut) {
  const ItemTable table = table_of({object_item("o", 5), float_shard("w", {10, 3}, {4, 0}, {6, 3}),
                                    whole_item("scalar", float_facts({}))});
  EXPECT_OK(check_assignment({3, {{0, 3}}, {{1, 2, 4}}}, table));
  EXPECT_EQ(cut_box(table.box(1), {1, 2, 4}), (Box{{6, 0}, {4, 3}}));
  EXPECT_CODE(check_assignment({3, {{0, 3}}, {{1, 2, 5}}}, table), StatusCode::kCorruption);
  EXPECT_CODE(check_assignment({3, {{0, 3}}, {{0, 0, 1}}}, table), StatusCode::kCorruption);
  EXPECT_CODE(check_assignment({3, {{0, 3}}, {{2, 0, 1}}}, table), StatusCode::kCorruption);
  EXPECT_CODE(check_assignment({2, {{0, 2}}, {}}, table), StatusCode::kCorruption);

  Facts opaque = float_facts({10, 3});
  opaque.is_opaque = true;
  const ItemTable odd = table_of({whole_item("odd", opaque)});
  EXPECT_OK(check_assignment({1, {{0, 1}}, {}}, odd));
  EXPECT_CODE(check_assignment({1, {{0, 1}}, {{0, 0, 5}}}, odd), StatusCode::kCorruption);
}

}  // namespace
}  // namespace torch_ckpt::assignment_test
