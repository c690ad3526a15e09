// Several ranks, as threads, load what they want of one checkpoint together.

#include "engine/exchange/exchange_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/exchange/node_peers.h"
#include "engine/load/load_job.h"
#include "support/later_device.h"
#include "support/memory_file_system.h"
#include "support/opened_index.h"
#include "support/saved_checkpoint.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"
#include "support/thread_peers.h"

namespace torch_ckpt::exchange_stream_test {
namespace {

const LoadOptions kTiny = {.buffer_nbytes = 1 << 20, .block_nbytes = 256 << 10, .threads = 2};
constexpr int64_t kBudget = int64_t{4} << 20;

std::string packed_box(const TestTensor& tensor, const Box& box) {
  return tensor.narrowed(box.offsets, box.sizes).packed();
}

// What a rank wants a box in.
enum class Where { kHost, kDevice, kNoMemory };

// One rank: a disk and a device of its own, and boxes of the stored tensors that it wants.
struct TestRank {
  std::unique_ptr<MemoryFileSystem> fs;
  std::unique_ptr<LaterDevice> device = std::make_unique<LaterDevice>();
  std::optional<ReachableFiles> reachable = std::nullopt;
  std::vector<TensorRequest> requests;
  std::vector<StoredSlice> raw;  // Slices that it wants as they are.
  std::vector<LoadedBytes> raw_loaded;
  std::vector<TestTensor> loaded;  // Empty where a request comes without memory.
  std::vector<std::string> expected;
  std::vector<std::string> handed_over;
  Status status;
  int64_t read_nbytes = 0;
};

// A checkpoint of three files, and ranks that want of it what a test says.
struct TestWorld {
  std::vector<std::vector<TestTensor>> saved;
  std::vector<std::vector<StoredSlice>> slices;
  std::vector<std::string> contents;  // By file.
  std::vector<TestRank> ranks;
  PeerNetwork network;
  bool one_node = false;  // Whether ranks copy from each other's memory.
  LoadOptions options = kTiny;
  std::shared_ptr<const StoredIndex> index;  // Null, unless a test has it written.

  std::shared_ptr<Peers> peers_of(size_t rank) {
    std::map<int32_t, int64_t> pids;
    for (size_t other = 0; one_node && other < ranks.size(); ++other) {
      if (other != rank) pids.emplace(static_cast<int32_t>(other), getpid());
    }
    return make_node_peers(network.peers_of(static_cast<int32_t>(rank)), std::move(pids));
  }

  explicit TestWorld(size_t rank_count, uint32_t seed = 1) : ranks(rank_count) {
    for (uint32_t file = 0; file < 3; ++file) {
      saved.push_back({
          TestTensor::random("small" + std::to_string(file), DType::kInt16, {30, 20}, seed + file),
          TestTensor::random("large" + std::to_string(file), DType::kFloat32, {300 + file, 700},
                             seed + file + 10),
          TestTensor::random("bytes" + std::to_string(file), DType::kUInt8, {200003},
                             seed + file + 20),
      });
    }
    for (size_t rank = 0; rank < rank_count; ++rank) {
      ranks[rank].fs = std::make_unique<MemoryFileSystem>(
          MemoryOptions{.seed = seed + static_cast<uint32_t>(rank)});
      slices.clear();
      for (size_t file = 0; file < saved.size(); ++file) {
        slices.push_back(save_file(*ranks[rank].fs, "f" + std::to_string(file), saved[file]));
      }
    }
    for (size_t file = 0; file < saved.size(); ++file) {
      contents.push_back(*ranks[0].fs->contents("step-1/f" + std::to_string(file)));
    }
  }

  // Makes an index of all files, with checksums.
  void write_index() {
    Index out;
    for (size_t file = 0; file < saved.size(); ++file) {
      const std::string name = "f" + std::to_string(file);
      BlockSummer summer(64 << 10);
      summer.append(as_bytes(*ranks[0].fs->contents("step-1/" + name)));
      out.files.push_back({name, summer.finish()});
      const Layout layout = layout_of(saved[file]);
      for (size_t i = 0; i < saved[file].size(); ++i) {
        out.entries.push_back(
            entry_of(saved[file][i].live, layout.slices[i], static_cast<int64_t>(file)));
      }
    }
    std::ranges::sort(out.entries, {}, &IndexedEntry::fqn);
    out.has_entries = true;
    out.save_id = "0123456789abcdef";
    index = opened(out);
  }

