#include "format/slot_header.h"

#include <algorithm>
#include <atomic>
#include <string_view>

#include "base/xxh3.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kSlotMagic("TCSLOT\r\n", 8);
constexpr uint32_t kSlotVersion = 2;
constexpr uint64_t kComplete = 0x4554454C504D4F43;  // "COMPLETE".

// Byte offsets in the page.
constexpr size_t kState = 0;
constexpr size_t kMagicAt = 8;
constexpr size_t kVersionAt = 16;
constexpr size_t kSum = 24;  // Checksum of [kRun, kEnd).
constexpr size_t kRun = 32;
constexpr size_t kSession = 48;
constexpr size_t kNumbers = 64;
constexpr size_t kTensorsId = 160;
constexpr size_t kShare = 176;
constexpr size_t kEnd = 256;  // The zeros before it are reserved.

constexpr int64_t kMaxRanks = 1 << 20;

// Visits the numbers of a header in their on-disk order.
template <typename Header, typename Visit>
void for_each_number(Header& header, const Visit& visit) {
  visit(header.sequence);
  visit(header.step);
  visit(header.rank);
  visit(header.world_size);
  visit(header.node);
  visit(header.node_count);
  visit(header.ranks_here);
  visit(header.persist);
  visit(header.table_nbytes);
  visit(header.table_sum);
  visit(header.payload_begin);
  visit(header.payload_nbytes);
}

// The state word, by which the writer synchronizes with readers in other processes.
std::atomic_ref<uint64_t> state_of(std::byte* page) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(page + kState));
}

uint64_t page_sum(Bytes page) { return xxh3(page.subspan(kRun, kEnd - kRun)); }

// Whether the ranks and the machines can be those of a job: each machine has a rank.
bool are_of_a_job(const SlotHeader& header) {
  const int64_t ranks = header.world_size;
  if (ranks < 1 || ranks > kMaxRanks || header.node_count > ranks) return false;
  if (header.rank < 0 || header.rank >= ranks) return false;
  if (header.node < 0 || header.node >= header.node_count) return false;
  const int64_t most = ranks - (header.node_count - 1);
  const int64_t least = header.node_count == 1 ? ranks : 1;
  return header.ranks_here >= least && header.ranks_here <= most;
}

Status check(const SlotHeader& header, int64_t nbytes) {
  const bool sound = are_of_a_job(header) && header.sequence >= 0 &&
                     range_within(kSlotPage, header.table_nbytes, nbytes) &&
                     header.payload_begin >= kSlotPage + header.table_nbytes &&
                     range_within(header.payload_begin, header.payload_nbytes, nbytes);
  if (sound) return ok_status();
  return corruption("the page before a snapshot has inconsistent numbers");
}

}  // namespace

void clear_slot(MutableBytes page) {
  state_of(page.data()).store(0, std::memory_order_relaxed);
  // Order the clear before all stores of the next snapshot.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void complete_slot(MutableBytes page, const SlotHeader& header) {
  std::ranges::fill(page.subspan(kMagicAt), std::byte{0});
  std::ranges::copy(as_bytes(kSlotMagic), page.data() + kMagicAt);
  store_le(page.data() + kVersionAt, kSlotVersion);
  std::ranges::copy(header.run, page.data() + kRun);
  std::ranges::copy(header.session, page.data() + kSession);
  std::byte* at = page.data() + kNumbers;
  for_each_number(header, [&](auto number) {
    store_le(at, number);
    at += sizeof(number);
  });
  std::ranges::copy(header.tensors_id, page.data() + kTensorsId);
  std::ranges::copy(header.share, page.data() + kShare);
  store_le(page.data() + kSum, page_sum(page));
  state_of(page.data()).store(kComplete, std::memory_order_seq_cst);
}

Result<SlotHeader> read_slot_header(Bytes page, int64_t nbytes) {
  if (ssize(page) < kSlotPage) return corruption("a snapshot begins with a page of ", kSlotPage);
  // atomic_ref needs a mutable reference. A load also works on memory that is mapped read-only.
  const uint64_t state =
      state_of(const_cast<std::byte*>(page.data())).load(std::memory_order_seq_cst);
  if (state != kComplete) {
    return Status(StatusCode::kNotFound, "there is no complete snapshot in the slot");
  }
  if (!std::ranges::equal(page.subspan(kMagicAt, kSlotMagic.size()), as_bytes(kSlotMagic))) {
    return corruption("the page before a snapshot has no slot signature");
  }
  const auto version = load_le<uint32_t>(page.data() + kVersionAt);
  if (version < kSlotVersion) {
    return corruption("a snapshot is of the former version ", version);
  }
  if (version > kSlotVersion) {
    return unsupported("a snapshot is of version ", version, ", and this build reads ",
                       kSlotVersion);
  }
  if (load_le<uint64_t>(page.data() + kSum) != page_sum(page)) {
    return corruption("the page before a snapshot fails its checksum");
  }
  SlotHeader header;
  const auto read_id = [&](size_t at, SlotId* id) {
    std::ranges::copy(page.subspan(at, id->size()), id->begin());
  };
  read_id(kRun, &header.run);
  read_id(kSession, &header.session);
  read_id(kTensorsId, &header.tensors_id);
  read_id(kShare, &header.share);
  const std::byte* at = page.data() + kNumbers;
  for_each_number(header, [&](auto& number) {
    number = load_le<std::remove_reference_t<decltype(number)>>(at);
    at += sizeof(number);
  });
  RETURN_IF_ERROR(check(header, nbytes));
  return header;
}

}  // namespace torch_ckpt
