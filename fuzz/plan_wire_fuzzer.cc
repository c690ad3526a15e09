// Decodes arbitrary bytes as a plan, an assignment, paths or extents. The bits of the first byte
// are options:
//   bit 0         corrects the checksum first, so that the other checks are tested without it
//   bits 1, 4, 5  select an assignment, paths or extents; a plan if none of them is set
//   bits 2, 3     disable splitting and deduplication of the global plan

#include <cstdlib>
#include <iostream>
#include <vector>

#include "base/bytes.h"
#include "plan/assignment.h"
#include "plan/global_plan.h"
#include "plan/item_extents.h"
#include "plan/paths.h"
#include "plan/plan_wire.h"
#include "support/frame_sum.h"

namespace torch_ckpt {
namespace {

void require(bool condition, const char* property) {
  if (condition) return;
  std::cerr << "violated: " << property << std::endl;
  std::abort();
}

void check_table(const ItemTable& table, int64_t nbytes) {
  require(table.size() <= nbytes, "an item has at least one byte");
  require(table.entries().fqn_nbytes() <= (kMaxTextGrowth + 1) * nbytes,
          "memory is proportional to the plan");
  ItemTable again;
  for (int64_t i = 0; i < table.size(); ++i) {
    const Status status =
        table.kind(i) == ItemKind::kObject
            ? again.add_object(table.fqn(i), table.nbytes(i))
            : again.add_tensor(table.fqn(i), table.facts(i), table.kind(i), to_box(table.box(i)));
    require(status.ok(), "a decoded item can be added");
    require(again.nbytes(i) == table.nbytes(i), "the box determines the length of an item");
    require(table.replica(i) >= kNoReplica, "a replica has a number");
  }
  const auto decoded = decode(encode(table));
  require(decoded.ok() && encode(*decoded) == encode(table), "a table survives a round trip");
}

void check_assignment_bytes(Bytes bytes) {
  const auto assignment = decode_assignment(bytes);
  if (!assignment.ok()) return;
  const auto again = decode_assignment(encode(*assignment));
  require(again.ok() && *again == *assignment, "an assignment survives a round trip");
  int64_t end = 0;
  for (const Run& run : assignment->runs) {
    require(run.first >= end && run.count > 0, "runs ascend");
    end = run.first + run.count;
  }
  require(end <= assignment->item_count, "runs have existing items");
}

void check_path_bytes(Bytes bytes) {
  const auto paths = decode_paths(bytes);
  if (!paths.ok()) return;
  int64_t text = 0;
  for (const StatePath& path : *paths) text += std::ssize(path.fqn);
  require(4 * std::ssize(*paths) <= ssize(bytes), "a path has at least four bytes");
  require(text <= kMaxTextGrowth * ssize(bytes), "memory is proportional to the paths");
  // Encoding rejects keys that do not make up the FQN.
  const auto encoded = encode(*paths);
  require(encoded.ok(), "decoded paths can be encoded");
  const auto again = decode_paths(*encoded);
  require(again.ok() && *again == *paths, "paths survive a round trip");
}

void check_extent_bytes(Bytes bytes) {
  const auto extents = decode_extents(bytes);
  if (!extents.ok()) return;
  require(3 * std::ssize(*extents) <= ssize(bytes), "an extent has at least three bytes");
  int64_t next = 0;
  for (const ItemExtent& extent : *extents) {
    require(extent.item >= next, "items ascend");
    require(range_within(extent.offset, extent.nbytes, int64_t{1} << 61),
            "the end of an extent does not overflow");
    next = extent.item + 1;
  }
  const auto again = decode_extents(encode(*extents));
  require(again.ok() && *again == *extents, "extents survive a round trip");
}

}  // namespace
}  // namespace torch_ckpt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torch_ckpt;
  if (size < 1) return 0;
  const auto* begin = reinterpret_cast<const std::byte*>(data) + 1;
  std::vector<std::byte> bytes(begin, begin + size - 1);
  if ((data[0] & 1) != 0) fix_sums(&bytes);
  if ((data[0] & 2) != 0) {
    check_assignment_bytes(bytes);
    return 0;
  }
  if ((data[0] & 16) != 0) {
    check_path_bytes(bytes);
    return 0;
  }
  if ((data[0] & 32) != 0) {
    check_extent_bytes(bytes);
    return 0;
  }
  const auto table = decode(bytes);
  if (table.ok()) check_table(*table, ssize(bytes));
  // Use the bytes as the plan of one rank, and of each of two ranks.
  const GlobalPlanOptions options = {
      .ranks_per_node = 1, .split = (data[0] & 4) == 0, .dedup = (data[0] & 8) == 0};
  for (const std::vector<Bytes>& plans : {std::vector<Bytes>{bytes}, {bytes, bytes}}) {
    const auto global = GlobalPlan::make(plans, options);
    require(table.ok() || !global.ok(), "a global plan needs decodable tables");
    if (!global.ok()) continue;
    for (int64_t rank = 0; rank < global->rank_count(); ++rank) {
      require(check_assignment(global->assignment(rank), *table).ok(),
              "assignments match their table");
    }
  }
  return 0;
}