  // Leaves only these files on the disk of a rank.
  void keep_files(size_t rank, const std::set<int>& files) {
    ranks[rank].reachable.emplace();
    for (int file = 0; file < 3; ++file) {
      const std::string name = "f" + std::to_string(file);
      if (files.contains(file)) {
        ranks[rank].reachable->insert(name);
      } else {
        EXPECT_OK(ranks[rank].fs->remove("step-1/" + name));
      }
    }
  }

  LoadOptions options_of(size_t rank) const {
    LoadOptions out = options;
    out.reachable = ranks[rank].reachable;
    return out;
  }

  void want(size_t rank, size_t file, size_t tensor, const Box& box, Where where = Where::kHost) {
    TestRank& one = ranks[rank];
    const TestTensor& stored = saved[file][tensor];
    one.expected.push_back(packed_box(stored, box));
    one.handed_over.emplace_back();
    const auto seed = static_cast<uint32_t>(1000 + one.loaded.size());
    one.loaded.push_back(TestTensor::random("live", stored.live.dtype, box.sizes, seed));
    LiveTensor live = one.loaded.back().live;
    if (where == Where::kNoMemory) live.data = nullptr;
    if (where == Where::kDevice) live = one.device->holding(live);
    one.requests.push_back({slices[file][tensor], box, live});
  }

  void want_all(size_t rank, Where where = Where::kHost) {
    for (size_t file = 0; file < saved.size(); ++file) {
      for (size_t tensor = 0; tensor < saved[file].size(); ++tensor) {
        const Dims& sizes = saved[file][tensor].live.sizes;
        want(rank, file, tensor, {Dims(sizes.size(), 0), sizes}, where);
      }
    }
  }

  Status load(size_t rank, const std::vector<std::byte>& plan, int64_t budget_nbytes) {
    TestRank& one = ranks[rank];
    ASSIGN_OR_RETURN(RankExchange part, RankExchange::decode(plan));
    ASSIGN_OR_RETURN(auto exchange, ExchangeStream::make(*one.fs, std::move(part), peers_of(rank),
                                                         budget_nbytes, std::chrono::seconds(60)));
    ASSIGN_OR_RETURN(const auto job, LoadJob::make(*one.fs, kCheckpoint, options_of(rank), index));
    const HandOver hand_over = [&](int64_t request, LoadedBytes bytes) {
      one.handed_over[static_cast<size_t>(request)] =
          as_text({bytes.data.get(), static_cast<size_t>(bytes.nbytes)});
      return ok_status();
    };
    ASSIGN_OR_RETURN(LoadResult result, job->run(one.requests, one.raw, hand_over, exchange.get()));
    one.raw_loaded = std::move(result.bytes);
    return exchange->finish();
  }

