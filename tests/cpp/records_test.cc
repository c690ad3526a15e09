// Records: a load checks the CRC of a record that it reads almost whole, or of every record that it
// touches. The oracle is the flipped byte itself: whether it lies in a record that must be checked.

#include "engine/load/records.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/crc.h"
#include "engine/load/load_job.h"
#include "support/memory_file_system.h"
#include "support/opened_index.h"
#include "support/saved_checkpoint.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt::records_test {
namespace {

constexpr int64_t kUnread = int64_t{32} << 10;  // A load reads this much more of a small record.

// A file of records, with tensors of bytes at any places in them.
struct FileOfRecords {
  MemoryFileSystem fs;
  std::string contents;
  std::vector<StoredRecord> records;
  std::vector<ByteRange> places;  // Of the tensors.
  Index index;
  std::vector<std::byte> index_bytes;  // Outlive the jobs.

  FileOfRecords(const std::vector<int64_t>& lengths, std::mt19937& random) : fs() {
    for (const int64_t nbytes : lengths) {
      contents += std::string(100, 'x');  // A header.
      const auto begin = static_cast<int64_t>(contents.size());
      for (int64_t i = 0; i < nbytes; ++i) contents.push_back(static_cast<char>(random()));
      const ByteRange range = {begin, begin + nbytes};
      records.push_back({range, crc32(0, bytes_of(range))});
    }
    index.save_id = "0123456789abcdef";
    index.has_entries = index.has_paths = index.is_foreign = true;
    index.files.push_back({.name = "a", .sums = {}});
    index.files[0].sums.file_nbytes = static_cast<int64_t>(contents.size());
    put();
  }

  Bytes bytes_of(const ByteRange& range) const {
    return slice(as_bytes(contents), range.begin, range.nbytes());
  }
  void put() { fs.put(std::string(kCheckpoint) + "/a", contents); }
  void flip(int64_t at) {
    contents[static_cast<size_t>(at)] ^= 4;
    put();
  }
  static std::string name_of(size_t tensor) { return "t" + std::to_string(1000 + tensor); }

  // Adds a tensor of consecutive bytes.
  void add(const ByteRange& place) {
    const Dims sizes = {place.nbytes()};
    index.entries.push_back({.fqn = name_of(places.size()),
                             .is_tensor = true,
                             .dtype = "uint8",
                             .sizes = sizes,
                             .boxes = {{{0}, sizes, 0, place.begin, place.nbytes(), true}}});
    places.push_back(place);
  }

  std::shared_ptr<Records> known(bool full) const {
    return std::make_shared<Records>(
        full, std::map<std::string, std::vector<StoredRecord>>{{"a", records}});
  }

  Result<std::unique_ptr<LoadJob>> job(std::shared_ptr<Records> known) {
    LoadOptions options = tiny();
    options.buffer_nbytes = 1 << 20;
    options.block_nbytes = 256 << 10;
    options.records = std::move(known);
    index_bytes = written(index);
    ASSIGN_OR_RETURN(auto stored, StoredIndex::in_memory(index_bytes));
    return LoadJob::make(fs, kCheckpoint, options, std::move(stored));
  }

