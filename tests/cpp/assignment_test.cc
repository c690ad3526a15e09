#include "plan/assignment.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "base/xxh3.h"
#include "support/plan_items.h"
#include "support/status_matchers.h"

namespace torch_ckpt {
namespace {

const Assignment kSample = {
    300, {{0, 5}, {17, 200}, {250, 50}}, {{3, 0, 7}, {4, 9, 1}, {260, 5, 300}}};

void reseal(std::vector<std::byte>* bytes) {
  const size_t end = bytes->size() - sizeof(uint64_t);
  store_le(bytes->data() + end, xxh3(Bytes(*bytes).first(end)));
}

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
  EXPECT_EQ(written_items(kSample), 255);
}

TEST(AssignmentTest, EverythingUncutTakesFewBytes) {
  EXPECT_LE(encode({100000, {{0, 100000}}, {}}).size(), 32u);
}

TEST(AssignmentTest, AnyFlippedBitIsCorruption) {
  const std::vector<std::byte> bytes = encode(kSample);
  for (size_t at = 0; at < 8 * bytes.size(); ++at) {
    std::vector<std::byte> damaged = bytes;
    damaged[at / 8] ^= std::byte{1} << at % 8;
    ASSERT_CODE(decode_assignment(damaged), StatusCode::kCorruption) << "bit " << at;
  }
  for (size_t nbytes = 0; nbytes < bytes.size(); ++nbytes) {
    ASSERT_CODE(decode_assignment(Bytes(bytes).first(nbytes)), StatusCode::kCorruption) << nbytes;
  }
}

TEST(AssignmentTest, NoSealedNonsenseIsBelieved) {
  const std::vector<std::byte> bytes = encode(kSample);
  int64_t refused = 0;
  for (uint32_t seed = 0; seed < 20000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    std::vector<std::byte> odd = bytes;
    for (int64_t change = 1 + below(random, 2); change > 0; --change) {
      odd[static_cast<size_t>(8 + below(random, std::ssize(odd) - 16))] =
          static_cast<std::byte>(below(random, 256));
    }
    reseal(&odd);
    const Result<Assignment> read = decode_assignment(odd);
    if (read.ok()) {
      ASSERT_NO_FATAL_FAILURE(expect_sound(*read));
    } else {
      ++refused;
      ASSERT_CODE(read, StatusCode::kCorruption);
    }
  }
  EXPECT_GT(refused, 1000);
}

TEST(AssignmentTest, ANewerVersionIsUnsupported) {
  std::vector<std::byte> bytes = encode(kSample);
  bytes[4] = std::byte{2};
  reseal(&bytes);
  EXPECT_CODE(decode_assignment(bytes), StatusCode::kUnsupported);
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
}

}  // namespace
}  // namespace torch_ckpt
