#include "plan/assignment.h"

#include <string_view>

#include "plan/wire.h"

namespace torch_ckpt {
namespace {

constexpr std::string_view kAssignmentMagic = "TCAS";
constexpr uint32_t kAssignmentVersion = 1;

bool read_runs(WireReader* reader, Assignment* out) {
  int64_t count;
  // A run has at least two bytes: larger counts are malformed.
  if (!reader->varint(&count) || count > reader->left()) return false;
  int64_t end = 0;
  for (int64_t i = 0; i < count; ++i) {
    int64_t skipped;
    Run run;
    if (!reader->varint(&skipped) || !reader->varint(&run.count)) return false;
    if (skipped > out->item_count - end) return false;
    run.first = end + skipped;
    if (run.count == 0 || run.count > out->item_count - run.first) return false;
    if (i > 0 && skipped == 0) return false;
    end = run.first + run.count;
    out->runs.push_back(run);
  }
  return true;
}

bool read_cuts(WireReader* reader, Assignment* out) {
  int64_t count;
  if (!reader->varint(&count) || count > reader->left()) return false;
  int64_t next = 0;
  auto run = out->runs.begin();
  for (int64_t i = 0; i < count; ++i) {
    int64_t skipped;
    Cut cut;
    if (!reader->varint(&skipped) || !reader->varint(&cut.first_row) ||
        !reader->varint(&cut.rows)) {
      return false;
    }
    if (skipped >= out->item_count - next) return false;
    cut.item = next + skipped;
    next = cut.item + 1;
    while (run != out->runs.end() && run->first + run->count <= cut.item) ++run;
    if (run == out->runs.end() || cut.item < run->first) return false;
    if (cut.rows == 0 || !checked_add(cut.first_row, cut.rows)) return false;
    out->cuts.push_back(cut);
  }
  return true;
}

}  // namespace

std::vector<std::byte> encode(const Assignment& assignment) {
  WireWriter out;
  out.varint(assignment.item_count);
  out.varint(std::ssize(assignment.runs));
  int64_t end = 0;
  for (const Run& run : assignment.runs) {
    out.varint(run.first - end);
    out.varint(run.count);
    end = run.first + run.count;
  }
  out.varint(std::ssize(assignment.cuts));
  int64_t next = 0;
  for (const Cut& cut : assignment.cuts) {
    out.varint(cut.item - next);
    out.varint(cut.first_row);
    out.varint(cut.rows);
    next = cut.item + 1;
  }
  return out.finish(kAssignmentMagic, kAssignmentVersion);
}

Result<Assignment> decode_assignment(Bytes bytes) {
  ASSIGN_OR_RETURN(const Bytes body,
                   open_wire(bytes, kAssignmentMagic, kAssignmentVersion, "an assignment"));
  WireReader reader(body);
  Assignment out;
  if (!reader.varint(&out.item_count) || !read_runs(&reader, &out) || !read_cuts(&reader, &out) ||
      reader.left() != 0) {
    return corruption("an assignment of ", bytes.size(), " bytes is unsound");
  }
  return out;
}

Status check_assignment(const Assignment& assignment, const ItemTable& table) {
  if (assignment.item_count != table.size()) {
    return corruption("an assignment is for ", assignment.item_count, " items, but ", table.size(),
                      " were planned");
  }
  for (const Cut& cut : assignment.cuts) {
    if (table.facts(cut.item).is_opaque) {
      return corruption("an assignment cuts '", table.fqn(cut.item), "', which must stay whole");
    }
    const BoxView box = table.box(cut.item);
    if (box.sizes.empty() || !range_within(cut.first_row, cut.rows, box.sizes[0])) {
      return corruption("an assignment cuts '", table.fqn(cut.item), "' at rows ", cut.first_row,
                        " to ", cut.first_row + cut.rows, ", which it does not have");
    }
  }
  return ok_status();
}

Box cut_box(const BoxView& box, const Cut& cut) {
  Box out = to_box(box);
  out.offsets[0] += cut.first_row;
  out.sizes[0] = cut.rows;
  return out;
}

}  // namespace torch_ckpt
