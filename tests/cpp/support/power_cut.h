#pragma once

// What a disk may hold after the power was cut: every legal tree, rebuilt from a journal. Crash
// tests load each of them.
//
// THE FAULT MODEL. It grants no more than POSIX and the drives do; file systems are mostly kinder.
//
// * Bytes. Each write since the file's last fsync may, whatever became of the others, be
//     - there;
//     - absent: the old bytes remain, zeros beyond the old end;
//     - zeroed;
//     - torn at a multiple of 512 B or 4 KiB: the bytes before it are there, those after it are
//       old or zero.
// * Size. Whatever changed it since the last fsync (preallocate, truncate, a write past the end)
//   may or may not have done so, independently of the bytes. Of a write whose growth was lost, only
//   what lies before the end can be seen.
// * fsync of a file makes its bytes and size durable, as far as they had been reported done when
//   the fsync was submitted. It does not make the file's name durable. A failed fsync makes nothing
//   durable, and neither does a later one for the same bytes: the kernel may have dropped them. A
//   failed write may have had any of the effects above, for good.
// * Names. Each creation, link, renaming and removal since the last sync of the folder may have
//   been done or not, independently of the others, as if reordered. A renaming is atomic: both of
//   its halves or none. The later of two onto one name may be there without the earlier. A name
//   that is there leads to its file with whatever bytes that may have, and so do all links to it.
//   A folder that was lost takes all in it along. sync_directory makes all earlier operations in
//   that folder durable; a failed one does nothing.
// * In flight. A request that was submitted but not reported may have had any effect of an unsynced
//   write; a sync in flight, its effect or none.
//
// THE ENUMERATION asks three questions of every instant: what bytes may each file have, which names
// may be there, and which combinations of the two. Each is answered exhaustively up to
// `PowerCutOptions::limit` combinations, and beyond that by samples: all done, nothing done, every
// single deviation from either, and random ones. Long writes are torn at multiples of 4 KiB and at
// their first and last multiple of 512. Trees that look the same are one.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/memory.h"
#include "io/file_system.h"
#include "support/disk_journal.h"

namespace torch_ckpt {

struct PowerCutOptions {
  int64_t limit = 1000;   // Up to this many combinations, all are tried.
  int64_t samples = 100;  // Random ones beyond it, besides the extremes.
  uint32_t seed = 1;
};

struct PowerCutTrees {
  std::vector<DiskTree> trees;  // All different. The first has everything done.
  bool exhaustive = true;       // Whether these are all there are.
};

// The trees of one journal share the bytes of their files: equal bytes, equal pointers.
class PowerCuts {
 public:
  explicit PowerCuts(DiskJournal journal, const PowerCutOptions& options = {})
      : journal_(std::move(journal)), options_(options), random_(options.seed) {}

  const DiskJournal& journal() const { return journal_; }

  PowerCutTrees trees_after(int64_t instant);

  // After a SIGKILL instead: all that was done by then, and no more. A failed write counts as done.
  DiskTree tree_after_kill(int64_t instant);

 private:
  using Kind = DiskChange::Kind;

  // What became of a write: some of its bytes before `split` (an offset in the file), and some
  // behind it.
  struct Effect {
    enum class Part { kOld, kZero, kNew };
    Part before;
    Part behind;
    int64_t split;
    bool grows;  // Whether the file has grown by it, where it reaches past the end.
  };

  struct Unsynced {
    const DiskChange* change;
    int64_t index;      // Of the change in the journal.
    bool lost = false;  // No fsync will make it durable any more.
  };
  struct FileState {
    std::string durable;
    std::vector<Unsynced> unsynced;
  };
  using Names = std::map<std::string, int64_t>;
  struct Disk {
    std::map<int64_t, FileState> files;
    Names durable_names;
    std::vector<const DiskChange*> unsynced_names;
  };

  // A question with `count` answers: answer 0 says that everything was done, `undone` that nothing
  // was.
  struct Choice {
    size_t count;
    size_t undone;
  };
  struct PossibleContents {
    std::vector<FileContents> contents;
    size_t undone = 0;
    bool exhaustive = true;
  };

