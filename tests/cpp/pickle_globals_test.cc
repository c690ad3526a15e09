#include "format/pickle_globals.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "support/status_matchers.h"

namespace torch_ckpt::pickle_globals_test {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

// On the heap at its stated length, so that a sanitizer sees a read beyond it.
Result<std::vector<GlobalName>> globals_of(const std::string& pickle, std::vector<char>* memory) {
  memory->assign(pickle.begin(), pickle.end());
  memory->shrink_to_fit();
  return pickle_globals(as_bytes({memory->data(), memory->size()}));
}

StatusCode code_of(const std::string& pickle) {
  std::vector<char> memory;
  return globals_of(pickle, &memory).status().code();
}

TEST(PickleGlobalsTest, ListsThemInTheOrderOfThePickle) {
  std::vector<char> memory;
  const auto globals = globals_of(
      "\x80\x02"
      "cnumpy\ndtype\n(ios\nsystem\ncnumpy\ndtype\n.",
      &memory);
  ASSERT_OK(globals);
  EXPECT_THAT(*globals,
              ElementsAre(Pair("numpy", "dtype"), Pair("os", "system"), Pair("numpy", "dtype")));
}

TEST(PickleGlobalsTest, PassesOverTheArgumentsOfEveryOpcode) {
  using namespace std::string_literals;
  // Each argument has the opcode of a global in it, or of the end.
  const std::vector<std::string> pickles = {
      "K."s,
      "M.."s,
      "J...."s,
      "G........"s,
      "h."s,
      "j...."s,
      "q."s,
      "r...."s,
      "\x80."s,
      "\x95........"s,
      "\x8c\x02.c"s,
      "C\x02.c"s,
      "\x8a\x02.c"s,
      "U\x02.c"s,
      "X\x02\0\0\0.c"s,
      "B\x02\0\0\0.c"s,
      "\x8b\x02\0\0\0.c"s,
      "T\x02\0\0\0.c"s,
      "\x8d\x02\0\0\0\0\0\0\0.c"s,
      "\x8e\x02\0\0\0\0\0\0\0.c"s,
      "\x96\x02\0\0\0\0\0\0\0.c"s,
      "I.c\n"s,
      "L.c\n"s,
      "F.c\n"s,
      "S.c\n"s,
      "V.c\n"s,
      "P.c\n"s,
      "g.c\n"s,
      "p.c\n"s,
      "(]})Nt\x85\x86\x87\x88\x89QRbaesu\x81"s,
  };
  for (const std::string& pickle : pickles) {
    std::vector<char> memory;
    const auto globals = globals_of(pickle + "cm\nn\n." + "cbehind\nits end\n", &memory);
    ASSERT_OK(globals) << pickle;
    EXPECT_THAT(*globals, ElementsAre(Pair("m", "n"))) << pickle;
  }
}

TEST(PickleGlobalsTest, WhatIsCutOffIsCorrupt) {
  const std::string whole =
      "\x80\x02"
      "X\x03" +
      std::string(3, '\0') +
      "abc"
      "cm\nn\nK\x01.";
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_EQ(code_of(whole.substr(0, length)), StatusCode::kCorruption) << length;
  }
  EXPECT_EQ(code_of(whole), StatusCode::kOk);
}

TEST(PickleGlobalsTest, WhatIsNoPickleIsCorruptAndWhatIsTooCleverUnsupported) {
  const std::tuple<const char*, std::string, StatusCode> cases[] = {
      {"a length beyond the pickle", "\x8e" + std::string(8, '\xff') + ".",
       StatusCode::kCorruption},
      {"a text beyond the pickle", "X" + std::string(4, '\xff') + ".", StatusCode::kCorruption},
      {"no opcode", "\xff.", StatusCode::kCorruption},
      {"no opcode", "!.", StatusCode::kCorruption},
      {"a computed name", "\x8c\x02os\x8c\x06system\x93.", StatusCode::kUnsupported},
      {"a registered name", "\x82\x01.", StatusCode::kUnsupported},
      {"a dropped value", std::string("K\x01K\x02") + "0.", StatusCode::kUnsupported},
      {"values dropped to a mark", std::string("K\x01(K\x02") + "1.", StatusCode::kUnsupported},
  };
  for (const auto& [what, pickle, code] : cases) EXPECT_EQ(code_of(pickle), code) << what;
}

}  // namespace
}  // namespace torch_ckpt::pickle_globals_test