  // Loads tensors; returns the status. Values that load are right.
  Status load(LoadJob& job, const std::vector<size_t>& tensors, bool is_damaged = false) {
    std::vector<TestTensor> loaded;
    std::vector<TensorRequest> requests;
    for (const size_t i : tensors) {
      loaded.push_back(TestTensor::random(name_of(i), DType::kUInt8, {places[i].nbytes()}, 7));
    }
    for (size_t n = 0; n < tensors.size(); ++n) {
      const ByteRange& place = places[tensors[n]];
      requests.push_back(whole({"a", place.begin, place.nbytes(), name_of(tensors[n])}, loaded[n]));
    }
    RETURN_IF_ERROR(job.run(requests, {}).status());
    for (size_t n = 0; n < tensors.size() && !is_damaged; ++n) {
      EXPECT_TRUE(loaded[n].packed() == as_text(bytes_of(places[tensors[n]])));
    }
    return ok_status();
  }
};

ByteRange any_part(const ByteRange& range, std::mt19937& random) {
  int64_t a = range.begin + static_cast<int64_t>(random()) % (range.nbytes() + 1);
  int64_t b = range.begin + static_cast<int64_t>(random()) % (range.nbytes() + 1);
  if (a > b) std::swap(a, b);
  return {a, b};
}

TEST(RecordsTest, AFlippedByteIsFoundInEveryRecordThatIsReadAlmostWholeOrMustBeChecked) {
  for (uint32_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    std::vector<int64_t> lengths;
    for (int i = 0; i < 3; ++i) {
      lengths.push_back(1 + static_cast<int64_t>(random()) % (seed % 2 ? 900'000 : 60'000));
    }
    FileOfRecords file(lengths, random);
    for (size_t i = 0; i < 9; ++i) {
      const StoredRecord& record = file.records[random() % 3];
      file.add(random() % 3 ? any_part(record.range, random) : record.range);
    }
    std::vector<size_t> wanted;
    for (size_t i = 0; i < 9; ++i) {
      if (random() % 2) wanted.push_back(i);
    }
    const size_t damaged = random() % 3;
    const ByteRange range = file.records[damaged].range;
    file.flip(range.begin + static_cast<int64_t>(random()) % range.nbytes());

    // The bytes of the record that are read, in order, without those that are read twice.
    std::vector<ByteRange> read;
    for (const size_t i : wanted) {
      const ByteRange& place = file.places[i];
      if (place.nbytes() && place.begin >= range.begin && place.end <= range.end) {
        read.push_back(place);
      }
    }
    std::sort(read.begin(), read.end(),
              [](const ByteRange& a, const ByteRange& b) { return a.begin < b.begin; });
    std::vector<bool> is_read(static_cast<size_t>(range.nbytes()));
    for (const ByteRange& one : read) {
      std::fill(is_read.begin() + (one.begin - range.begin),
                is_read.begin() + (one.end - range.begin), true);
    }
    const auto unread = std::count(is_read.begin(), is_read.end(), false);

    ASSERT_OK_AND_ASSIGN(const auto full, file.job(file.known(true)));
    const Status status = file.load(*full, wanted, !read.empty());
    EXPECT_EQ(status.code() == StatusCode::kCorruption, !read.empty()) << status.message();
    ASSERT_OK_AND_ASSIGN(const auto job, file.job(file.known(false)));
    const Status found = file.load(*job, wanted, !read.empty());
    if (read.empty()) {
      EXPECT_OK(found);
    }
    const bool is_apart = std::adjacent_find(read.begin(), read.end(), [](auto& a, auto& b) {
                            return b.begin < a.end;
                          }) == read.end();
    if (!read.empty() && unread <= std::max(range.nbytes() / 16, kUnread) && is_apart) {
      EXPECT_CODE(found, StatusCode::kCorruption);
    }
    if (unread > std::max(range.nbytes() / 16, kUnread)) {
      EXPECT_OK(found);
    }
  }
}

TEST(RecordsTest, ARecordIsReadWholeOnceForAllJobsOfACheckpoint) {
  std::mt19937 random(1);
  FileOfRecords file({4 << 20}, random);
  const int64_t begin = file.records[0].range.begin;
  file.add({begin, begin + 100});
  file.add({begin + (2 << 20), begin + (2 << 20) + 100});
  const std::shared_ptr<Records> known = file.known(true);
  std::vector<int64_t> nbytes;
  for (const size_t tensor : {0u, 1u, 1u}) {
    ASSERT_OK_AND_ASSIGN(const auto job, file.job(known));
    const auto before = file.fs.operations().size();
    ASSERT_OK(file.load(*job, {tensor}));
    int64_t sum = 0;
    const std::vector<Operation> operations = file.fs.operations();
    for (size_t i = before; i < operations.size(); ++i) {
      if (operations[i].kind == Operation::Kind::kRead) sum += operations[i].nbytes;
    }
    nbytes.push_back(sum);
    EXPECT_EQ(job->loaded_nbytes(), 100);
  }
  EXPECT_GE(nbytes[0], 4 << 20);
  EXPECT_LT(nbytes[1], 1 << 20);
  EXPECT_LT(nbytes[2], 1 << 20);
}

TEST(RecordsTest, ADamagedRecordIsReadWholeAgain) {
  std::mt19937 random(2);
  FileOfRecords file({4 << 20}, random);
  const int64_t begin = file.records[0].range.begin;
  file.add({begin, begin + 100});
  const std::shared_ptr<Records> known = file.known(true);
  file.flip(begin + (3 << 20));
  for (int i = 0; i < 2; ++i) {
    ASSERT_OK_AND_ASSIGN(const auto job, file.job(known));
    const Status status = file.load(*job, {0}, true);
    EXPECT_CODE(status, StatusCode::kCorruption);
    EXPECT_NE(status.message().find("t1000"), std::string::npos);
    const std::string range =
        "[" + std::to_string(begin) + ", " + std::to_string(begin + (4 << 20)) + ")";
    EXPECT_NE(status.message().find(range), std::string::npos) << status.message();
  }
  file.flip(begin + (3 << 20));
  ASSERT_OK_AND_ASSIGN(const auto job, file.job(known));
  EXPECT_OK(file.load(*job, {0}));
}

}  // namespace
}  // namespace torch_ckpt::records_test
