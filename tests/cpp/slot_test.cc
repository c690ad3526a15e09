#include "engine/save/slot.h"

#include <gtest/gtest.h>

#include <vector>

#include "plan/plan_wire.h"
#include "plan/wire.h"
#include "support/plan_items.h"
#include "support/status_matchers.h"
#include "support/temp_directory.h"
#include "support/test_tensor.h"

namespace torch_ckpt::slot_test {
namespace {

SlotHeader header_of(int64_t sequence) {
  SlotHeader header;
  header.run.fill(std::byte{1});
  header.session.fill(std::byte{2});
  header.sequence = sequence;
  header.step = 10 * sequence;
  header.rank = 1;
  header.world_size = 2;
  header.ranks_here = 2;
  header.tensors_id.fill(std::byte{3});
  header.share.fill(std::byte{4});
  return header;
}

// A slot, and a rank that holds a matrix of floats and an object.
class SlotTest : public testing::Test {
 protected:
  SlotTest() {
    items_ = table_of({whole_item("w", float_facts({64, 100})), object_item("step", 8)});
  }

  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(slot_, Slot::create(directory_.path() + "/slot", 1 << 20));
  }

  SlotTable table(int64_t object_nbytes = 3) const {
    SlotTable table;
    table.directory = "run/step-1";
    table.version = "1.0.0";
    table.items = encode(items_);
    table.paths.emplace(3, std::byte{7});
    table.extents = encode(std::vector<ItemExtent>{{0, kMatrixAt, 64 * 100 * 4, true},
                                                   {1, kObjectAt, object_nbytes, false}});
    return table;
  }

  Status begin(int64_t sequence) {
    return slot_->begin(header_of(sequence), encode(table()), kPayload);
  }

  Status fill() {
    const PackedCopy copies[] = {{matrix_.live, kMatrixAt}};
    RETURN_IF_ERROR(slot_->copy(copies, 3));
    return slot_->put(kObjectAt, as_bytes("abc"));
  }

  void put_snapshot() {
    ASSERT_OK(begin(4));
    ASSERT_OK(fill());
    slot_->complete();
  }

