#include "format/sealed_metadata.h"

#include <gtest/gtest.h>

#include <vector>

#include "support/example_index.h"
#include "support/status_matchers.h"

namespace torch_ckpt {
namespace {

TEST(SealedMetadataTest, PickleTrailerAndIndexBelongTogether) {
  ASSERT_OK_AND_ASSIGN(const SealedMetadata sealed, seal_metadata(example_index(), {}));
  const Bytes metadata(sealed.metadata);
  ASSERT_OK_AND_ASSIGN(
      const MetadataTrailer trailer,
      parse_metadata_trailer(metadata.last(kMetadataTrailerNbytes), ssize(metadata)));
  const Bytes pickle = metadata.first(metadata.size() - kMetadataTrailerNbytes);
  EXPECT_EQ(pickle_nbytes(metadata), ssize(pickle));
  EXPECT_EQ(trailer.save_id, example_index().save_id);
  EXPECT_EQ(trailer.pickle, Seal::of(pickle));

  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> alone, pickle_metadata(example_index(), {}));
  EXPECT_EQ(as_text(pickle), as_text(alone));
  Index expected = example_index();
  expected.metadata = trailer.pickle;
  ASSERT_OK_AND_ASSIGN(const Index index, parse_index(sealed.index));
  EXPECT_EQ(index, expected);
}

TEST(SealedMetadataTest, WhatAnIndexCannotHoldIsRefused) {
  Index without_entries = example_index();
  without_entries.has_entries = false;
  EXPECT_CODE(seal_metadata(without_entries, {}), StatusCode::kInvalidArgument);
  Index odd_id = example_index();
  odd_id.save_id = "short";
  EXPECT_CODE(seal_metadata(odd_id, {}), StatusCode::kInvalidArgument);
  Index twice = example_index();
  twice.entries[1].fqn = twice.entries[0].fqn;
  EXPECT_CODE(seal_metadata(twice, {}), StatusCode::kInvalidArgument);
  Index no_utf8 = example_index();
  no_utf8.entries[1].fqn = "\xff";
  EXPECT_CODE(seal_metadata(no_utf8, {}), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace torch_ckpt
