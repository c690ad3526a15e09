#include "engine/load/verify_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "support/memory_file_system.h"
#include "support/opened_index.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::verify_job_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kBlock = 4096;
constexpr int64_t kNbytes = 30 * kBlock + 123;

struct Checked {
  MemoryFileSystem fs;
  std::string contents{as_text(random_bytes(kNbytes, 1))};
  std::shared_ptr<Index> index = std::make_shared<Index>();

  Checked() {
    BlockSummer summer(kBlock);
    summer.append(as_bytes(contents));
    index->save_id = "0123456789abcdef";
    index->files = {{"a", summer.finish()}};
    fs.put("c/a", contents);
  }
  Result<std::vector<ByteRange>> check(int64_t begin = 0, int64_t end = kNbytes) {
    ASSIGN_OR_RETURN(const auto job,
                     VerifyJob::make(fs, "c", opened(*index),
                                     {.buffer_nbytes = 128 << 10, .block_nbytes = 16 << 10}));
    return job->check(0, begin, end);
  }
  void flip(int64_t at) {
    contents[static_cast<size_t>(at)] ^= 4;
    fs.put("c/a", contents);
  }
};

TEST(VerifyJobTest, ASoundFileHasNoDamage) {
  Checked a;
  ASSERT_OK_AND_ASSIGN(const auto damaged, a.check());
  EXPECT_THAT(damaged, IsEmpty());
  ASSERT_OK_AND_ASSIGN(const auto part, a.check(4 * kBlock, 9 * kBlock));
  EXPECT_THAT(part, IsEmpty());
}

TEST(VerifyJobTest, EveryDamagedBlockIsListedAndNeighboursAreJoined) {
  Checked a;
  for (const int64_t at : {int64_t{0}, 5 * kBlock, 6 * kBlock + 7, kNbytes - 1}) a.flip(at);
  ASSERT_OK_AND_ASSIGN(const auto damaged, a.check());
  EXPECT_THAT(damaged, ElementsAre(ByteRange{0, kBlock}, ByteRange{5 * kBlock, 7 * kBlock},
                                   ByteRange{30 * kBlock, kNbytes}));
  ASSERT_OK_AND_ASSIGN(const auto part, a.check(6 * kBlock, 20 * kBlock));
  EXPECT_THAT(part, ElementsAre(ByteRange{6 * kBlock, 7 * kBlock}));
}

TEST(VerifyJobTest, AFileOfAnotherLengthIsDamagedFromThereAndNoneIsNotFound) {
  Checked a;
  const std::pair<std::string, ByteRange> cases[] = {
      {a.contents.substr(0, 7 * kBlock + 5), {7 * kBlock, kNbytes}},
      {"", {0, kNbytes}},
      {a.contents + "xyz", {kNbytes, kNbytes + 3}},
  };
  for (const auto& [contents, expected] : cases) {
    a.fs.put("c/a", contents);
    ASSERT_OK_AND_ASSIGN(const auto damaged, a.check());
    EXPECT_THAT(damaged, ElementsAre(expected));
  }
  ASSERT_OK(a.fs.remove("c/a"));
  EXPECT_CODE(a.check(), StatusCode::kNotFound);
}

TEST(VerifyJobTest, RangesThatAreNotThereAreRefused) {
  Checked a;
  EXPECT_CODE(a.check(1, kBlock), StatusCode::kInvalidArgument);
  EXPECT_CODE(a.check(0, kNbytes + 1), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace torch_ckpt::verify_job_test
