#include "format/commit_files.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "support/example_index.h"
#include "support/status_matchers.h"

namespace torch_ckpt::commit_files_test {
namespace {

TEST(SealedMetadataTest, PickleTrailerAndIndexBelongTogether) {
  ASSERT_OK_AND_ASSIGN(const CommitFiles files, encode_commit_files(example_index(), {}));
  const Bytes metadata(files.metadata);
  ASSERT_OK_AND_ASSIGN(
      const MetadataTrailer trailer,
      parse_metadata_trailer(metadata.last(kMetadataTrailerNbytes), ssize(metadata)));
  const Bytes pickle = metadata.first(metadata.size() - kMetadataTrailerNbytes);
  EXPECT_EQ(trailer.save_id, example_index().save_id);
  EXPECT_EQ(trailer.pickle, FileDigest::of(pickle));

  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> alone, pickle_metadata(example_index(), {}));
  EXPECT_EQ(as_text(pickle), as_text(alone));
  Index expected = example_index();
  expected.metadata = trailer.pickle;
  ASSERT_OK_AND_ASSIGN(const Index index, parse_index(files.index));
  EXPECT_EQ(index, expected);
}

TEST(SealedMetadataTest, WhatAnIndexCannotHoldIsRefused) {
  const std::function<void(Index&)> breaches[] = {
      [](Index& index) { index.has_entries = false; },
      [](Index& index) { index.save_id = "short"; },
      [](Index& index) { index.entries[1].fqn = index.entries[0].fqn; },
      [](Index& index) { index.entries[1].fqn = "\xff"; },
  };
  for (const auto& breach : breaches) {
    Index index = example_index();
    breach(index);
    EXPECT_CODE(encode_commit_files(index, {}), StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace torch_ckpt::commit_files_test