  // As FastReader does: all say what they want, one shares it out, all read.
  void load_together(int64_t budget_nbytes = kBudget) {
    std::vector<WantedBytes> wanted;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      TestRank& one = ranks[rank];
      LoadOptions planning = options_of(rank);
      if (index == nullptr) planning.verify = true;
      ASSERT_OK_AND_ASSIGN(const auto job, LoadJob::make(*one.fs, kCheckpoint, planning, index));
      ASSERT_OK_AND_ASSIGN(WantedBytes bytes, job->wanted(one.requests, one.raw));
      wanted.push_back(*WantedBytes::decode(bytes.encode()));
    }
    ExchangeInput input = {.nodes = std::vector<std::string>(ranks.size()),
                           .budget_nbytes = budget_nbytes};
    for (const WantedBytes& one : wanted) input.wanted.push_back(&one);
    for (const TestRank& rank : ranks) {
      input.reachable.push_back(rank.reachable ? &*rank.reachable : nullptr);
    }
    ASSERT_OK_AND_ASSIGN(const Exchange exchange, Exchange::make(input));
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      threads.emplace_back([&, rank] {
        const auto before = static_cast<size_t>(std::ssize(ranks[rank].fs->operations()));
        const auto plan = exchange.of_rank(static_cast<int32_t>(rank)).encode();
        ranks[rank].status = load(rank, plan, budget_nbytes);
        if (!ranks[rank].status.ok()) network.hang_up(static_cast<int32_t>(rank));
        const auto operations = ranks[rank].fs->operations();
        for (size_t i = before; i < operations.size(); ++i) {
          if (operations[i].kind == Operation::Kind::kRead) {
            ranks[rank].read_nbytes += operations[i].nbytes;
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  int64_t stored_nbytes() const {
    int64_t nbytes = 0;
    for (const auto& file : slices) nbytes += file.back().offset + file.back().nbytes;
    return nbytes;
  }
  int64_t read_nbytes() const {
    int64_t nbytes = 0;
    for (const TestRank& rank : ranks) nbytes += rank.read_nbytes;
    return nbytes;
  }

  void expect_loaded() const {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const TestRank& one = ranks[rank];
      EXPECT_OK(one.status);
      for (size_t i = 0; i < one.requests.size(); ++i) {
        const bool with_memory = one.requests[i].live.data != nullptr;
        EXPECT_TRUE((with_memory ? one.loaded[i].packed() : one.handed_over[i]) == one.expected[i])
            << "rank " << rank << ", request " << i << ": " << describe(one.requests[i].slice);
      }
      if (!one.status.ok()) continue;
      for (size_t i = 0; i < one.raw.size(); ++i) {
        const auto file = static_cast<size_t>(one.raw[i].file.back() - '0');
        EXPECT_TRUE(as_text({one.raw_loaded[i].data.get(),
                             static_cast<size_t>(one.raw_loaded[i].nbytes)}) ==
                    contents[file].substr(static_cast<size_t>(one.raw[i].offset),
                                          static_cast<size_t>(one.raw[i].nbytes)))
            << "rank " << rank << ": " << describe(one.raw[i]);
      }
    }
  }
};

TEST(ExchangeStreamTest, ReplicasReadEveryByteOnce) {
  TestWorld world(4);
  for (size_t rank = 0; rank < 4; ++rank) world.want_all(rank);
  world.load_together();
  world.expect_loaded();
  const int64_t stored = world.stored_nbytes();
  // Without an index, the frames of long slices are read by every rank.
  EXPECT_LT(world.read_nbytes(), stored + 4 * 6 * (32 << 10) + (64 << 10));
  EXPECT_GT(world.network.sent_nbytes(), 3 * (stored - (200 << 10)));
}

TEST(ExchangeStreamTest, RandomBoxesOfRandomRanksArriveInAnyMemory) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto up_to = [&](int64_t most) {
      return std::uniform_int_distribution<int64_t>(0, most)(random);
    };
    TestWorld world(2 + seed % 4, seed);
    world.one_node = up_to(1) == 0;
    for (size_t rank = 0; rank < world.ranks.size(); ++rank) {
      if (up_to(3) == 0) world.want_all(rank, up_to(1) == 0 ? Where::kHost : Where::kDevice);
      for (int64_t i = up_to(6); i > 0; --i) {
        const auto file = static_cast<size_t>(up_to(2));
        const auto tensor = static_cast<size_t>(up_to(2));
        const Dims& sizes = world.saved[file][tensor].live.sizes;
        Box box{Dims(sizes.size(), 0), sizes};
        for (size_t d = 0; d < sizes.size(); ++d) {
          box.offsets[d] = up_to(sizes[d] - 1);
          box.sizes[d] = up_to(sizes[d] - box.offsets[d]);
        }
        if (up_to(1) == 0) {  // Whole rows.
          box.offsets.back() = 0;
          box.sizes.back() = sizes.back();
        }
        const bool empty = checked_numel(box.sizes) == 0;
        const Where somewhere[] = {Where::kNoMemory, Where::kHost, Where::kDevice};
        const Where where = somewhere[up_to(2)];
        world.want(rank, file, tensor, box,
                   empty && where == Where::kNoMemory ? Where::kHost : where);
      }
    }
    world.load_together(seed % 2 == 0 ? kBudget : kBudget / 4);
    world.expect_loaded();
  }
}

TEST(ExchangeStreamTest, ReplicasOnDevicesReadEveryByteOnceAndCopyItFromBuffersOfTheirs) {
  TestWorld world(3);
  // Without an index, ranges are put together before they are summed.
  world.options.verify = false;
  for (size_t rank = 0; rank < 3; ++rank) world.want_all(rank, Where::kDevice);
  world.load_together();
  world.expect_loaded();
  for (const TestRank& rank : world.ranks) {
    EXPECT_GT(rank.device->begun(), 0);
    // But for whole slices, of which pieces may hold only a part.
    EXPECT_LE(rank.device->from_elsewhere(), 3);
  }
  EXPECT_LT(world.read_nbytes(), world.stored_nbytes() + 3 * 6 * (32 << 10) + (64 << 10));
}

TEST(ExchangeStreamTest, WhenADeviceFailsTheRankNamesTheTensorAndOthersAreCancelled) {
  for (const bool at_beginning : {false, true}) {
    for (const int64_t n : {0, 2, 4}) {
      SCOPED_TRACE(n);
      TestWorld world(3);
      for (size_t rank = 0; rank < 3; ++rank) world.want_all(rank, Where::kDevice);
      world.ranks[1].device->fail(n, at_beginning, internal_error("the device is lost"));
      world.load_together();
      for (size_t rank = 0; rank < 3; ++rank) {
        const Status& status = world.ranks[rank].status;
        EXPECT_CODE(status, rank == 1 ? StatusCode::kInternal : StatusCode::kCancelled);
        EXPECT_EQ(world.ranks[rank].device->pending(), 0);
      }
      EXPECT_THAT(world.ranks[1].status.message(),
                  testing::MatchesRegex("cannot load '.*[0-9]'.*: the device is lost"));
    }
  }
}

TEST(ExchangeStreamTest, WhenOneRankCannotReadAllOthersAreCancelled) {
  for (size_t failing = 0; failing < 3; ++failing) {
    for (const int64_t operation : {0, 3, 7, 11, 13, 15}) {
      SCOPED_TRACE("rank " + std::to_string(failing) + ", operation " + std::to_string(operation));
      TestWorld world(3);
      for (size_t rank = 0; rank < 3; ++rank) world.want_all(rank);
      // Of planning, which comes first, nothing is to fail.
      ASSERT_OK_AND_ASSIGN(const auto job,
                           LoadJob::make(*world.ranks[failing].fs, kCheckpoint, kTiny));
      const auto before = std::ssize(world.ranks[failing].fs->operations());
      ASSERT_OK(job->wanted(world.ranks[failing].requests));
      const auto planning = std::ssize(world.ranks[failing].fs->operations()) - before;
      world.ranks[failing].fs->fail_operation(planning + operation,
                                              errno_status(EIO, "cannot read"));
      world.load_together();
      ASSERT_TRUE(world.ranks[failing].fs->clear_fault());
      for (size_t rank = 0; rank < 3; ++rank) {
        EXPECT_CODE(world.ranks[rank].status,
                    rank == failing ? StatusCode::kStorage : StatusCode::kCancelled);
      }
    }
  }
}

// Between two ranks that both want the first MiB of a file.
Result<Exchange> exchange_of_a_mib() {
  WantedBytes wanted;
  wanted.add("f0", {0, 1 << 20});
  const auto decoded = WantedBytes::decode(wanted.encode());
  return Exchange::make({.wanted = {&*decoded, &*decoded},
                         .nodes = std::vector<std::string>(2),
                         .budget_nbytes = kBudget});
}

TEST(ExchangeStreamTest, AFailureEndsAMeetingToWhichAnotherRankDoesNotCome) {
  TestWorld world(2);
  world.one_node = true;
  ASSERT_OK_AND_ASSIGN(const Exchange exchange, exchange_of_a_mib());
  ASSERT_OK_AND_ASSIGN(const auto stream,
                       ExchangeStream::make(*world.ranks[0].fs, exchange.of_rank(0),
                                            world.peers_of(0), kBudget, std::chrono::seconds(60)));
  const std::vector<WantedRange> nothing;
  const ConsumeRange consume = [](int64_t, Bytes, Unpacking&) { return ok_status(); };
  Assembly assembly(nothing, {}, consume);
  Status status;
  std::thread running([&] { status = stream->run({}, assembly); });
  stream->fail(corruption("damaged"));
  running.join();
  EXPECT_CODE(status, StatusCode::kCorruption);
}

TEST(ExchangeStreamTest, AFileThatIsShorterThanPlannedIsCorrupt) {
  TestWorld world(2);
  for (size_t rank = 0; rank < 2; ++rank) world.want_all(rank);
  MemoryFileSystem& disk = *world.ranks[0].fs;
  ASSERT_OK_AND_ASSIGN(const auto job, LoadJob::make(disk, kCheckpoint, kTiny));
  ASSERT_OK_AND_ASSIGN(WantedBytes bytes, job->wanted(world.ranks[0].requests));
  const auto wanted = WantedBytes::decode(bytes.encode());
  ASSERT_OK_AND_ASSIGN(const Exchange exchange,
                       Exchange::make({.wanted = {&*wanted, &*wanted},
                                       .nodes = std::vector<std::string>(2),
                                       .budget_nbytes = kBudget}));
  world.ranks[0].requests.clear();
  disk.put("step-1/f1", "cut off");
  world.network.hang_up(1);
  EXPECT_CODE(world.load(0, exchange.of_rank(0).encode(), kBudget), StatusCode::kCorruption);
}

TEST(ExchangeStreamTest, RandomBoxesArriveFromTheDisksOfRandomRanks) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto up_to = [&](int64_t most) {
      return std::uniform_int_distribution<int64_t>(0, most)(random);
    };
    TestWorld world(2 + seed % 4, seed);
    world.write_index();
    world.one_node = up_to(1) == 0;
    world.options.verify = up_to(3) > 0;
    std::vector<std::set<int>> files(world.ranks.size());
    for (int file = 0; file < 3; ++file) {
      for (int64_t copies = up_to(1); copies >= 0; --copies) {
        files[static_cast<size_t>(up_to(std::ssize(files) - 1))].insert(file);
      }
    }
    for (size_t rank = 0; rank < world.ranks.size(); ++rank) {
      if (up_to(3) == 0) world.want_all(rank, up_to(1) == 0 ? Where::kHost : Where::kDevice);
      for (int64_t i = up_to(5); i > 0; --i) {
        const auto file = static_cast<size_t>(up_to(2));
        const auto tensor = static_cast<size_t>(up_to(2));
        const Dims& sizes = world.saved[file][tensor].live.sizes;
        Box box{Dims(sizes.size(), 0), sizes};
        box.offsets[0] = up_to(sizes[0] - 1);
        box.sizes[0] = 1 + up_to(sizes[0] - box.offsets[0] - 1);
        const Where somewhere[] = {Where::kNoMemory, Where::kHost, Where::kDevice};
        world.want(rank, file, tensor, box, somewhere[up_to(2)]);
        if (up_to(2) == 0) world.ranks[rank].raw.push_back(world.slices[file][tensor]);
      }
      world.keep_files(rank, files[rank]);
    }
    world.load_together(seed % 2 == 0 ? kBudget : kBudget / 4);
    world.expect_loaded();
  }
}

// Rank 0 wants all files and has none. Rank 1 has all and wants none. Rank 2 has none and wants
// none.
struct WorldWithHolder : TestWorld {
  WorldWithHolder() : TestWorld(3) {
    write_index();
    want_all(0);
    keep_files(0, {});
    keep_files(1, {0, 1, 2});
    keep_files(2, {});
  }
};

TEST(ExchangeStreamTest, AHolderReadsWhatItDoesNotWant) {
  WorldWithHolder world;
  world.load_together();
  world.expect_loaded();
  EXPECT_EQ(world.ranks[0].read_nbytes, 0);
  EXPECT_LT(world.ranks[1].read_nbytes, world.stored_nbytes() + 3 * (128 << 10));
}

TEST(ExchangeStreamTest, AHolderVerifiesWhatItSendsAndNamesTheFileAndTheOffset) {
  WorldWithHolder world;
  flip_bit(*world.ranks[1].fs, "f1", 300000);
  world.load_together();
  EXPECT_CODE(world.ranks[1].status, StatusCode::kCorruption);
  EXPECT_EQ(
      world.ranks[1].status.message(),
      "the 65536 bytes at 262144 of step-1/f1 do not have the checksum that the index states");
  EXPECT_CODE(world.ranks[0].status, StatusCode::kCancelled);
  EXPECT_OK(world.ranks[2].status);
}

TEST(ExchangeStreamTest, AFileThatIsCutOffOnTheDiskOfAHolderIsCorrupt) {
  WorldWithHolder world;
  world.ranks[1].fs->put("step-1/f2", world.contents[2].substr(0, 100000));
  world.load_together();
  EXPECT_CODE(world.ranks[1].status, StatusCode::kCorruption);
  EXPECT_THAT(world.ranks[1].status.message(),
              testing::MatchesRegex("cannot read [0-9]+ bytes at 0 of f2: the file is 100000 bytes "
                                    "long, and the index states [0-9]+"));
  EXPECT_CODE(world.ranks[0].status, StatusCode::kCancelled);
}

TEST(ExchangeStreamTest, AHolderThatCannotReadOrIsGoneCancelsTheOthers) {
  for (const int64_t operation : {0, 2, 5, 9}) {
    WorldWithHolder world;
    world.ranks[1].fs->fail_operation(operation, errno_status(EIO, "cannot read"));
    world.load_together();
    EXPECT_CODE(world.ranks[1].status, StatusCode::kStorage);
    EXPECT_CODE(world.ranks[0].status, StatusCode::kCancelled);
  }
  WorldWithHolder world;
  world.network.hang_up(1);
  world.load_together();
  EXPECT_CODE(world.ranks[0].status, StatusCode::kCancelled);
}

TEST(LoadJobTest, FilesThatARankCannotReachAreReadByNone) {
  WorldWithHolder world;
  const std::vector<TensorRequest>& requests = world.ranks[0].requests;
  MemoryFileSystem& disk = *world.ranks[0].fs;
  ASSERT_OK_AND_ASSIGN(const auto job,
                       LoadJob::make(disk, kCheckpoint, world.options_of(0), world.index));
  ASSERT_OK_AND_ASSIGN(const WantedBytes wanted, job->wanted(requests));
  EXPECT_FALSE(wanted.is_cached());
  EXPECT_EQ(wanted.files().size(), 3);
  const Status status = job->run(requests, {}).status();
  EXPECT_CODE(status, StatusCode::kNotFound);
  EXPECT_EQ(status.message(),
            "cannot load 'small0': this rank cannot reach step-1/f0, and no other rank has sent "
            "its bytes");
  // Frames would have to be read.
  ASSERT_OK_AND_ASSIGN(const auto without_index,
                       LoadJob::make(disk, kCheckpoint, world.options_of(0)));
  EXPECT_CODE(without_index->wanted(requests), StatusCode::kNotFound);
}

TEST(ExchangeStreamTest, MemoryForLessThanTwoPiecesIsRefused) {
  TestWorld world(2);
  for (size_t rank = 0; rank < 2; ++rank) world.want_all(rank);
  ASSERT_OK_AND_ASSIGN(const Exchange exchange, exchange_of_a_mib());
  EXPECT_CODE(world.load(0, exchange.of_rank(0).encode(), 100 << 10), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace torch_ckpt::exchange_stream_test
