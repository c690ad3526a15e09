#include "format/zip_frame.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "base/crc.h"
#include "base/strided.h"
#include "support/golden.h"
#include "support/pickle_text.h"
#include "support/status_matchers.h"
#include "support/strided_frame.h"

namespace torch_ckpt::zip_frame_test {
namespace {

using namespace pickle_text;  // NOLINT(google-build-using-namespace)

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

// Bytes that are a valid element of every dtype.
std::string payload_bytes(int64_t nbytes) {
  std::string bytes;
  for (int64_t i = 0; i < nbytes; ++i) bytes += static_cast<char>(i % 2);
  return bytes;
}

// Head and tail of a frame, with the last bytes of a payload of zeros before the tail: what a
// reader sees of a slice too large to hold.
struct Ends {
  std::string head;
  std::string tail;
  int64_t nbytes = 0;

  Result<StoredTensor> parse() const { return parse_frame(as_bytes(head), as_bytes(tail), nbytes); }
};

std::string written_head(const TensorFrame& frame) {
  std::string head(static_cast<size_t>(frame.head_nbytes()), '\0');
  frame.write_head(std::as_writable_bytes(std::span(head)));
  return head;
}

std::string written_tail(const TensorFrame& frame, uint32_t crc) {
  std::string tail(static_cast<size_t>(frame.tail_nbytes()), '\0');
  frame.write_tail(crc, std::as_writable_bytes(std::span(tail)));
  return tail;
}

Ends ends_of(const TensorFrame& frame, uint32_t crc) {
  Ends ends{written_head(frame), written_tail(frame, crc), frame.nbytes()};
  EXPECT_GE(frame.payload_nbytes(), kFrameTailNbytes);
  ends.tail.insert(0, static_cast<size_t>(kFrameTailNbytes) - ends.tail.size(), '\0');
  return ends;
}

std::string slice_of(DType dtype, const Dims& sizes) {
  const Result<TensorFrame> frame = TensorFrame::make(dtype, sizes);
  EXPECT_OK(frame);
  if (!frame.ok()) return "";
  const std::string payload = payload_bytes(frame->payload_nbytes());
  return written_head(*frame) + payload + written_tail(*frame, crc32(0, as_bytes(payload)));
}

// Parses from memory of exactly the length a reader would have, so that a sanitizer sees a read
// beyond it.
Result<StoredTensor> parse_slice(const std::string& bytes) {
  const auto window = std::min(bytes.size(), static_cast<size_t>(kFrameTailNbytes));
  const std::vector<char> tail(bytes.end() - static_cast<std::ptrdiff_t>(window), bytes.end());
  const Bytes tail_bytes = as_bytes({tail.data(), tail.size()});
  const auto nbytes = static_cast<int64_t>(bytes.size());
  ASSIGN_OR_RETURN(const int64_t needed, frame_head_nbytes(tail_bytes, nbytes));
  EXPECT_LE(needed, nbytes);
  const std::vector<char> head(bytes.begin(), bytes.begin() + needed);
  return parse_frame(as_bytes({head.data(), head.size()}), tail_bytes, nbytes);
}

StatusCode code_of(const std::string& slice) { return parse_slice(slice).status().code(); }

const Record kPickle{"r/data.pkl", TensorText().pickle()};
const Record kStorage{"r/data/0", std::string(24, '\1')};

std::string zip_around(const TensorText& text) {
  return zip({{"r/data.pkl", text.pickle()}, kStorage});
}

TEST(ZipFrameTest, ReadsBackEveryDTypeAndShape) {
  for (int i = 0; i < kDTypeCount; ++i) {
    for (const Dims& sizes : std::vector<Dims>{{},
                                               {0},
                                               {1},
                                               {2, 3},
                                               {0, 4},
                                               {3, 0, 2},
                                               {5, 1, 2, 2},
                                               {300, 70},
                                               Dims(64, 1),
                                               {70000}}) {
      const auto dtype = static_cast<DType>(i);
      SCOPED_TRACE(std::string(dtype_info(dtype).name) + to_string(sizes));
      ASSERT_OK_AND_ASSIGN(const TensorFrame frame, TensorFrame::make(dtype, sizes));
      const std::string slice = slice_of(dtype, sizes);
      ASSERT_EQ(static_cast<int64_t>(slice.size()), frame.nbytes());
      EXPECT_EQ(frame.head_nbytes() % kFrameAlignment, 0);
      ASSERT_OK_AND_ASSIGN(const StoredTensor tensor, parse_slice(slice));
      EXPECT_EQ(tensor.dtype, dtype);
      EXPECT_EQ(tensor.sizes, sizes);
      EXPECT_EQ(tensor.strides, contiguous_strides(sizes));
      EXPECT_EQ(tensor.storage_offset, 0);
      EXPECT_EQ(tensor.payload_offset, frame.head_nbytes());
      EXPECT_EQ(tensor.payload_nbytes, *checked_numel(sizes) * itemsize(dtype));
      EXPECT_EQ(tensor.payload_crc, crc32(0, as_bytes(payload_bytes(tensor.payload_nbytes))));
    }
  }
}

// One dimension after another of growing sizes pads the head by every amount there is.
TEST(ZipFrameTest, AlignsThePayloadWhateverTheLengthOfThePickle) {
  Dims sizes;
  for (const int64_t size : {1, 300, 1, 1, 1, 70000, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}) {
    sizes.push_back(size);
    for (int i = 0; i < kDTypeCount; ++i) {
      ASSERT_OK_AND_ASSIGN(const TensorFrame frame,
                           TensorFrame::make(static_cast<DType>(i), sizes));
      EXPECT_EQ(frame.head_nbytes() % kFrameAlignment, 0);
      if (frame.payload_nbytes() < kFrameTailNbytes) continue;
      EXPECT_OK(ends_of(frame, 0).parse());
    }
  }
}

TEST(ZipFrameTest, CrossesTheLimitsOfThirtyTwoBits) {
  constexpr int64_t kLimit = 0xFFFFFFFF;
  for (const int64_t nbytes :
       {kLimit - 1000, kLimit - 700, kLimit - 401, kLimit - 400, kLimit - 384, kLimit - 1, kLimit,
        kLimit + 1, int64_t{1} << 40, kMax - 8192}) {
    SCOPED_TRACE(nbytes);
    ASSERT_OK_AND_ASSIGN(const TensorFrame frame, TensorFrame::make(DType::kUInt8, {{nbytes}}));
    ASSERT_OK_AND_ASSIGN(const StoredTensor tensor, ends_of(frame, 77).parse());
    EXPECT_EQ(tensor.payload_offset, frame.head_nbytes());
    EXPECT_EQ(tensor.payload_nbytes, nbytes);
    EXPECT_EQ(tensor.payload_crc, 77u);
  }
}

TEST(ZipFrameTest, RefusesSizesItCannotStore) {
  for (const Dims& sizes : {Dims{-1}, Dims{kMax, kMax}, Dims{kMax}, Dims{0, kMax, 2}}) {
    EXPECT_CODE(TensorFrame::make(DType::kFloat32, sizes), StatusCode::kInvalidArgument);
  }
  EXPECT_CODE(TensorFrame::make(DType::kUInt8, {{kMax - 100}}), StatusCode::kInvalidArgument);
}

TEST(ZipFrameTest, WritesTheGoldenFrames) {
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    const std::string name(dtype_info(dtype).name);
    expect_golden("tests/golden/frames/" + name + ".pt", slice_of(dtype, {2, 3}));
  }
  expect_golden("tests/golden/frames/scalar.pt", slice_of(DType::kFloat32, {}));
  expect_golden("tests/golden/frames/empty.pt", slice_of(DType::kFloat32, {0, 4}));
}

TEST(ZipFrameTest, MatchesTheExampleInFormatMd) {
  EXPECT_TRUE(format_md_listing("Example") == slice_of(DType::kBFloat16, {2, 3}))
      << "the example differs from what write_head and write_tail write";
}

TEST(ZipFrameTest, ReadsTensorsSavedByTorch) {
  struct Case {
    std::string name;
    StoredTensor tensor;
  };
  const std::vector<Case> cases = {
      {"float32", {DType::kFloat32, {2, 3}, {3, 1}, 0, 704, 24}},
      {"bfloat16", {DType::kBFloat16, {2, 3}, {3, 1}, 0, 704, 12}},
      {"uint16", {DType::kUInt16, {2, 3}, {3, 1}, 0, 704, 12}},
      {"complex32", {DType::kComplex32, {2, 3}, {3, 1}, 0, 768, 24}},
      {"float8_e4m3fn", {DType::kFloat8E4M3FN, {2, 3}, {3, 1}, 0, 768, 6}},
      {"scalar", {DType::kFloat32, {}, {}, 0, 704, 4}},
      {"empty", {DType::kFloat32, {0, 4}, {4, 1}, 0, 704, 0}},
      {"transposed", {DType::kFloat32, {3, 2}, {1, 3}, 0, 704, 24}},
      {"channels_last", {DType::kFloat32, {1, 2, 3, 2}, {12, 1, 4, 2}, 0, 704, 48}},
      {"sliced", {DType::kFloat32, {1, 2}, {3, 1}, 4, 704, 24}},
      {"empty_slice", {DType::kFloat32, {2, 0}, {1, 1}, 0, 704, 24}},
      {"requires_grad", {DType::kFloat32, {2}, {1}, 0, 704, 8}},
      {"protocol_4", {DType::kFloat32, {2, 3}, {3, 1}, 0, 704, 24}},
  };
  for (const Case& expected : cases) {
    SCOPED_TRACE(expected.name);
    const std::string slice = read_repository_file("tests/golden/stock/" + expected.name + ".pt");
    ASSERT_OK_AND_ASSIGN(const StoredTensor tensor, parse_slice(slice));
    EXPECT_EQ(tensor.dtype, expected.tensor.dtype);
    EXPECT_EQ(tensor.sizes, expected.tensor.sizes);
    EXPECT_EQ(tensor.strides, expected.tensor.strides);
    EXPECT_EQ(tensor.storage_offset, expected.tensor.storage_offset);
    EXPECT_EQ(tensor.payload_offset, expected.tensor.payload_offset);
    EXPECT_EQ(tensor.payload_nbytes, expected.tensor.payload_nbytes);
    const auto payload = slice.substr(static_cast<size_t>(tensor.payload_offset),
                                      static_cast<size_t>(tensor.payload_nbytes));
    EXPECT_EQ(tensor.payload_crc, crc32(0, as_bytes(payload)));
  }
}

TEST(ZipFrameTest, LeavesOtherThingsSavedByTorchToTorch) {
  for (const std::string name :
       {"parameter", "conjugate", "quantised", "dict", "two_tensors", "number"}) {
    const std::string slice = read_repository_file("tests/golden/stock/" + name + ".pt");
    EXPECT_EQ(code_of(slice), StatusCode::kUnsupported) << name;
  }
}

TEST(ZipFrameTest, NeedsNoMoreThanTheFirstPageOfAFrame) {
  ASSERT_OK_AND_ASSIGN(const TensorFrame frame, TensorFrame::make(DType::kUInt16, {{1 << 20, 7}}));
  const Ends ends = ends_of(frame, 0);
  ASSERT_OK_AND_ASSIGN(const int64_t needed, frame_head_nbytes(as_bytes(ends.tail), ends.nbytes));
  EXPECT_LE(needed, frame.head_nbytes());
  const std::string_view head(ends.head);
  EXPECT_OK(parse_frame(as_bytes(head.substr(0, needed)), as_bytes(ends.tail), ends.nbytes));
  EXPECT_CODE(parse_frame(as_bytes(head.substr(0, needed - 1)), as_bytes(ends.tail), ends.nbytes),
              StatusCode::kUnsupported);
}

TEST(ZipFrameTest, RefusesATailThatIsTooShortOrTooLong) {
  const std::string slice = slice_of(DType::kUInt8, {5000});
  const auto nbytes = static_cast<int64_t>(slice.size());
  const std::string_view text = slice;
  EXPECT_CODE(parse_frame(as_bytes(text), as_bytes(text.substr(text.size() - 4095)), nbytes),
              StatusCode::kInvalidArgument);
  EXPECT_CODE(parse_frame(as_bytes(text), as_bytes(text), nbytes - 1),
              StatusCode::kInvalidArgument);
  EXPECT_OK(parse_frame(as_bytes(text), as_bytes(text), nbytes));
}

TEST(ZipFrameTest, ReadsArchivesOfOtherWriters) {
  EXPECT_EQ(code_of(zip({kPickle, kStorage})), StatusCode::kOk);
  EXPECT_EQ(code_of(zip({kStorage, kPickle})), StatusCode::kOk);
  EXPECT_EQ(code_of(zip({kStorage, {"r/byteorder", "little"}, kPickle, {"r/version", "3\n"}})),
            StatusCode::kOk);
}

TEST(ZipFrameTest, RefusesArchivesThatHoldSomethingElse) {
  const auto unsupported = StatusCode::kUnsupported;
  const auto corruption = StatusCode::kCorruption;
  EXPECT_EQ(code_of(zip({kPickle})), unsupported);
  EXPECT_EQ(code_of(zip({kPickle, kStorage, {"r/data/1", ""}})), unsupported);
  EXPECT_EQ(code_of(zip({kPickle, {"r/data/0", kStorage.data, 0, 1}})), unsupported);
  EXPECT_EQ(code_of(zip({kPickle, kStorage, {"r/byteorder", "big"}})), unsupported);
  EXPECT_EQ(code_of(zip({kPickle, kStorage, {std::string("r/") + std::string(5000, 'x'), ""}})),
            unsupported);
  EXPECT_EQ(code_of(zip({{"r/data.pkl", std::string(70000, 'N')}, kStorage})), unsupported);

  // Compressed, and yet as long as its contents: torch would inflate what is not deflated.
  EXPECT_EQ(code_of(zip({kPickle, {"r/data/0", kStorage.data, 8}})), corruption);
  EXPECT_EQ(code_of(zip({})), corruption);
  EXPECT_EQ(code_of(zip({kStorage})), corruption);
  EXPECT_EQ(code_of(zip({kPickle, kPickle, kStorage})), corruption);
  EXPECT_EQ(code_of(zip({kPickle, {"other/data/0", kStorage.data}})), corruption);
  EXPECT_EQ(code_of(zip({{"data.pkl", kPickle.data}, kStorage})), corruption);
  EXPECT_EQ(code_of(zip({kPickle, {"r/data/1", kStorage.data}})), corruption);
  EXPECT_EQ(code_of(zip({kPickle, {"r/data/0", kStorage.data + "x"}})), corruption);
  EXPECT_EQ(code_of(zip({kPickle, kStorage, {"r/byteorder", "middle"}})), corruption);
  EXPECT_EQ(code_of(zip({kPickle, kStorage}, "a comment")), corruption);
  EXPECT_EQ(code_of(zip({kPickle, {"r/gap", "", 0, 0, false}, kStorage})), corruption);
}

TEST(ZipFrameTest, RefusesElementsBeyondTheStorage) {
  const auto corruption = StatusCode::kCorruption;
  EXPECT_EQ(code_of(zip_around({.strides = tuple(number(0) + number(0))})), StatusCode::kOk);
  EXPECT_EQ(code_of(zip_around({.strides = tuple(number(3) + number(2))})), corruption);
  EXPECT_EQ(code_of(zip_around({.offset = number(1)})), corruption);
  EXPECT_EQ(code_of(zip_around({.offset = number(kMax)})), corruption);
  EXPECT_EQ(code_of(zip_around({.sizes = tuple(number(3) + number(3))})), corruption);
  EXPECT_EQ(code_of(zip_around({.strides = tuple(number(kMax) + number(1))})), corruption);
  // A dimension that is never stepped may have any stride that makes sense in bytes.
  const std::string one_by_three = tuple(number(1) + number(3));
  EXPECT_EQ(code_of(zip_around({.sizes = one_by_three, .strides = tuple(number(99) + number(1))})),
            StatusCode::kOk);
  EXPECT_EQ(
      code_of(zip_around({.sizes = one_by_three, .strides = tuple(number(kMax / 2) + number(1))})),
      corruption);
  EXPECT_EQ(code_of(zip_around({.sizes = tuple(number(1) + number(0) + number(kMax) + number(9)),
                                .strides = tuple(number(1) + number(1) + number(1) + number(1))})),
            corruption);
}

TEST(ZipFrameTest, GivesATensorWithoutElementsPlainStrides) {
  ASSERT_OK_AND_ASSIGN(const StoredTensor tensor,
                       parse_slice(zip_around({.offset = number(kMax),
                                               .sizes = tuple(number(0) + number(3)),
                                               .strides = tuple(number(kMax) + number(kMax))})));
  EXPECT_EQ(tensor.strides, (Dims{3, 1}));
  EXPECT_EQ(tensor.storage_offset, 0);
}

TEST(ZipFrameTest, RefusesAFrameCutAtEitherEnd) {
  const std::string slice = slice_of(DType::kUInt16, {2, 3});
  for (size_t length = 0; length < slice.size(); ++length) {
    EXPECT_EQ(code_of(slice.substr(0, length)), StatusCode::kCorruption) << length;
    EXPECT_EQ(code_of(slice.substr(slice.size() - length)), StatusCode::kCorruption) << length;
  }
}

// Whatever bit is flipped in head or tail, the frame is refused or still leads to the same bytes.
TEST(ZipFrameTest, NoFlippedBitLeadsToOtherBytes) {
  ASSERT_OK_AND_ASSIGN(const TensorFrame large,
                       TensorFrame::make(DType::kUInt8, {{int64_t{1} << 33}}));
  for (const Ends& sound :
       {ends_of(*TensorFrame::make(DType::kFloat16, {{64, 64}}), 5), ends_of(large, 5)}) {
    ASSERT_OK_AND_ASSIGN(const StoredTensor expected, sound.parse());
    for (size_t bit = 0; bit < 8 * (sound.head.size() + sound.tail.size()); ++bit) {
      Ends flipped = sound;
      const size_t at = bit / 8;
      char& byte = at < sound.head.size() ? flipped.head[at] : flipped.tail[at - sound.head.size()];
      byte = static_cast<char>(byte ^ (1 << (bit % 8)));
      const Result<StoredTensor> found = flipped.parse();
      if (!found.ok()) continue;
      EXPECT_EQ(found->dtype, expected.dtype) << bit;
      EXPECT_EQ(found->sizes, expected.sizes) << bit;
      EXPECT_EQ(found->strides, expected.strides) << bit;
      EXPECT_EQ(found->storage_offset, expected.storage_offset) << bit;
      EXPECT_EQ(found->payload_offset, expected.payload_offset) << bit;
      EXPECT_EQ(found->payload_nbytes, expected.payload_nbytes) << bit;
    }
  }
}

TEST(ZipFrameTest, SurvivesRandomDamage) {
  constexpr unsigned kSeed = 20;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937 random(kSeed);
  const std::vector<std::string> sound = {slice_of(DType::kUInt16, {2, 3}),
                                          read_repository_file("tests/golden/stock/float32.pt"),
                                          zip({kPickle, kStorage})};
  constexpr std::array<uint8_t, 6> kExtremes = {0x00, 0x01, 0x7f, 0x80, 0xfe, 0xff};
  for (int round = 0; round < 100000; ++round) {
    std::string slice = sound[random() % sound.size()];
    for (auto change = random() % 8; change < 8; ++change) {
      // Runs of extreme bytes make extreme numbers.
      const size_t length = 1 + random() % 8;
      const size_t at = random() % (slice.size() - length);
      const auto value = static_cast<char>(kExtremes[random() % kExtremes.size()]);
      std::fill_n(slice.begin() + static_cast<std::ptrdiff_t>(at), length, value);
    }
    const StatusCode code = code_of(slice);
    ASSERT_TRUE(code == StatusCode::kOk || code == StatusCode::kCorruption ||
                code == StatusCode::kUnsupported)
        << round;
  }
}

}  // namespace
}  // namespace torch_ckpt::zip_frame_test