  Disk replay(int64_t instant) const;
  static void sync(FileState& file, const DiskChange& change, int64_t index);
  static void sync_directory(Disk& disk, const std::string& folder);
  static std::vector<int64_t> tear_points(int64_t begin, int64_t end);
  static std::vector<Effect> effects_of(const DiskChange& write);
  static void apply(const DiskChange& write, const Effect& effect, std::string& contents);
  static void apply_in_full(const DiskChange& change, std::string& contents);
  static void apply(const DiskChange& change, Names& names);
  PossibleContents possible_contents(const FileState& file);
  Names visible_names(const Disk& disk, const std::vector<size_t>& answers) const;
  FileContents share(std::string bytes);

  template <typename Visit>
  bool for_each_answer(const std::vector<Choice>& choices, int64_t limit, bool deviate,
                       Visit visit);

  const DiskJournal journal_;
  const PowerCutOptions options_;
  std::mt19937 random_;
  std::unordered_map<std::string_view, FileContents> shared_;  // By the bytes themselves.
};

inline FileContents PowerCuts::share(std::string bytes) {
  FileContents contents = contents_of(std::move(bytes));
  return shared_.try_emplace(*contents, contents).first->second;
}

// ---- What is durable at an instant, and what is not.

inline PowerCuts::Disk PowerCuts::replay(int64_t instant) const {
  Disk disk;
  for (const auto& [path, contents] : journal_.initial) {
    const auto number = static_cast<int64_t>(disk.files.size());
    disk.durable_names[path] = number;
    disk.files[number].durable = *contents;
  }
  for (int64_t i = 0; i < journal_.last_instant(); ++i) {
    const DiskChange& change = journal_.changes[static_cast<size_t>(i)];
    if (i >= instant) {
      const bool in_flight = change.kind == Kind::kWrite && change.submitted_at <= instant;
      if (in_flight) disk.files[change.file].unsynced.push_back({&change, i});
    } else if (change.kind == Kind::kWrite || change.kind == Kind::kResize) {
      disk.files[change.file].unsynced.push_back({&change, i, change.failed});
    } else if (change.kind == Kind::kSync) {
      sync(disk.files[change.file], change, i);
    } else if (change.kind == Kind::kSyncDirectory) {
      sync_directory(disk, change.path);
    } else {
      if (change.kind == Kind::kCreate) disk.files[change.file];
      disk.unsynced_names.push_back(&change);
    }
  }
  return disk;
}

inline void PowerCuts::sync(FileState& file, const DiskChange& change, int64_t index) {
  std::vector<Unsynced> rest;
  for (Unsynced& one : file.unsynced) {
    if (change.failed) one.lost = one.lost || one.index < index;
    if (change.failed || one.lost || one.index >= change.submitted_at) {
      rest.push_back(one);
    } else {
      apply_in_full(*one.change, file.durable);
    }
  }
  file.unsynced = std::move(rest);
}

inline void PowerCuts::sync_directory(Disk& disk, const std::string& folder) {
  std::vector<const DiskChange*> rest;
  for (const DiskChange* change : disk.unsynced_names) {
    if (parent_directory(change->path) == folder) {
      apply(*change, disk.durable_names);
    } else {
      rest.push_back(change);
    }
  }
  disk.unsynced_names = std::move(rest);
}

// ---- What bytes a file may have.

inline std::vector<int64_t> PowerCuts::tear_points(int64_t begin, int64_t end) {
  constexpr int64_t kSector = 512;
  std::set<int64_t> points;
  const int64_t first = align_down(begin, kSector) + kSector;
  const int64_t last = align_up(end, kSector) - kSector;
  const bool is_long = end - begin > kPage;
  for (int64_t point = first; point <= last; point += kSector) {
    if (!is_long || point == first || point == last || point % kPage == 0) points.insert(point);
  }
  return {points.begin(), points.end()};
}

inline std::vector<PowerCuts::Effect> PowerCuts::effects_of(const DiskChange& write) {
  using enum Effect::Part;
  const int64_t end = write.offset + static_cast<int64_t>(write.bytes->size());
  std::vector<Effect> effects = {{kNew, kNew, end, true},
                                 {kOld, kOld, end, false},
                                 {kNew, kNew, end, false},
                                 {kOld, kOld, end, true}};
  for (const bool grows : {true, false}) {
    effects.push_back({kZero, kZero, end, grows});
    for (const int64_t point : tear_points(write.offset, end)) {
      effects.push_back({kNew, kOld, point, grows});
      effects.push_back({kNew, kZero, point, grows});
    }
  }
  return effects;
}

inline void PowerCuts::apply(const DiskChange& write, const Effect& effect, std::string& contents) {
  const int64_t nbytes = static_cast<int64_t>(write.bytes->size());
  const int64_t end = write.offset + nbytes;
  if (effect.grows && static_cast<int64_t>(contents.size()) < end) {
    contents.resize(static_cast<size_t>(end));
  }
  const int64_t seen = std::min(end, static_cast<int64_t>(contents.size()));
  const auto put = [&](Effect::Part part, int64_t from, int64_t to) {
    if (part == Effect::Part::kOld || from >= to) return;
    const auto out = contents.begin() + from;
    if (part == Effect::Part::kZero) std::fill(out, out + (to - from), '\0');
    if (part == Effect::Part::kNew) {
      std::copy_n(write.bytes->begin() + (from - write.offset), to - from, out);
    }
  };
  put(effect.before, write.offset, std::min(effect.split, seen));
  put(effect.behind, std::max(effect.split, write.offset), seen);
}

inline void PowerCuts::apply_in_full(const DiskChange& change, std::string& contents) {
  if (change.kind == Kind::kResize) {
    contents.resize(static_cast<size_t>(change.nbytes));
  } else {
    apply(change, effects_of(change)[0], contents);
  }
}

inline PowerCuts::PossibleContents PowerCuts::possible_contents(const FileState& file) {
  std::vector<std::vector<Effect>> effects;
  std::vector<Choice> choices;
  for (const Unsynced& one : file.unsynced) {
    const bool writes = one.change->kind == Kind::kWrite;
    effects.push_back(writes ? effects_of(*one.change) : std::vector<Effect>());
    choices.push_back({writes ? effects.back().size() : 2, 1});
  }
  PossibleContents possible;
  std::set<FileContents> found;
  const auto add = [&](const std::vector<size_t>& answers) {
    std::string contents = file.durable;
    for (size_t i = 0; i < answers.size(); ++i) {
      const DiskChange& change = *file.unsynced[i].change;
      if (change.kind == Kind::kWrite) {
        apply(change, effects[i][answers[i]], contents);
      } else if (answers[i] == 0) {
        apply_in_full(change, contents);
      }
    }
    const FileContents bytes = share(std::move(contents));
    if (found.insert(bytes).second) possible.contents.push_back(bytes);
  };
  add(std::vector<size_t>(choices.size(), 0));
  add(std::vector<size_t>(choices.size(), 1));
  possible.undone = possible.contents.size() - 1;
  possible.exhaustive = for_each_answer(choices, options_.limit, true, add);
  return possible;
}

// ---- Which names may be there.

inline void PowerCuts::apply(const DiskChange& change, Names& names) {
  if (change.kind == Kind::kRename || change.kind == Kind::kRemove) names.erase(change.path);
  if (change.kind == Kind::kCreate || change.kind == Kind::kLink) names[change.path] = change.file;
  if (change.kind == Kind::kRename) names[change.to] = change.file;
  if (change.kind != Kind::kRenameDirectory) return;
  // What is in the folder moves along, as far as it has a name: names that are not durable by then
  // stay behind, and are in nobody's way.
  Names renamed;
  for (const auto& [path, file] : names) {
    const bool is_within = path.starts_with(change.path + "/");
    renamed[is_within ? change.to + path.substr(change.path.size()) : path] = file;
  }
  names = std::move(renamed);
}

inline PowerCuts::Names PowerCuts::visible_names(const Disk& disk,
                                                 const std::vector<size_t>& answers) const {
  Names names = disk.durable_names;
  std::vector<std::string> lost_folders;
  for (size_t i = 0; i < answers.size(); ++i) {
    const DiskChange& change = *disk.unsynced_names[i];
    if (answers[i] == 0) {
      apply(change, names);
    } else if (change.kind == Kind::kCreateDirectory) {
      lost_folders.push_back(change.path + "/");
    }
  }
  std::erase_if(names, [&](const auto& entry) {
    return std::ranges::any_of(
        lost_folders, [&](const std::string& folder) { return entry.first.starts_with(folder); });
  });
  return names;
}

// ---- Trees.

// Calls `visit` with one answer to every choice; returns whether it did so with every combination.
template <typename Visit>
bool PowerCuts::for_each_answer(const std::vector<Choice>& choices, int64_t limit, bool deviate,
                                Visit visit) {
  int64_t combinations = 1;
  for (const Choice& choice : choices) {
    const auto product = checked_mul(combinations, static_cast<int64_t>(choice.count));
    combinations = product.value_or(std::numeric_limits<int64_t>::max());
  }
  std::vector<size_t> answers(choices.size(), 0);
  if (combinations <= limit) {
    for (int64_t n = 0; n < combinations; ++n) {
      int64_t rest = n;
      for (size_t i = 0; i < choices.size(); ++i) {
        const auto count = static_cast<int64_t>(choices[i].count);
        answers[i] = static_cast<size_t>(rest % count);
        rest /= count;
      }
      visit(answers);
    }
    return true;
  }
  for (const bool done : {true, false}) {
    for (size_t i = 0; i < choices.size(); ++i) answers[i] = done ? 0 : choices[i].undone;
    visit(answers);
    for (size_t i = 0; i < choices.size() && deviate; ++i) {
      const size_t before = answers[i];
      for (answers[i] = 0; answers[i] < choices[i].count; ++answers[i]) visit(answers);
      answers[i] = before;
    }
  }
  for (int64_t n = 0; n < options_.samples; ++n) {
    for (size_t i = 0; i < choices.size(); ++i) answers[i] = random_() % choices[i].count;
    visit(answers);
  }
  return false;
}

inline PowerCutTrees PowerCuts::trees_after(int64_t instant) {
  const Disk disk = replay(instant);
  PowerCutTrees out;
  std::vector<Names> all_names;
  const std::vector<Choice> done_or_not(disk.unsynced_names.size(), {2, 1});
  out.exhaustive = for_each_answer(done_or_not, options_.limit, true, [&](const auto& answers) {
    Names names = visible_names(disk, answers);
    if (std::ranges::find(all_names, names) == all_names.end()) all_names.push_back(names);
  });

  std::map<int64_t, PossibleContents> possible;
  std::set<DiskTree> found;
  const int64_t limit = options_.limit / static_cast<int64_t>(all_names.size());
  int deviations = 16;
  for (const Names& names : all_names) {
    std::vector<Choice> choices;
    std::map<int64_t, size_t> choice_of;  // Links to one file show the same bytes.
    for (const auto& [path, file] : names) {
      if (!choice_of.try_emplace(file, choices.size()).second) continue;
      auto known = possible.find(file);
      if (known == possible.end()) {
        known = possible.emplace(file, possible_contents(disk.files.at(file))).first;
      }
      choices.push_back({known->second.contents.size(), known->second.undone});
      out.exhaustive = out.exhaustive && known->second.exhaustive;
    }
    const auto add = [&](const std::vector<size_t>& answers) {
      DiskTree tree;
      for (const auto& [path, file] : names) {
        tree.emplace_hint(tree.end(), path, possible[file].contents[answers[choice_of[file]]]);
      }
      if (found.insert(tree).second) out.trees.push_back(std::move(tree));
    };
    if (!for_each_answer(choices, limit, deviations-- > 0, add)) out.exhaustive = false;
  }
  return out;
}

inline DiskTree PowerCuts::tree_after_kill(int64_t instant) {
  Disk disk = replay(instant);
  for (const DiskChange* change : disk.unsynced_names) apply(*change, disk.durable_names);
  std::map<int64_t, FileContents> contents;
  for (auto& [number, file] : disk.files) {
    for (const Unsynced& one : file.unsynced) {
      if (one.index < instant) apply_in_full(*one.change, file.durable);
    }
    contents[number] = share(std::move(file.durable));
  }
  DiskTree tree;
  for (const auto& [path, number] : disk.durable_names) tree[path] = contents.at(number);
  return tree;
}

}  // namespace torch_ckpt
