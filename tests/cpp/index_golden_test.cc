// The bytes of an index, compared with the example in FORMAT.md.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "format/index_file.h"
#include "support/example_index.h"
#include "support/golden.h"
#include "support/status_matchers.h"

namespace torch_ckpt {
namespace {

TEST(IndexGoldenTest, WritesTheExampleInFormatMd) {
  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> written, write_index(example_index()));
  EXPECT_TRUE(format_md_listing("Example of an index") == as_text(written))
      << "the example differs from what write_index writes";
}

TEST(IndexGoldenTest, ReadsTheExampleInFormatMd) {
  const std::string shown = format_md_listing("Example of an index");
  ASSERT_OK_AND_ASSIGN(const Index index, parse_index(as_bytes(shown)));
  EXPECT_EQ(index, example_index());
}

TEST(IndexGoldenTest, TheTrailerIsTheOneInFormatMd) {
  const std::string shown = format_md_listing("Example of a trailer");
  const MetadataTrailer trailer = {example_index().save_id, example_index().metadata};
  ASSERT_OK_AND_ASSIGN(const auto written, write_metadata_trailer(trailer));
  EXPECT_TRUE(shown == as_text(written)) << "the example differs from what is written";
  ASSERT_OK_AND_ASSIGN(const MetadataTrailer read,
                       parse_metadata_trailer(as_bytes(shown), 12 + kMetadataTrailerNbytes));
  EXPECT_EQ(read, trailer);
}

}  // namespace
}  // namespace torch_ckpt
