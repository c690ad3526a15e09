#include "plan/paths.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "plan/plan_wire.h"
#include "plan/wire.h"
#include "support/damaged_frame.h"
#include "support/plan_items.h"
#include "support/status_matchers.h"

namespace torch_ckpt::paths_test {
namespace {

using ::testing::HasSubstr;

using Key = std::variant<std::string, int64_t>;

StatePath path_of(std::vector<Key> keys) {
  StatePath path;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i > 0) path.fqn += '.';
    const auto* text = std::get_if<std::string>(&keys[i]);
    path.fqn += text != nullptr ? *text : std::to_string(std::get<int64_t>(keys[i]));
  }
  path.keys = std::move(keys);
  return path;
}

std::vector<StatePath> sample() {
  return {path_of({"model", "layers", 0, "weight"}),
          path_of({"model", "layers", 10, "weight"}),
          path_of({"optim", "state", "model.layers.0.weight", "step"}),
          path_of({"optim", "param_groups", 3, "lr"}),
          path_of({""}),
          path_of({7, "7"})};
}

int64_t text_nbytes(const std::vector<StatePath>& paths) {
  int64_t nbytes = 0;
  for (const StatePath& path : paths) nbytes += std::ssize(path.fqn);
  return nbytes;
}

std::vector<std::byte> bytes_of(const std::vector<StatePath>& paths) {
  auto bytes = encode(paths);
  EXPECT_OK(bytes);
  return bytes.ok() ? *bytes : std::vector<std::byte>();
}

std::vector<std::byte> finished(const WireWriter& body) { return body.finish("TCPP", 1); }

// One path of this FQN, with these numbers for its keys, the first of them their count.
std::vector<std::byte> one_path(std::string_view fqn, const std::vector<int64_t>& keys) {
  WireWriter out;
  out.varint(1);
  out.varint(0);
  out.word(fqn);
  for (const int64_t key : keys) out.varint(key);
  return finished(out);
}

// Keys with dots, digits and nothing in them, so that one FQN has many paths.
std::vector<StatePath> random_paths(std::mt19937& random) {
  const std::vector<std::string> words = {"",
                                          "a",
                                          ".",
                                          "0",
                                          "12",
                                          "-1",
                                          "model.layers",
                                          "w",
                                          "\xC3\xA9",
                                          "weight",
                                          std::string("\0x", 2)};
  std::vector<StatePath> paths;
  for (int64_t i = pick(random, 40); i > 0; --i) {
    std::vector<Key> keys;
    if (!paths.empty() && pick(random, 2) == 0) {
      keys = paths.back().keys;
      keys.resize(1 + static_cast<size_t>(pick(random, std::ssize(keys))));
    }
    for (int64_t k = pick(random, 5) + (keys.empty() ? 1 : 0); k > 0; --k) {
      if (pick(random, 3) == 0) {
        const auto most = std::numeric_limits<int64_t>::max() >> (1 + pick(random, 62));
        keys.emplace_back(pick(random, 4) == 0 ? most : pick(random, 200));
      } else {
        keys.emplace_back(words[static_cast<size_t>(pick(random, std::ssize(words)))]);
      }
    }
    paths.push_back(path_of(std::move(keys)));
  }
  return paths;
}

TEST(PathsTest, RandomPathsComeBack) {
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const std::vector<StatePath> paths = random_paths(random);
    ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, encode(paths));
    ASSERT_OK_AND_ASSIGN(const std::vector<StatePath> read, decode_paths(bytes));
    ASSERT_EQ(read, paths);
  }
}

TEST(PathsTest, APathTakesItsOwnWordsAndAByteForEachKey) {
  std::vector<StatePath> paths;
  for (int64_t layer = 0; layer < 1000; ++layer) {
    for (const char* moment : {"exp_avg", "exp_avg_sq", "step"}) {
      const std::string weight = "model.layers." + std::to_string(layer) + ".attention.q.weight";
      paths.push_back(path_of({"optimizer", "state", weight, moment}));
    }
  }
  EXPECT_LE(bytes_of(paths).size(), 23 * paths.size());
  EXPECT_GT(text_nbytes(paths), 50 * std::ssize(paths));
  EXPECT_EQ(bytes_of({}).size(), 17u);
}

TEST(PathsTest, KeysThatDoNotMakeUpTheNameAreRefused) {
  const StatePath cases[] = {
      {"a", {}},           {"", {}},         {"a.b", {"a"}},    {"a.b", {"a", "c"}},
      {"a.b", {"b", "a"}}, {"a", {"a", ""}}, {"a.1", {"a", 2}}, {"a.01", {"a", 1}},
      {"ab", {"a", "b"}},  {"a.", {"a"}},
  };
  for (const StatePath& path : cases) {
    const auto refused = encode({path_of({"fine"}), path});
    EXPECT_CODE(refused, StatusCode::kInvalidArgument) << path.fqn;
    EXPECT_THAT(refused.status().message(), HasSubstr("'" + path.fqn + "'"));
  }
}

