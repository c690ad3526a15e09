// The bytes of a pickle, compared with the example in FORMAT.md, and what cannot be pickled. What
// stock DCP makes of pickles is tested in tests/python/test_commit_files.py.

#include "format/metadata_pickle.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "support/example_index.h"
#include "support/golden.h"
#include "support/status_matchers.h"

namespace torch_ckpt::metadata_pickle_test {
namespace {

StorageMeta example_storage() {
  return {.checkpoint_id = "/run/step-1",
          .checkpoint_is_path = true,
          .save_id = "0123456789abcdef",
          .modules = {"torch_ckpt: sealed by an index"}};
}

TEST(MetadataPickleTest, WritesTheExampleInFormatMd) {
  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> written,
                       pickle_metadata(example_index(), example_storage()));
  EXPECT_TRUE(format_md_listing("Example of a pickle") == as_text(written))
      << "the example differs from what pickle_metadata writes";
}

TEST(MetadataPickleTest, NothingIsPickledOfAnEmptyIndexButItself) {
  Index nothing;
  nothing.has_entries = true;
  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> empty, pickle_metadata(nothing, {}));
  const std::string text(as_text(empty));
  EXPECT_NE(text.find("state_dict_metadata\x94}\x8c\x0cplanner_data\x94N"), std::string::npos);
  EXPECT_NE(text.find("storage_data\x94}"), std::string::npos);
}

TEST(MetadataPickleTest, ABoxMoreTakesFewBytes) {
  Index index = example_index();
  const auto nbytes = [&] {
    const auto pickle = pickle_metadata(index, {});
    EXPECT_OK(pickle);
    return static_cast<int64_t>(pickle->size());
  };
  index.entries[0].boxes.resize(1000, index.entries[0].boxes[0]);
  const int64_t before = nbytes();
  index.entries[0].boxes.resize(2000, index.entries[0].boxes[0]);
  EXPECT_LE(nbytes() - before, 61 * 1000);
}

TEST(MetadataPickleTest, WhatHasNoFormIsRefused) {
  const std::vector<std::pair<std::string, std::function<void(Index&)>>> changes = {
      {"a tensor of ", [](Index& i) { i.entries[0].dtype = "int8\n"; }},
      {"a tensor of ", [](Index& i) { i.entries[0].dtype = ""; }},
      {"spiral", [](Index& i) { i.entries[0].memory_format = "spiral"; }},
      {"in file 1 of 1", [](Index& i) { i.entries[0].boxes[1].file = 1; }},
      {"in file -1 of 1", [](Index& i) { i.entries[1].boxes[0].file = -1; }},
      {"has 0 boxes", [](Index& i) { i.entries[1].boxes.clear(); }},
      {"has 2 boxes", [](Index& i) { i.entries[1].boxes.resize(2); }},
  };
  for (const auto& [why, change] : changes) {
    Index index = example_index();
    change(index);
    const auto pickle = pickle_metadata(index, {});
    EXPECT_CODE(pickle, StatusCode::kInvalidArgument);
    EXPECT_NE(pickle.status().message().find(why), std::string::npos) << pickle.status().message();
  }
}

}  // namespace
}  // namespace torch_ckpt::metadata_pickle_test
