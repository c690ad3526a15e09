#pragma once

// What happened to a disk: the tree it held at first, and every change since, in the order in which
// they took effect. Kept by RecordingFileSystem, read by PowerCuts.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch_ckpt {

using FileContents = std::shared_ptr<const std::string>;

// The files of a disk: path to bytes. Empty folders do not show.
using DiskTree = std::map<std::string, FileContents>;

inline FileContents contents_of(std::string bytes) {
  return std::make_shared<const std::string>(std::move(bytes));
}

struct DiskChange {
  enum class Kind {
    kCreate,
    kWrite,
    kResize,  // File::preallocate and File::truncate.
    kSync,
    kCreateDirectory,
    kRename,
    kRemove,
    kSyncDirectory,
    kRenameDirectory,
    kLink,  // `path` is the new name of the file.
  };

  Kind kind;
  std::string path;  // A file that is open goes by the path that it was opened under.
  std::string to = {};
  int64_t file = -1;  // Stays the same when the file is renamed; see DiskJournal::initial.
  int64_t offset = 0;
  int64_t nbytes = 0;         // kResize: the new size.
  FileContents bytes = {};    // kWrite.
  int64_t submitted_at = -1;  // kWrite, kSync: how many changes there were when it was submitted.
  bool failed = false;        // kWrite, kSync: whether it reported an error.
};

// Instant k is the moment after the first k changes. Requests that were submitted before it, and
// are reported after it, are in flight. Only those that were reported at last are in the journal.
struct DiskJournal {
  DiskTree initial;  // Its files are numbered from 0 in the order of their paths.
  std::vector<DiskChange> changes;

  int64_t last_instant() const { return static_cast<int64_t>(changes.size()); }
};

// "write 4096 bytes at 8192 of step-1/a", for messages.
inline std::string to_string(const DiskChange& change) {
  static constexpr const char* kVerbs[] = {"create",        "write",  "resize", "sync",
                                           "create folder", "rename", "remove", "sync folder",
                                           "rename folder", "link"};
  std::string text = kVerbs[static_cast<int>(change.kind)];
  if (change.kind == DiskChange::Kind::kWrite) {
    text += " " + std::to_string(change.bytes->size()) + " bytes at ";
    text += std::to_string(change.offset) + " of";
  }
  text += " " + change.path;
  if (change.kind == DiskChange::Kind::kResize) text += " to " + std::to_string(change.nbytes);
  if (!change.to.empty()) text += " to " + change.to;
  return change.failed ? text + " (failed)" : text;
}

}  // namespace torch_ckpt
