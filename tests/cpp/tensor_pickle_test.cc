#include "format/tensor_pickle.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <utility>

#include "support/pickle_text.h"
#include "support/status_matchers.h"

namespace torch_ckpt::tensor_pickle_test {
namespace {

using namespace pickle_text;  // NOLINT(google-build-using-namespace)

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

std::string written(DType dtype, const Dims& sizes) {
  // On the heap at its stated length, so that a sanitizer sees a byte too many.
  std::vector<std::byte> out(static_cast<size_t>(kMaxTensorPickleNbytes));
  const Result<int64_t> nbytes = write_tensor_pickle(dtype, sizes, out);
  EXPECT_OK(nbytes);
  if (!nbytes.ok()) return "";
  return std::string(as_text(slice(Bytes(out), 0, *nbytes)));
}

// A pickle parsed from memory of exactly its length, so that a sanitizer sees a read beyond it.
Result<PickledTensor> parsed(const std::string& pickle, std::vector<char>* memory) {
  memory->assign(pickle.begin(), pickle.end());
  memory->shrink_to_fit();
  return parse_tensor_pickle(as_bytes({memory->data(), memory->size()}));
}

StatusCode code_of(const std::string& pickle) {
  std::vector<char> memory;
  return parsed(pickle, &memory).status().code();
}

TEST(TensorPickleTest, ReadsWhatItWrites) {
  const std::vector<Dims> shapes = {{},
                                    {0},
                                    {1},
                                    {255},
                                    {256},
                                    {65535, 65536},
                                    {0, 4},
                                    {3, 0, 2},
                                    {2, 3, 4},
                                    {1, 2, 1, 3, 1},
                                    {int64_t{1} << 31, 2},
                                    {kMax / 16},
                                    Dims(64, 1)};
  for (int i = 0; i < kDTypeCount; ++i) {
    for (const Dims& sizes : shapes) {
      SCOPED_TRACE(std::string(dtype_info(static_cast<DType>(i)).name) + to_string(sizes));
      const std::string pickle = written(static_cast<DType>(i), sizes);
      ASSERT_OK_AND_ASSIGN(const PickledTensor tensor, parse_tensor_pickle(as_bytes(pickle)));
      EXPECT_EQ(tensor.dtype, static_cast<DType>(i));
      EXPECT_EQ(tensor.sizes, sizes);
      EXPECT_EQ(tensor.strides, contiguous_strides(sizes));
      EXPECT_EQ(tensor.storage_offset, 0);
      EXPECT_EQ(tensor.storage_nbytes, *checked_numel(sizes) * itemsize(tensor.dtype));
      EXPECT_EQ(tensor.storage_key, "0");
    }
  }
}

TEST(TensorPickleTest, TheLongestPickleFitsItsRoom) {
  Dims sizes(kMaxDims, 1);
  sizes.back() = int64_t{1} << 40;  // Every stride but one takes the longest form.
  const std::string pickle = written(DType::kFloat8E4M3FNUZ, sizes);
  EXPECT_OK(parse_tensor_pickle(as_bytes(pickle)));
}

TEST(TensorPickleTest, RefusesSizesThatNoTensorHas) {
  std::array<std::byte, kMaxTensorPickleNbytes> out;
  for (const Dims& sizes : {Dims{-1}, Dims{0, -1}, Dims{kMax, 2}, Dims{kMax}, Dims{0, kMax, kMax},
                            Dims(kMaxDims + 1, 1)}) {
    EXPECT_CODE(write_tensor_pickle(DType::kInt16, sizes, out), StatusCode::kInvalidArgument)
        << to_string(sizes);
  }
}

TEST(TensorPickleTest, ReadsStridesAndOffsetsOfViews) {
  TensorText text;
  text.storage = storage(global("torch", "HalfStorage"), "key 7", 100);
  text.offset = number(12);
  text.strides = tuple(number(1) + number(0));
  text.requires_grad = "\x88";
  std::vector<char> memory;
  ASSERT_OK_AND_ASSIGN(const PickledTensor tensor, parsed(text.pickle(), &memory));
  EXPECT_EQ(tensor.dtype, DType::kFloat16);
  EXPECT_EQ(tensor.sizes, (Dims{2, 3}));
  EXPECT_EQ(tensor.strides, (Dims{1, 0}));
  EXPECT_EQ(tensor.storage_offset, 12);
  EXPECT_EQ(tensor.storage_nbytes, 200);
  EXPECT_EQ(tensor.storage_key, "key 7");
}

// The same tensor in the spellings of other protocols and picklers.
TEST(TensorPickleTest, ReadsEverySpellingOfAPlainTensor) {
  const std::string call = TensorText().call();
  const std::string v4_global =
      "\x8c\x0c"
      "torch._utils\x94\x8c\x12_rebuild_tensor_v2\x94\x93\x94";
  TensorText v4;
  v4.function = v4_global;
  TensorText v3;
  v3.function = global("torch._utils", "_rebuild_tensor_v3");
  v3.storage = storage(global("torch.storage", "UntypedStorage"), "0", 24);
  v3.more = global("torch", "uint32");
  TensorText no_hooks;
  no_hooks.hooks = "}";
  TensorText none_hooks;
  none_hooks.hooks = "N";
  none_hooks.more = "N";
  TensorText scalar;
  scalar.sizes = scalar.strides = ")";
  for (const std::string& pickle :
       {"\x80\x02" + call + ".", call + ".",
        "\x80\x04\x95" + bytes_of(v4.call().size() + 1, 8) + v4.call() + ".", v3.pickle(),
        no_hooks.pickle(), none_hooks.pickle(), scalar.pickle()}) {
    std::vector<char> memory;
    EXPECT_OK(parsed(pickle, &memory));
  }
}

TEST(TensorPickleTest, LeavesEverythingElseToTorch) {
  const std::vector<std::pair<const char*, TensorText>> cases = {
      {"parameter", {.function = global("torch._utils", "_rebuild_parameter")}},
      {"any other function", {.function = global("os", "system")}},
      {"no function", {.function = number(1)}},
      {"quantised", {.storage = storage(global("torch", "QInt8Storage"), "0", 6)}},
      {"untyped storage in the typed form",
       {.storage = storage(global("torch.storage", "UntypedStorage"), "0", 24)}},
      {"storage class of another module",
       {.storage = storage(global("os", "FloatStorage"), "0", 6)}},
      {"storage that is no record", {.storage = number(0)}},
      {"numeric key",
       {.storage = tuple(text("storage") + global("torch", "FloatStorage") + number(0) +
                         text("cpu") + number(6)) +
                   "Q"}},
      {"location that is no text",
       {.storage = tuple(text("storage") + global("torch", "FloatStorage") + text("0") + number(0) +
                         number(6)) +
                   "Q"}},
      {"hooks", {.hooks = global("os", "system") + ")R"}},
      {"metadata", {.more = "}"}},
      {"metadata with conj", {.more = "}" + text("conj") + "\x88s"}},
      {"symbolic sizes", {.sizes = tuple(text("s0") + text("s1"))}},
      {"too many dimensions", {.sizes = "(" + std::string(kMaxDims + 1, 'N') + "t"}},
      {"a wide number", {.offset = "\x8a\x09" + std::string(9, '\x01')}},
      {"a subclass's state", {.more = "}b"}},
  };
  for (const auto& [name, text] : cases) {
    EXPECT_EQ(code_of(text.pickle()), StatusCode::kUnsupported) << name;
  }
  EXPECT_EQ(code_of("\x80\x02}q" + bytes_of(0, 1) + "."), StatusCode::kUnsupported) << "a dict";
  EXPECT_EQ(code_of("\x80\x02K\x05."), StatusCode::kUnsupported) << "a number";
  EXPECT_EQ(code_of(std::string(1 << 20, '(')), StatusCode::kUnsupported) << "too long";
  EXPECT_EQ(code_of("Nr" + bytes_of(0xFFFFFFFF, 4) + "."), StatusCode::kUnsupported) << "memo";

  TensorText v3{.function = global("torch._utils", "_rebuild_tensor_v3"),
                .storage = storage(global("torch.storage", "UntypedStorage"), "0", 24)};
  EXPECT_EQ(code_of(v3.pickle()), StatusCode::kUnsupported) << "no dtype";
  v3.more = global("torch", "bits16");
  EXPECT_EQ(code_of(v3.pickle()), StatusCode::kUnsupported) << "unknown dtype";
}

TEST(TensorPickleTest, RefusesNumbersThatNoTensorHas) {
  const std::vector<std::pair<const char*, TensorText>> cases = {
      {"negative size", {.sizes = tuple(number(-2) + number(3))}},
      {"negative stride", {.strides = tuple(number(-2) + number(3))}},
      {"negative offset", {.offset = number(-1)}},
      {"negative storage", {.storage = storage(global("torch", "FloatStorage"), "0", -6)}},
      {"storage too large", {.storage = storage(global("torch", "FloatStorage"), "0", kMax / 2)}},
      {"elements too many", {.sizes = tuple(number(kMax) + number(3))}},
      {"bytes too many", {.sizes = tuple(number(kMax / 6) + number(3))}},
      {"more strides than sizes", {.sizes = tuple(number(2))}},
  };
  for (const auto& [name, text] : cases) {
    EXPECT_EQ(code_of(text.pickle()), StatusCode::kCorruption) << name;
  }
}

TEST(TensorPickleTest, RefusesWhatIsNoPickle) {
  const std::string pickle = TensorText().pickle();
  for (const std::string& bad :
       {std::string(), std::string("\xff."), std::string("\x80\x09N."),
        std::string("ctorch\nno end"), "X" + bytes_of(0xFFFFFFFF, 4) + "abc", pickle + "N"}) {
    EXPECT_EQ(code_of(bad), StatusCode::kCorruption) << testing::PrintToString(bad);
  }
}

TEST(TensorPickleTest, LeavesOpcodesInAnyOtherOrderToTorch) {
  for (const char* other : {".", "R.", "NR.", "Q.", "t.", "(.", "((Q.", "\x86.", "(N\x86.", "\x93.",
                            "NN\x93.", "h\x01.", "NN.", "((((", "]."}) {
    EXPECT_EQ(code_of(other), StatusCode::kUnsupported) << testing::PrintToString(other);
  }
  const std::vector<TensorText> cases = {
      {.sizes = number(2) + number(3) + "\x87"},               // Takes the offset along.
      {.sizes = number(2) + number(3) + "\x85"},               //
      {.sizes = "(" + number(2) + number(3) + "\x86"},         // Leaves a mark.
      {.sizes = number(2) + number(3) + "t"},                  //
      {.sizes = "(" + number(2) + number(3) + ")"},            //
      {.sizes = "K\x02K\x03\x86q\x05", .strides = "h\x05"},    // One tuple twice.
      {.requires_grad = number(1)},                            //
      {.hooks = global("collections", "OrderedDict") + "]R"},  //
  };
  for (const TensorText& text : cases) {
    EXPECT_EQ(code_of(text.pickle()), StatusCode::kUnsupported)
        << testing::PrintToString(text.pickle());
  }
}

TEST(TensorPickleTest, RefusesATruncatedPickleAtEveryLength) {
  const std::string pickle = written(DType::kUInt16, {2, 3, 4, 70000});
  for (size_t length = 0; length < pickle.size(); ++length) {
    EXPECT_EQ(code_of(pickle.substr(0, length)), StatusCode::kCorruption) << length;
  }
}

TEST(TensorPickleTest, SurvivesEveryValueOfEveryByte) {
  const std::string pickle = TensorText().pickle();
  for (size_t at = 0; at < pickle.size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      std::string changed = pickle;
      changed[at] = static_cast<char>(value);
      const StatusCode code = code_of(changed);
      EXPECT_TRUE(code == StatusCode::kOk || code == StatusCode::kCorruption ||
                  code == StatusCode::kUnsupported)
          << at << " = " << value;
    }
  }
}

}  // namespace
}  // namespace torch_ckpt::tensor_pickle_test
