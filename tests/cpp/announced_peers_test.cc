// Pieces over links that know no numbers: ranks are threads, the links as strict as NCCL's.

#include "engine/announced_peers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <semaphore>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/ordered_network.h"
#include "support/status_matchers.h"
#include "support/thread_peers.h"

namespace torch_ckpt {
namespace {

struct World {
  explicit World(uint32_t seed) : up(seed), down(seed + 1) {}

  std::shared_ptr<Peers> peers_of(int32_t rank) {
    Result<Memory> memory = HeapMemorySource().allocate(2);
    return make_announced_peers(rank, wire.peers_of(rank), up.peers_of(rank), down.peers_of(rank),
                                std::move(*memory));
  }

  PeerNetwork wire;
  OrderedNetwork up;
  OrderedNetwork down;
};

struct TestPiece {
  int32_t from;
  int32_t to;
  int64_t number;  // Among those of the two.
  std::vector<std::byte> sent;
  std::vector<std::byte> received;
};

std::vector<TestPiece> random_pieces(int32_t ranks, size_t count, std::mt19937& random) {
  std::map<std::pair<int32_t, int32_t>, int64_t> numbers;
  std::vector<TestPiece> pieces(count);
  for (TestPiece& piece : pieces) {
    piece.from = static_cast<int32_t>(random() % static_cast<uint32_t>(ranks));
    const auto step = 1 + static_cast<int32_t>(random() % static_cast<uint32_t>(ranks - 1));
    piece.to = (piece.from + step) % ranks;
    piece.number = numbers[{piece.from, piece.to}]++;
    piece.sent.resize(1 + random() % 64);
    for (std::byte& byte : piece.sent) byte = static_cast<std::byte>(random());
    piece.received.resize(piece.sent.size());
  }
  return pieces;
}

// Receives what comes to a rank, in order, with room for so many pieces at a time.
Status receive_in_order(Peers& peers, int32_t rank, std::vector<TestPiece>& pieces, size_t room) {
  std::deque<std::unique_ptr<PeerTransfer>> going;
  for (TestPiece& piece : pieces) {
    if (piece.to != rank) continue;
    if (going.size() == room) {
      RETURN_IF_ERROR(going.front()->wait());
      going.pop_front();
    }
    ASSIGN_OR_RETURN(auto transfer,
                     peers.receive(piece.received, piece.from, Channel::kPieces, piece.number));
    going.push_back(std::move(transfer));
  }
  for (const auto& transfer : going) RETURN_IF_ERROR(transfer->wait());
  return ok_status();
}

// Sends what a rank has, in any order.
Status send_shuffled(Peers& peers, int32_t rank, std::vector<TestPiece>& pieces, uint32_t seed) {
  std::vector<TestPiece*> own;
  for (TestPiece& piece : pieces) {
    if (piece.from == rank) own.push_back(&piece);
  }
  std::mt19937 random(seed);
  std::ranges::shuffle(own, random);
  std::vector<std::unique_ptr<PeerTransfer>> going;
  for (const TestPiece* piece : own) {
    ASSIGN_OR_RETURN(auto transfer,
                     peers.send(piece->sent, piece->to, Channel::kPieces, piece->number));
    going.push_back(std::move(transfer));
  }
  for (const auto& transfer : going) RETURN_IF_ERROR(transfer->wait());
  return ok_status();
}

TEST(AnnouncedPeersTest, PiecesThatAreReadyInAnyOrderComeToTheirPlaces) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto ranks = static_cast<int32_t>(2 + seed % 4);
    World world(seed);
    std::vector<TestPiece> pieces = random_pieces(ranks, 40, random);
    std::vector<std::shared_ptr<Peers>> peers;
    for (int32_t rank = 0; rank < ranks; ++rank) peers.push_back(world.peers_of(rank));
    std::vector<Status> statuses(static_cast<size_t>(2 * ranks));
    std::vector<std::thread> threads;
    const size_t room = 1 + random() % 3;
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const auto place = static_cast<size_t>(rank);
      threads.emplace_back([&, rank, place] {
        statuses[2 * place] = receive_in_order(*peers[place], rank, pieces, room);
      });
      threads.emplace_back([&, rank, place] {
        statuses[2 * place + 1] = send_shuffled(*peers[place], rank, pieces, seed);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Status& status : statuses) ASSERT_OK(status);
    for (const TestPiece& piece : pieces) EXPECT_EQ(piece.received, piece.sent);
    EXPECT_LE(world.up.most_queued(), 1U);
    EXPECT_LE(world.down.most_queued(), 1U);
  }
}

TEST(AnnouncedPeersTest, NothingIsPutOnALinkForARankThatHasNoRoom) {
  World world(0);
  const auto low = world.peers_of(0);
  const auto high = world.peers_of(1);
  std::vector<std::byte> bytes(3, std::byte{7});
  std::vector<std::byte> memory(3);
  ASSERT_OK_AND_ASSIGN(const auto first, low->send(bytes, 1, Channel::kPieces, 0));
  ASSERT_OK_AND_ASSIGN(const auto second, low->send(bytes, 1, Channel::kPieces, 1));
  // Its number is the second, and the first has no room: it overtakes.
  ASSERT_OK_AND_ASSIGN(const auto received, high->receive(memory, 0, Channel::kPieces, 1));
  EXPECT_OK(received->wait());
  EXPECT_OK(second->wait());
  EXPECT_EQ(memory, bytes);
  EXPECT_EQ(world.up.sent_nbytes(), 3);
  EXPECT_EQ(world.down.most_queued(), 0U);
}

TEST(AnnouncedPeersTest, AllPairsMeetHoweverTheyAreListed) {
  World world(3);
  std::vector<Status> statuses(5, internal_error("has not met"));
  std::vector<std::thread> threads;
  std::vector<std::shared_ptr<Peers>> peers;
  for (int32_t rank = 0; rank < 5; ++rank) peers.push_back(world.peers_of(rank));
  for (int32_t rank = 0; rank < 5; ++rank) {
    threads.emplace_back([&, rank] {
      std::vector<int32_t> others;
      for (int32_t step = 1; step < 5; ++step) others.push_back((rank + step) % 5);
      statuses[static_cast<size_t>(rank)] = peers[static_cast<size_t>(rank)]->meet(others);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : statuses) EXPECT_OK(status);
  EXPECT_EQ(world.up.sent_nbytes(), 10);
  EXPECT_EQ(world.down.sent_nbytes(), 10);
}

TEST(AnnouncedPeersTest, NothingIsPutOnALinkBeforeBothHaveMadeTheirs) {
  World world(0);
  const auto low = world.peers_of(0);
  const auto wire = world.wire.peers_of(1);  // Does not say that it has made its links.
  Status status;
  const std::vector<int32_t> others = {1};
  std::thread meeting([&] { status = low->meet(others); });
  std::byte word{};
  ASSERT_OK_AND_ASSIGN(const auto said, wire->receive({&word, 1}, 0, Channel::kMeeting, 0));
  EXPECT_OK(said->wait());
  low->abort();
  meeting.join();
  EXPECT_CODE(status, StatusCode::kCancelled);
  EXPECT_EQ(world.up.most_queued(), 0U);
}

// A link that has whoever begins a transfer wait until the test lets go of it.
class StuckLink : public Peers {
 public:
  Result<std::unique_ptr<PeerTransfer>> send(Bytes, int32_t, Channel, int64_t) override {
    begun.release();
    stuck.acquire();
    return cancelled("too late");
  }
  Result<std::unique_ptr<PeerTransfer>> receive(MutableBytes, int32_t, Channel, int64_t) override {
    return cancelled("out of turn");
  }

  std::binary_semaphore begun{0};
  std::binary_semaphore stuck{0};
};

TEST(AnnouncedPeersTest, AbortLeavesALinkBehindThatWaitsForTheOtherEndToConnect) {
  World world(0);
  const auto link = std::make_shared<StuckLink>();
  std::weak_ptr<StuckLink> left = link;
  Result<Memory> memory = HeapMemorySource().allocate(2);
  auto low = make_announced_peers(0, world.wire.peers_of(0), link, link, std::move(*memory));
  const auto wire = world.wire.peers_of(1);
  Status status;
  const std::vector<int32_t> others = {1};
  std::thread meeting([&] { status = low->meet(others); });
  std::byte word{};
  ASSERT_OK_AND_ASSIGN(const auto heard, wire->receive({&word, 1}, 0, Channel::kMeeting, 0));
  ASSERT_OK_AND_ASSIGN(const auto said, wire->send({&word, 1}, 0, Channel::kMeeting, 0));
  link->begun.acquire();
  low->abort();
  meeting.join();
  EXPECT_CODE(status, StatusCode::kCancelled);
  low.reset();
  EXPECT_GT(left.use_count(), 1);  // Whoever waits in it still has it.
  link->stuck.release();
  while (left.use_count() > 1) std::this_thread::yield();
}

TEST(AnnouncedPeersTest, AbortEndsATransferThatTheOtherEndHasLeftOnTheLink) {
  World world(0);
  const auto low = world.peers_of(0);
  const auto wire = world.wire.peers_of(1);  // Says what it will do, and does not.
  std::vector<std::byte> bytes(3);
  int64_t number = 0;
  ASSERT_OK_AND_ASSIGN(const auto sending, low->send(bytes, 1, Channel::kPieces, 0));
  const auto word = std::as_writable_bytes(std::span<int64_t, 1>(&number, 1));
  ASSERT_OK_AND_ASSIGN(const auto room, wire->send(word, 0, Channel::kRoom, 0));
  int64_t announced = -1;
  const auto heard = std::as_writable_bytes(std::span<int64_t, 1>(&announced, 1));
  ASSERT_OK_AND_ASSIGN(const auto next, wire->receive(heard, 0, Channel::kNext, 0));
  ASSERT_OK(next->wait());
  EXPECT_EQ(announced, 0);
  Status status;
  std::thread waiting([&] { status = sending->wait(); });
  sending->abort();
  waiting.join();
  EXPECT_CODE(status, StatusCode::kCancelled);
  // And nothing can be begun after it, or is waited for.
  EXPECT_CODE(low->send(bytes, 1, Channel::kPieces, 1).status(), StatusCode::kCancelled);
  EXPECT_CODE(low->receive(bytes, 1, Channel::kPieces, 0).status(), StatusCode::kCancelled);
}

TEST(AnnouncedPeersTest, APieceThatNobodyHasRoomForIsAnErrorAndNotTaken) {
  World world(0);
  const auto high = world.peers_of(1);
  const auto wire = world.wire.peers_of(0);
  std::vector<std::byte> memory(3);
  ASSERT_OK_AND_ASSIGN(const auto received, high->receive(memory, 0, Channel::kPieces, 0));
  int64_t number = 5;
  const auto word = std::as_writable_bytes(std::span<int64_t, 1>(&number, 1));
  ASSERT_OK_AND_ASSIGN(const auto next, wire->send(word, 1, Channel::kNext, 0));
  EXPECT_CODE(received->wait(), StatusCode::kInternal);
  EXPECT_EQ(world.up.most_queued(), 0U);
}

}  // namespace
}  // namespace torch_ckpt