TEST(PathsTest, APositionThatNoListHasIsRefused) {
  constexpr int64_t kMost = (int64_t{1} << 62) - 1;
  for (const int64_t position : {int64_t{-1}, std::numeric_limits<int64_t>::min(), kMost + 1,
                                 std::numeric_limits<int64_t>::max()}) {
    const StatePath path = path_of({"a", position});
    const auto refused = encode({path});
    EXPECT_CODE(refused, StatusCode::kInvalidArgument) << position;
    EXPECT_THAT(refused.status().message(), HasSubstr("'" + path.fqn + "'"));
  }
  const std::vector<StatePath> largest = {path_of({"a", kMost})};
  ASSERT_OK_AND_ASSIGN(const auto read, decode_paths(bytes_of(largest)));
  EXPECT_EQ(read, largest);
}

TEST(PathsTest, AnyDamageIsRefused) { expect_damage_is_refused(bytes_of(sample()), decode_paths); }

TEST(PathsTest, NoSealedNonsenseIsBelieved) {
  expect_nonsense_is_refused(
      bytes_of(sample()), decode_paths,
      [](const std::vector<StatePath>& paths, const std::vector<std::byte>& bytes) {
        ASSERT_LE(4 * std::ssize(paths), std::ssize(bytes));
        ASSERT_LE(text_nbytes(paths), kMaxTextGrowth * std::ssize(bytes));
        // Encoding checks that keys make up the name.
        ASSERT_OK_AND_ASSIGN(const auto again, encode(paths));
        ASSERT_OK_AND_ASSIGN(const auto read, decode_paths(again));
        ASSERT_EQ(read, paths);
      });
}

TEST(PathsTest, KeysThatDoNotSpellTheNameAreCorruption) {
  ASSERT_OK_AND_ASSIGN(const auto read, decode_paths(one_path("ab.12.", {3, 4, 25, 0})));
  EXPECT_EQ(read, std::vector{path_of({"ab", 12, ""})});
  const std::vector<int64_t> cases[] = {
      {0},               // No keys.
      {1, 4},            // Text is left over.
      {2, 4, 4},         // Likewise.
      {3, 4, 25},        // A key is missing.
      {3, 4, 23, 0},     // Other digits.
      {3, 2, 25, 0},     // Not at a dot.
      {3, 4, 25, 2},     // Beyond the end.
      {4, 4, 25, 0, 0},  // No dot for the last.
      {3, 4, 25, 0, 0},  // A number is left over.
      {int64_t{1} << 61, 4, 25, 0},
      {1, (int64_t{1} << 62) + 4},
  };
  for (const auto& keys : cases) {
    EXPECT_CODE(decode_paths(one_path("ab.12.", keys)), StatusCode::kCorruption)
        << ::testing::PrintToString(keys);
  }
  EXPECT_CODE(decode_paths(one_path("", {0})), StatusCode::kCorruption);
  // Digits as a list has them.
  EXPECT_CODE(decode_paths(one_path("a.01", {2, 2, 3})), StatusCode::kCorruption);
}

TEST(PathsTest, SharingMoreThanThereIsIsCorruption) {
  for (const int64_t shared : {1, 2, 3}) {
    WireWriter out;
    out.varint(2);
    out.varint(0);
    out.word("ab");
    out.varint(1);
    out.varint(4);
    out.varint(shared);
    out.word("c");
    out.varint(1);
    out.varint(shared > 1 ? 6 : 4);  // As if it shared at most what there is.
    EXPECT_CODE(decode_paths(finished(out)),
                shared > 2 ? StatusCode::kCorruption : StatusCode::kOk);
  }
  WireWriter first;
  first.varint(1);
  first.varint(1);
  first.word("a");
  first.varint(1);
  first.varint(2);
  EXPECT_CODE(decode_paths(finished(first)), StatusCode::kCorruption);
}

TEST(PathsTest, FewBytesCannotAskForManyPaths) {
  for (const int64_t count : {int64_t{2}, int64_t{1} << 30, std::numeric_limits<int64_t>::max()}) {
    WireWriter out;
    out.varint(count);
    out.append(as_bytes(std::string_view("\0\0\1\0", 4)));
    EXPECT_CODE(decode_paths(finished(out)), StatusCode::kCorruption) << count;
  }
}

TEST(PathsTest, FewBytesCannotAskForMuchText) {
  WireWriter out;
  out.varint(1001);
  for (int i = 0; i <= 1000; ++i) {
    out.varint(i == 0 ? 0 : 999 + i);
    out.word(i == 0 ? std::string(1000, 'x') : "y");
    out.varint(1);
    out.varint(2 * (1000 + i));
  }
  EXPECT_CODE(decode_paths(finished(out)), StatusCode::kCorruption);
}

TEST(PathsTest, NamesThatWouldGrowTooMuchAreWrittenInFull) {
  std::vector<StatePath> paths;
  for (int64_t i = 0; i < 500; ++i) paths.push_back(path_of({std::string(10000, 'x'), i}));
  const std::vector<std::byte> bytes = bytes_of(paths);
  EXPECT_LE(text_nbytes(paths), kMaxTextGrowth * std::ssize(bytes));
  EXPECT_LT(std::ssize(bytes), text_nbytes(paths) / 10);
  ASSERT_OK_AND_ASSIGN(const auto read, decode_paths(bytes));
  EXPECT_EQ(read, paths);
}

}  // namespace
}  // namespace torch_ckpt::paths_test
