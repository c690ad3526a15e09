#include "engine/load/archive_records.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/crc.h"
#include "format/zip_frame.h"
#include "support/memory_file_system.h"
#include "support/status_matchers.h"
#include "support/strided_frame.h"
#include "support/test_tensor.h"

namespace torch_ckpt::archive_records_test {
namespace {

using ::testing::HasSubstr;

const std::string kPayload(400, 'x');

std::string archive() { return strided_frame({10, 10}, {1, 10}, 0, kPayload, "more"); }

Result<Archive> read(const std::string& bytes) {
  MemoryFileSystem fs;
  fs.put("model.pt", bytes);
  return read_archive(fs, "model.pt");
}

TEST(ArchiveRecordsTest, RecordsAreWhereTheirBytesAre) {
  const std::string bytes = archive();
  ASSERT_OK_AND_ASSIGN(const Archive found, read(bytes));

  EXPECT_EQ(found.nbytes, ssize(bytes));
  ASSERT_EQ(found.records.size(), 3u);
  const ArchiveRecord& storage = found.records[2];
  EXPECT_EQ(storage.name, "r/data/0");
  EXPECT_EQ(bytes.substr(static_cast<size_t>(storage.offset), kPayload.size()), kPayload);
  EXPECT_EQ(storage.nbytes, ssize(kPayload));
  EXPECT_EQ(storage.crc, crc32(0, as_bytes(kPayload)));
}

TEST(ArchiveRecordsTest, RecordsBeforeDescriptorsAreFoundAsWell) {
  ASSERT_OK_AND_ASSIGN(const TensorFrame frame, TensorFrame::make(DType::kInt8, Dims{1000}));
  std::vector<std::byte> bytes(static_cast<size_t>(frame.nbytes()));
  const MutableBytes all(bytes);
  frame.write_head(slice(all, 0, frame.head_nbytes()));
  frame.write_tail(7, slice(all, frame.nbytes() - frame.tail_nbytes(), frame.tail_nbytes()));

  ASSERT_OK_AND_ASSIGN(const Archive found, read(std::string(as_text(bytes))));

  const ArchiveRecord& storage = found.records.back();
  EXPECT_EQ(storage.name, "archive/data/0");
  EXPECT_EQ(storage.offset, frame.head_nbytes());
  EXPECT_EQ(storage.nbytes, 1000);
  EXPECT_EQ(storage.crc, 7u);
}

TEST(ArchiveRecordsTest, AFileThatIsCutOffIsCorruptionThatNamesIt) {
  const std::string bytes = archive();
  for (size_t nbytes = 0; nbytes < bytes.size(); ++nbytes) {
    const Status status = read(bytes.substr(0, nbytes)).status();
    ASSERT_EQ(status.code(), StatusCode::kCorruption) << nbytes;
    ASSERT_THAT(status.message(), HasSubstr("model.pt"));
  }
}

// Whatever a directory says, what is read from there lies in the file.
TEST(ArchiveRecordsTest, RecordsOfADamagedDirectoryLieInTheFile) {
  const std::string good = archive();
  int sound = 0;
  for (size_t at = 0; at < good.size(); ++at) {
    for (const char flip : {'\x01', '\x80', '\xff'}) {
      std::string bytes = good;
      bytes[at] = static_cast<char>(bytes[at] ^ flip);
      const Result<Archive> found = read(bytes);
      if (!found.ok()) continue;
      ++sound;
      for (const ArchiveRecord& record : found->records) {
        ASSERT_TRUE(range_within(record.offset, record.nbytes, ssize(bytes))) << at;
      }
    }
  }
  EXPECT_GT(sound, 1000);  // Damage to the payload is not looked for here.
}

}  // namespace
}  // namespace torch_ckpt::archive_records_test