  TempDirectory directory_;
  ItemTable items_;
  // Where the matrix and the object lie, and their end.
  static constexpr int64_t kMatrixAt = 0;
  static constexpr int64_t kObjectAt = 64 * 100 * 4;
  static constexpr int64_t kPayload = kObjectAt + 3;
  const TestTensor matrix_ = TestTensor::random("w", DType::kFloat32, {100, 64}).transposed(0, 1);
  std::unique_ptr<Slot> slot_;
};

TEST_F(SlotTest, WhatWasPutThereIsFoundByAnother) {
  ASSERT_NO_FATAL_FAILURE(put_snapshot());
  ASSERT_OK_AND_ASSIGN(const auto other, Slot::open(directory_.path() + "/slot", false));
  ASSERT_OK_AND_ASSIGN(const StoredSnapshot found, other->read());
  SlotHeader expected = header_of(4);
  expected.table_nbytes = found.header.table_nbytes;
  expected.table_sum = found.header.table_sum;
  expected.payload_begin = found.header.payload_begin;
  expected.payload_nbytes = kPayload;
  EXPECT_EQ(found.header, expected);
  EXPECT_EQ(found.table.directory, "run/step-1");
  EXPECT_EQ(found.table.version, "1.0.0");
  EXPECT_TRUE(found.table.sync);
  EXPECT_EQ(found.table.paths, table().paths);
  ASSERT_EQ(found.items.size(), 2);
  EXPECT_EQ(found.items.fqn(0), "w");
  const ItemExtent& w = found.extents[0];
  EXPECT_EQ(as_text(slice(Bytes(other->bytes()), w.offset, w.nbytes)), matrix_.packed());
  const ItemExtent& step = found.extents[1];
  EXPECT_EQ(as_text(slice(Bytes(other->bytes()), step.offset, step.nbytes)), "abc");
}

TEST_F(SlotTest, NothingIsThereBeforeItIsComplete) {
  EXPECT_CODE(slot_->read().status(), StatusCode::kNotFound);
  ASSERT_OK(begin(4));
  EXPECT_CODE(slot_->read().status(), StatusCode::kNotFound);
  ASSERT_OK(fill());
  EXPECT_CODE(slot_->read().status(), StatusCode::kNotFound);
  slot_->complete();
  EXPECT_OK(slot_->read());
}

TEST_F(SlotTest, TheFormerSnapshotIsGoneOnceTheNextHasBegun) {
  ASSERT_NO_FATAL_FAILURE(put_snapshot());
  ASSERT_OK(begin(5));
  EXPECT_CODE(slot_->header().status(), StatusCode::kNotFound);
  slot_->complete();
  slot_->clear();
  EXPECT_CODE(slot_->header().status(), StatusCode::kNotFound);
}

TEST_F(SlotTest, ASnapshotThatHasNoRoomLeavesTheFormerOne) {
  ASSERT_NO_FATAL_FAILURE(put_snapshot());
  EXPECT_CODE(slot_->begin(header_of(5), encode(table()), 1 << 20), StatusCode::kInvalidArgument);
  ASSERT_OK_AND_ASSIGN(const SlotHeader header, slot_->header());
  EXPECT_EQ(header.sequence, 4);
}

TEST_F(SlotTest, WhatReachesBeyondThePayloadIsRefused) {
  ASSERT_OK(begin(4));
  for (const int64_t offset : {int64_t{-64}, kPayload, kObjectAt}) {
    const PackedCopy copies[] = {{matrix_.live, offset}};
    EXPECT_CODE(slot_->copy(copies, 1), StatusCode::kInvalidArgument) << offset;
  }
  EXPECT_CODE(slot_->put(kPayload - 2, as_bytes("abc")), StatusCode::kInvalidArgument);
}

TEST_F(SlotTest, EveryDamagedByteOfPageAndTableIsNoticed) {
  ASSERT_NO_FATAL_FAILURE(put_snapshot());
  ASSERT_OK_AND_ASSIGN(const SlotHeader header, slot_->header());
  const auto refused = [&](int64_t at) {
    slot_->bytes()[static_cast<size_t>(at)] ^= std::byte{0x10};
    const Status status = slot_->read().status();
    slot_->bytes()[static_cast<size_t>(at)] ^= std::byte{0x10};
    return !status.ok();
  };
  for (int64_t at = 0; at < 20; ++at) EXPECT_TRUE(refused(at)) << at;
  for (int64_t at = 24; at < 256; ++at) EXPECT_TRUE(refused(at)) << at;
  for (int64_t at = 0; at < header.table_nbytes; ++at) {
    EXPECT_TRUE(refused(kSlotPage + at)) << at;
  }
  EXPECT_OK(slot_->read());
}

TEST_F(SlotTest, ASlotOfALaterVersionIsRefusedWithBothVersions) {
  ASSERT_NO_FATAL_FAILURE(put_snapshot());
  slot_->bytes()[16] = std::byte{3};
  const Status status = slot_->read().status();
  EXPECT_CODE(status, StatusCode::kUnsupported);
  EXPECT_EQ(status.message(), "a snapshot is of version 3, and this build reads 2");
  slot_->bytes()[16] = std::byte{1};
  EXPECT_CODE(slot_->read().status(), StatusCode::kCorruption);
}

TEST_F(SlotTest, ATableWhoseItemsAreNotThereIsRefused) {
  const std::vector<std::vector<ItemExtent>> wrong = {
      {{0, 0, 64 * 100 * 4, true}},                                // One is missing.
      {{0, 0, 64 * 100 * 4, true}, {1, kPayload, 1, false}},       // Beyond the end.
      {{0, 0, 64 * 100 * 4 - 4, true}, {1, kObjectAt, 3, false}},  // Too short.
      {{0, 0, 64 * 100 * 4, true}, {1, kObjectAt, 3, true}},       // An object as tensor.
      {{0, 0, 64 * 100 * 4, true}, {2, kObjectAt, 3, false}}};     // There is no such.
  for (const auto& extents : wrong) {
    SlotTable bad = table();
    bad.extents = encode(extents);
    ASSERT_OK(slot_->begin(header_of(1), encode(bad), kPayload));
    slot_->complete();
    EXPECT_CODE(slot_->read().status(), StatusCode::kCorruption);
  }
}

TEST_F(SlotTest, HeadersOfNoSnapshotAreRefused) {
  const auto code_of = [&](auto change) {
    SlotHeader header = header_of(1);
    header.payload_begin = 2 * kSlotPage;
    header.table_nbytes = 10;
    header.payload_nbytes = 100;
    change(header);
    complete_slot(slice(slot_->bytes(), 0, kSlotPage), header);
    return slot_->header().status().code();
  };
  EXPECT_EQ(code_of([](SlotHeader&) {}), StatusCode::kOk);
  const auto corrupt = StatusCode::kCorruption;
  EXPECT_EQ(code_of([](SlotHeader& h) { h.rank = 2; }), corrupt);
  EXPECT_EQ(code_of([](SlotHeader& h) { h.rank = -1; }), corrupt);
  EXPECT_EQ(code_of([](SlotHeader& h) { h.world_size = 0; }), corrupt);
  EXPECT_EQ(code_of([](SlotHeader& h) { h.ranks_here = 3; }), corrupt);
  EXPECT_EQ(code_of([](SlotHeader& h) { h.ranks_here = 1; }), corrupt) << "the other is nowhere";
  EXPECT_EQ(code_of([](SlotHeader& h) { h.node_count = 2; }), corrupt) << "without a rank";
  EXPECT_EQ(code_of([](SlotHeader& h) { h.ranks_here = 1, h.node_count = 2; }), StatusCode::kOk);
  EXPECT_EQ(code_of([](SlotHeader& h) { h.world_size = h.ranks_here = 1 << 21; }), corrupt);
  EXPECT_EQ(code_of([](SlotHeader& h) { h.node = 1; }), corrupt);
  EXPECT_EQ(code_of([](SlotHeader& h) { h.sequence = -1; }), corrupt);
  EXPECT_EQ(code_of([](SlotHeader& h) { h.table_nbytes = int64_t{1} << 62; }), corrupt);
  EXPECT_EQ(code_of([](SlotHeader& h) { h.payload_begin = kSlotPage; }), corrupt);
  EXPECT_EQ(code_of([](SlotHeader& h) { h.payload_nbytes = 1 << 20; }), corrupt);
  EXPECT_EQ(code_of([](SlotHeader& h) { h.payload_nbytes = -1; }), corrupt);
}

TEST(SlotTableTest, CutOffOrTooLongItIsRefused) {
  SlotTable table;
  table.directory = "d";
  table.items.resize(9);
  const std::vector<std::byte> whole = encode(table);
  EXPECT_OK(decode_slot_table(whole));
  for (size_t nbytes = 0; nbytes < whole.size(); ++nbytes) {
    EXPECT_CODE(decode_slot_table(Bytes(whole).first(nbytes)).status(), StatusCode::kCorruption);
  }
}

TEST(SlotTableTest, OnlyThisVersionAndTheOneBeforeAreRead) {
  const auto code_of = [](uint32_t version) {
    WireWriter writer;
    writer.byte(0);
    writer.word("/step-1");
    writer.word("");
    writer.varint(0);
    writer.varint(0);
    return decode_slot_table(writer.finish("TCST", version)).status().code();
  };
  EXPECT_EQ(code_of(0), StatusCode::kUnsupported);
  EXPECT_EQ(code_of(1), StatusCode::kOk);
  EXPECT_EQ(code_of(2), StatusCode::kOk);
  EXPECT_EQ(code_of(3), StatusCode::kUnsupported);
  EXPECT_EQ(wire_version(encode(SlotTable{})), 2U);
}

}  // namespace
}  // namespace torch_ckpt::slot_test
