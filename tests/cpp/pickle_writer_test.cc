#include "format/pickle_writer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "support/status_matchers.h"

namespace torch_ckpt::pickle_writer_test {
namespace {

using namespace pickle_opcodes;

constexpr size_t kFrameBegin = 11;  // Behind PROTO, and FRAME with its length.

// What is written between the start of the only frame and STOP.
template <typename Write>
std::string written(const Write& write) {
  PickleWriter out(0);
  write(out);
  const auto pickle = out.finish();
  EXPECT_OK(pickle);
  const std::string text(as_text(*pickle));
  EXPECT_EQ(text.substr(0, 3), "\x80\x04\x95");
  EXPECT_EQ(load_le<uint64_t>(pickle->data() + 3), text.size() - kFrameBegin);
  EXPECT_EQ(text.back(), '.');
  return text.substr(kFrameBegin, text.size() - kFrameBegin - 1);
}

// The number that an opcode and its argument push.
int64_t number_in(std::string_view op) {
  switch (static_cast<uint8_t>(op[0])) {
    case kBinInt1:
      return static_cast<uint8_t>(op[1]);
    case kBinInt2:
      return load_le<uint16_t>(as_bytes(op).data() + 1);
    case kBinInt:
      return load_le<int32_t>(as_bytes(op).data() + 1);
    default:
      EXPECT_EQ(static_cast<uint8_t>(op[0]), kLong1);
      EXPECT_EQ(static_cast<size_t>(op[1]), op.size() - 2);
      return pickled_long(op.substr(2));
  }
}

TEST(PickleWriterTest, NumbersTakeTheFewestBytes) {
  const std::vector<std::pair<int64_t, size_t>> nbytes_of = {
      {0, 2},
      {255, 2},
      {256, 3},
      {65535, 3},
      {65536, 5},
      {-1, 5},
      {INT32_MAX, 5},
      {INT32_MIN, 5},
      {int64_t{1} << 31, 7},
      {(int64_t{1} << 39) - 1, 7},
      {int64_t{1} << 39, 8},
      {-(int64_t{1} << 39), 7},
      {-(int64_t{1} << 39) - 1, 8},
      {(int64_t{1} << 55) - 1, 9},
      {int64_t{1} << 55, 10},
      {std::numeric_limits<int64_t>::max(), 10},
      {std::numeric_limits<int64_t>::min(), 10},
  };
  for (const auto& [number, nbytes] : nbytes_of) {
    PickleWriter out(0);
    out.number(number);
    ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> pickle, out.finish());
    EXPECT_EQ(pickle.size(), kFrameBegin + nbytes + 1) << number;
    EXPECT_EQ(number_in(as_text(pickle).substr(kFrameBegin, nbytes)), number);
  }
}

TEST(PickleWriterTest, EqualTextsAreWrittenOnce) {
  const std::string same = "long";
  EXPECT_EQ(written([&](PickleWriter& out) {
              EXPECT_EQ(out.text("long"), 0u);
              EXPECT_EQ(out.text(""), 1u);
              EXPECT_EQ(out.text(same), 0u);
              EXPECT_EQ(out.text(""), 1u);
            }),
            std::string("\x8c\x04long\x94\x8c\x00\x94h\x00h\x01", 14));
}

TEST(PickleWriterTest, ATextThatIsShorterThanItsMemoIsWrittenAgain) {
  std::vector<std::string> texts;
  for (int i = 0; i < 256; ++i) texts.push_back("text " + std::to_string(i));
  const std::string all = written([&](PickleWriter& out) {
    for (const std::string& text : texts) out.text(text);
    for (const std::string text : {"abc", "abcd"}) {
      PickleWord word = {text};
      out.word(word);
      out.word(word);
      out.text(text);
    }
  });
  const std::string end = std::string("\x8c\x03") + "abc\x94" + "\x8c\x03" + "abc" + "\x8c\x03" +
                          "abc" + "\x8c\x04" + "abcd\x94" + std::string("j\x01\x01\0\0", 5) +
                          std::string("j\x01\x01\0\0", 5);
  EXPECT_EQ(all.substr(all.size() - end.size()), end);
}

TEST(PickleWriterTest, LongTextsHaveLongLengths) {
  const std::string text(256, 'x');
  EXPECT_EQ(written([&](PickleWriter& out) { out.text(text); }),
            std::string("X\x00\x01\x00\x00", 5) + text + "\x94");
}

TEST(PickleWriterTest, GlobalsAreMemoisedWithTheirModules) {
  EXPECT_EQ(written([](PickleWriter& out) {
              PickleGlobal size = {"torch", "Size"};
              PickleGlobal half = {"torch", "half"};
              out.global(size);
              out.global(half);
              out.global(size);
            }),
            std::string("\x8c\x05torch\x94\x8c\x04Size\x93\x94", 16) +
                std::string("h\x00\x8c\x04half\x93\x94h\x01", 12));
}

TEST(PickleWriterTest, TuplesOfEveryLength) {
  const std::vector<std::string> expected = {")", "N\x85", "NN\x86", "NNN\x87", "(NNNNt"};
  for (size_t count = 0; count < expected.size(); ++count) {
    EXPECT_EQ(written([&](PickleWriter& out) { out.tuple(count, [&](size_t) { out.op(kNone); }); }),
              expected[count]);
  }
}

TEST(PickleWriterTest, ContainersAreFilledInBatches) {
  const auto fill = [](size_t count) {
    return written([&](PickleWriter& out) {
      out.fill(count, kAppend, kAppends, [&](size_t i) { out.boolean(i % 2 == 0); });
    });
  };
  EXPECT_EQ(fill(0), "");
  EXPECT_EQ(fill(1),
            "\x88"
            "a");
  EXPECT_EQ(fill(2),
            "(\x88\x89"
            "e");
  const std::string many = fill(2001);
  EXPECT_EQ(many.size(), 2001 + 2 * 2 + 1u);
  EXPECT_EQ(many[1001], 'e');
  EXPECT_EQ(many[1002], '(');
  EXPECT_EQ(many.back(), 'a');
}

// Each frame says how long it is, so the next opcode after each is a frame or nothing.
TEST(PickleWriterTest, FramesFollowOneAnother) {
  PickleWriter out(1000);
  out.fill(100'000, kAppend, kAppends, [&](size_t i) { out.number(static_cast<int64_t>(i)); });
  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> pickle, out.finish());
  size_t at = 2;
  int frames = 0;
  for (; at < pickle.size(); ++frames) {
    ASSERT_EQ(pickle[at], std::byte{kFrame});
    const auto nbytes = load_le<uint64_t>(pickle.data() + at + 1);
    EXPECT_LT(nbytes, 75'000u);
    at += 9 + nbytes;
  }
  EXPECT_EQ(at, pickle.size());
  EXPECT_EQ(frames, 6);
}

TEST(MemoTableTest, KeysAreTheirBytes) {
  std::vector<std::string> keys;
  for (uint32_t i = 0; i < 5000; ++i) keys.push_back(std::to_string(i * i));
  keys.push_back("");
  MemoTable table;
  for (uint32_t i = 0; i < keys.size(); ++i) {
    Memo& memo = table[as_bytes(keys[i])];
    ASSERT_EQ(memo, kNoMemo) << keys[i];
    memo = i;
  }
  EXPECT_EQ(table[Bytes()], keys.size() - 1);
  for (uint32_t i = 0; i < keys.size(); ++i) EXPECT_EQ(table[as_bytes(std::string(keys[i]))], i);
}

}  // namespace
}  // namespace torch_ckpt::pickle_writer_test
