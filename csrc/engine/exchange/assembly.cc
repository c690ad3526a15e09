#include "engine/exchange/assembly.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <set>

namespace torch_ckpt {

Assembly::Assembly(std::span<const WantedRange> wanted, std::span<const SharedPiece> pieces,
                   const ConsumeRange& consume)
    : pieces_(pieces), consume_(consume), for_device_(first_for_device(wanted)) {
  std::map<const File*, std::vector<ByteRange>> covered;
  for (const SharedPiece& piece : pieces) {
    std::vector<ByteRange>& ranges = covered[piece.file];
    if (!ranges.empty() && ranges.back().end == piece.range.begin) {
      ranges.back().end = piece.range.end;
    } else {
      ranges.push_back(piece.range);
    }
  }
  const auto is_covered = [&](const WantedRange& want) {
    const auto ranges = covered.find(want.file);
    if (ranges == covered.end()) return false;
    const auto after =
        std::ranges::upper_bound(ranges->second, want.range.begin, {}, &ByteRange::begin);
    return after != ranges->second.begin() && std::prev(after)->end >= want.range.end;
  };
  std::set<int64_t> uncovered_groups;
  for (const WantedRange& want : wanted) {
    if (want.group >= 0 && !is_covered(want)) uncovered_groups.insert(want.group);
  }
  for (int64_t i = 0; i < std::ssize(wanted); ++i) {
    const WantedRange& want = wanted[static_cast<size_t>(i)];
    if (!is_covered(want) || uncovered_groups.contains(want.group)) {
      others_.push_back(i);
      continue;
    }
    FileTargets& file = files_[want.file];
    file.wanted = wanted;
    file.targets.push_back(
        {i, want.range, want.destination, want.device, want.name, want.range.nbytes()});
    file.longest_nbytes = std::max(file.longest_nbytes, want.range.nbytes());
  }
  for (auto& [file, file_targets] : files_) {
    std::ranges::sort(file_targets.targets, {},
                      [](const Target& target) { return target.range.begin; });
    for (const Target& target : file_targets.targets) {
      if (target.destination == nullptr || !target.device->is_host()) continue;
      if (!file_targets.runs.empty()) {
        Run& last = file_targets.runs.back();
        if (last.range.end == target.range.begin &&
            last.destination + last.range.nbytes() == target.destination) {
          last.range.end = target.range.end;
          continue;
        }
      }
      file_targets.runs.push_back({target.range, target.destination});
    }
  }
}

size_t Assembly::FileTargets::first_target(int64_t at) const {
  const auto target =
      std::ranges::lower_bound(targets, at - longest_nbytes, {},
                               [](const Target& candidate) { return candidate.range.begin; });
  return static_cast<size_t>(target - targets.begin());
}

void Assembly::FileTargets::add_names(const ByteRange& range, std::set<std::string>* out) const {
  for (size_t i = first_target(range.begin);
       i < targets.size() && targets[i].range.begin < range.end; ++i) {
    const std::string* name = wanted[static_cast<size_t>(targets[i].index)].name;
    if (targets[i].range.end > range.begin && name != nullptr) out->insert(*name);
  }
}

const RangeNames* Assembly::names(const File* file) const {
  const auto found = files_.find(file);
  return found == files_.end() ? nullptr : &found->second;
}

std::byte* Assembly::place(int64_t piece) const {
  const SharedPiece& shared = pieces_[static_cast<size_t>(piece)];
  const auto file = files_.find(shared.file);
  if (file == files_.end()) return nullptr;
  const std::vector<Run>& runs = file->second.runs;
  const auto after = std::ranges::upper_bound(runs, shared.range.begin, {},
                                              [](const Run& run) { return run.range.begin; });
  if (after == runs.begin()) return nullptr;
  const Run& run = *std::prev(after);
  if (run.range.end < shared.range.end) return nullptr;
  return run.destination + (shared.range.begin - run.range.begin);
}

Status Assembly::add(int64_t piece, Bytes bytes, Unpacking& unpacking) {
  const SharedPiece& shared = pieces_[static_cast<size_t>(piece)];
  const auto file = files_.find(shared.file);
  if (file == files_.end()) return ok_status();
  std::vector<Target>& targets = file->second.targets;
  for (size_t i = file->second.first_target(shared.range.begin);
       i < targets.size() && targets[i].range.begin < shared.range.end; ++i) {
    if (targets[i].range.end <= shared.range.begin) continue;
    RETURN_IF_ERROR(consume_target(targets[i], shared.range, bytes, unpacking));
  }
  return ok_status();
}

// Consumes the bytes that a target has in common with a piece. `bytes` are those of `range`.
Status Assembly::consume_target(Target& target, const ByteRange& range, Bytes bytes,
                                Unpacking& unpacking) {
  const ByteRange common = {std::max(target.range.begin, range.begin),
                            std::min(target.range.end, range.end)};
  const Bytes here = slice(bytes, common.begin - range.begin, common.nbytes());
  if (common == target.range) return consume_(target.index, here, unpacking);
  std::byte* memory = target.destination;
  if (memory == nullptr) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (target.buffer == nullptr) {
      target.buffer.reset(new (std::nothrow) std::byte[static_cast<size_t>(target.range.nbytes())]);
    }
    memory = target.buffer.get();
    if (memory == nullptr) return errno_status(ENOMEM, "cannot allocate a buffer");
  }
  std::byte* place = memory + (common.begin - target.range.begin);
  if (target.destination != nullptr && !target.device->is_host()) {
    const StridedCopy run = {.sizes = {ssize(here)}, .src_strides = {1}, .dst_strides = {1}};
    RETURN_IF_ERROR(unpacking.add(*target.device, *target.name, place, run, here.data()));
  } else if (place != here.data()) {
    std::memcpy(place, here.data(), here.size());
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    target.missing_nbytes -= common.nbytes();
    if (target.missing_nbytes > 0) return ok_status();
  }
  return consume_assembled(target, memory, unpacking);
}

// Consumes a target that several pieces cover. `memory` is its destination or its buffer.
Status Assembly::consume_assembled(Target& target, std::byte* memory, Unpacking& unpacking) {
  const Bytes all(memory, static_cast<size_t>(target.range.nbytes()));
  if (target.buffer == nullptr) return consume_(target.index, all, unpacking);
  Unpacking of_buffer(all);
  Status status = consume_(target.index, all, of_buffer);
  if (status.ok()) status = of_buffer.start();
  if (status.ok()) status = of_buffer.wait();
  target.buffer.reset();
  return status;
}

}  // namespace torch_ckpt
