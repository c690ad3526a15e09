// Plans, and what else travels with them, from arbitrary bytes. The first byte says what follows:
// bit 0, whether the checksum is made true before the rest is parsed, so that the checks behind it
// must hold by themselves; bit 1, an assignment instead of a plan; or bit 4, paths, and bit 5,
// extents. Bits 2 and 3 are options of a global plan.

#include <cstdlib>
#include <iostream>
#include <vector>

#include "base/bytes.h"
#include "plan/assignment.h"
#include "plan/global_plan.h"
#include "plan/item_extents.h"
#include "plan/paths.h"
#include "plan/plan_wire.h"
#include "support/sealed_frame.h"

namespace torch_ckpt {
namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::cerr << "does not hold: " << what << std::endl;
  std::abort();
}

void check_table(const ItemTable& table, int64_t nbytes) {
  require(table.size() <= nbytes, "an item has a byte");
  require(table.entries().fqn_nbytes() <= (kMaxTextGrowth + 1) * nbytes,
          "memory is in proportion to the plan");
  ItemTable again;
  for (int64_t i = 0; i < table.size(); ++i) {
    const Status status =
        table.kind(i) == ItemKind::kObject
            ? again.add_object(table.fqn(i), table.nbytes(i))
            : again.add_tensor(table.fqn(i), table.facts(i), table.kind(i), to_box(table.box(i)));
    require(status.ok(), "what was decoded could have been added");
    require(again.nbytes(i) == table.nbytes(i), "bytes are those of the box");
  }
  const auto decoded = decode(encode(table));
  require(decoded.ok() && encode(*decoded) == encode(table), "a table survives the wire");
}

void check_assignment_bytes(Bytes bytes) {
  const auto assignment = decode_assignment(bytes);
  if (!assignment.ok()) return;
  const auto again = decode_assignment(encode(*assignment));
  require(again.ok() && *again == *assignment, "an assignment survives the wire");
  int64_t end = 0;
  for (const Run& run : assignment->runs) {
    require(run.first >= end && run.count > 0, "runs ascend");
    end = run.first + run.count;
  }
  require(end <= assignment->item_count, "runs are of items that there are");
}

void check_path_bytes(Bytes bytes) {
  const auto paths = decode_paths(bytes);
  if (!paths.ok()) return;
  int64_t text = 0;
  for (const StatePath& path : *paths) text += std::ssize(path.fqn);
  require(4 * std::ssize(*paths) <= ssize(bytes), "a path has four bytes");
  require(text <= kMaxTextGrowth * ssize(bytes), "memory is in proportion to the paths");
  // Encoding refuses keys that do not make up the name.
  const auto encoded = encode(*paths);
  require(encoded.ok(), "what was decoded can be encoded");
  const auto again = decode_paths(*encoded);
  require(again.ok() && *again == *paths, "paths survive the wire");
}

void check_extent_bytes(Bytes bytes) {
  const auto extents = decode_extents(bytes);
  if (!extents.ok()) return;
  require(3 * std::ssize(*extents) <= ssize(bytes), "an extent has three bytes");
  int64_t next = 0;
  for (const ItemExtent& extent : *extents) {
    require(extent.item >= next, "items ascend");
    require(range_within(extent.offset, extent.nbytes, int64_t{1} << 61), "extents have an end");
    next = extent.item + 1;
  }
  const auto again = decode_extents(encode(*extents));
  require(again.ok() && *again == *extents, "extents survive the wire");
}

}  // namespace
}  // namespace torch_ckpt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torch_ckpt;
  if (size < 1) return 0;
  const auto* begin = reinterpret_cast<const std::byte*>(data) + 1;
  std::vector<std::byte> bytes(begin, begin + size - 1);
  if ((data[0] & 1) != 0) reseal(&bytes);
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
  // As one rank's plan, and as that of each of two ranks.
  const GlobalPlanOptions options = {
      .ranks_per_node = 1, .split = (data[0] & 4) == 0, .dedup = (data[0] & 8) == 0};
  for (const std::vector<Bytes>& plans : {std::vector<Bytes>{bytes}, {bytes, bytes}}) {
    const auto global = GlobalPlan::make(plans, options);
    require(table.ok() || !global.ok(), "what is no table is no plan");
    if (!global.ok()) continue;
    for (int64_t rank = 0; rank < global->rank_count(); ++rank) {
      require(check_assignment(global->assignment(rank), *table).ok(), "assignments fit");
    }
  }
  return 0;
}
