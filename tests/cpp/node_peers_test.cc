// Ranks that are threads, and so read the memory of their own process.

#include "engine/exchange/node_peers.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <string>
#include <thread>

#include "support/status_matchers.h"
#include "support/thread_peers.h"

namespace torch_ckpt::node_peers_test {
namespace {

constexpr int64_t kNoProcess = 1 << 22;  // The kernel gives none such an id.
constexpr size_t kNbytes = 1 << 20;

// Two ranks that have met, each of which takes the other for the process that is named.
struct Pair {
  PeerNetwork network;
  std::array<std::shared_ptr<Peers>, 2> peers;
  std::array<Status, 2> met;

  Pair(int64_t pid_of_1, int64_t pid_of_0) {
    peers[0] = make_node_peers(network.peers_of(0), {{1, pid_of_1}});
    peers[1] = make_node_peers(network.peers_of(1), {{0, pid_of_0}});
    std::thread other([this] { met[1] = peers[1]->connect(std::array{0}); });
    met[0] = peers[0]->connect(std::array{1});
    other.join();
  }

  // Sends bytes that are `fill`; what arrives is as long.
  std::string pass(int32_t from, char fill, int64_t number) {
    std::string sent(kNbytes, fill);
    std::string received(kNbytes, '?');
    std::thread sending([&] {
      auto transfer = peers[static_cast<size_t>(from)]->send(std::as_bytes(std::span(sent)),
                                                             1 - from, Channel::kPieces, number);
      EXPECT_OK(transfer.status());
      if (transfer.ok()) {
        EXPECT_OK((*transfer)->wait());
      }
      sent.assign(kNbytes, '!');  // Nobody looks there any more.
    });
    auto transfer = peers[static_cast<size_t>(1 - from)]->receive(
        std::as_writable_bytes(std::span(received)), from, Channel::kPieces, number);
    EXPECT_OK(transfer.status());
    if (transfer.ok()) {
      EXPECT_OK((*transfer)->wait());
    }
    sending.join();
    return received;
  }
};

TEST(NodePeersTest, RanksOfOneMachineCopyFromEachOther) {
  Pair pair(getpid(), getpid());
  ASSERT_OK(pair.met[0]);
  ASSERT_OK(pair.met[1]);
  EXPECT_EQ(pair.pass(0, 'a', 0), std::string(kNbytes, 'a'));
  EXPECT_EQ(pair.pass(0, 'b', 1), std::string(kNbytes, 'b'));
  EXPECT_EQ(pair.pass(1, 'c', 0), std::string(kNbytes, 'c'));
  EXPECT_LT(pair.network.sent_nbytes(), 100);
}

TEST(NodePeersTest, WhereMemoryCannotBeReadBytesAreSent) {
  Pair pair(kNoProcess, kNoProcess);
  ASSERT_OK(pair.met[0]);
  ASSERT_OK(pair.met[1]);
  EXPECT_EQ(pair.pass(0, 'a', 0), std::string(kNbytes, 'a'));
  EXPECT_EQ(pair.pass(1, 'b', 0), std::string(kNbytes, 'b'));
  EXPECT_EQ(pair.network.sent_nbytes(), 2 * int64_t{kNbytes});
}

TEST(NodePeersTest, EachDirectionIsFoundOutByItself) {
  Pair pair(kNoProcess, getpid());  // Rank 1 can read the memory of rank 0.
  ASSERT_OK(pair.met[0]);
  EXPECT_EQ(pair.pass(0, 'a', 0), std::string(kNbytes, 'a'));
  EXPECT_LT(pair.network.sent_nbytes(), 100);
  EXPECT_EQ(pair.pass(1, 'b', 0), std::string(kNbytes, 'b'));
  EXPECT_GT(pair.network.sent_nbytes(), int64_t{kNbytes});
}

TEST(NodePeersTest, AnotherProcessIsNotTakenForThePeer) {
  const pid_t other = fork();  // Has memory at the same addresses.
  if (other == 0) {
    while (true) pause();
  }
  {
    Pair pair(other, other);
    EXPECT_OK(pair.met[0]);
    EXPECT_EQ(pair.pass(0, 'a', 0), std::string(kNbytes, 'a'));
    EXPECT_EQ(pair.network.sent_nbytes(), int64_t{kNbytes});
  }
  kill(other, SIGKILL);
  waitpid(other, nullptr, 0);
}

TEST(NodePeersTest, AnAbortEndsBothKindsOfWait) {
  Pair pair(getpid(), getpid());
  std::string memory(kNbytes, ' ');
  auto receive =
      pair.peers[0]->receive(std::as_writable_bytes(std::span(memory)), 1, Channel::kPieces, 0);
  auto send = pair.peers[0]->send(std::as_bytes(std::span(memory)), 1, Channel::kPieces, 0);
  ASSERT_OK(receive.status());
  ASSERT_OK(send.status());
  for (PeerTransfer* transfer : {receive->get(), send->get()}) {
    Status status;
    std::thread waiting([&] { status = transfer->wait(); });
    transfer->abort();
    waiting.join();
    EXPECT_CODE(status, StatusCode::kCancelled);
  }
}

TEST(NodePeersTest, AnAbortEndsAMeetingToWhichTheOtherDoesNotCome) {
  PeerNetwork network;
  const auto peers = make_node_peers(network.peers_of(0), {{1, getpid()}});
  Status status;
  std::thread meeting([&] { status = peers->connect(std::array{1}); });
  peers->abort();
  meeting.join();
  EXPECT_CODE(status, StatusCode::kCancelled);
}

TEST(NodePeersTest, ARankThatHangsUpWhileTheyMeetIsAnError) {
  PeerNetwork network;
  network.hang_up(1);
  const auto peers = make_node_peers(network.peers_of(0), {{1, getpid()}});
  EXPECT_CODE(peers->connect(std::array{1}), StatusCode::kCancelled);
}

TEST(NodePeersTest, APeerThatOffersAnotherLengthIsAnError) {
  Pair pair(getpid(), getpid());
  std::string sent(kNbytes, 'a');
  std::string received(kNbytes / 2, '?');
  auto send = pair.peers[0]->send(std::as_bytes(std::span(sent)), 1, Channel::kPieces, 0);
  auto receive =
      pair.peers[1]->receive(std::as_writable_bytes(std::span(received)), 0, Channel::kPieces, 0);
  ASSERT_OK(receive.status());
  EXPECT_CODE((*receive)->wait(), StatusCode::kInternal);
  (*send)->abort();
}

}  // namespace
}  // namespace torch_ckpt::node_peers_test
