// Plans and assignments from arbitrary bytes. The first byte says what follows: bit 0, whether the
// checksum is made true before the rest is parsed, so that the checks behind it must hold by
// themselves; bit 1, an assignment instead of a plan; bits 2 and 3, options of a global plan.

#include <cstdlib>
#include <iostream>
#include <vector>

#include "base/bytes.h"
#include "base/xxh3.h"
#include "plan/assignment.h"
#include "plan/global_plan.h"
#include "plan/plan_wire.h"

namespace torch_ckpt {
namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::cerr << "does not hold: " << what << std::endl;
  std::abort();
}

void reseal(std::vector<std::byte>* bytes) {
  if (bytes->size() < sizeof(uint64_t)) return;
  const size_t end = bytes->size() - sizeof(uint64_t);
  store_le(bytes->data() + end, xxh3(Bytes(*bytes).first(end)));
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
