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
  std::set<int64_t> left_alone;  // Groups of which the pieces have not all.
  for (const WantedRange& want : wanted) {
    if (want.group >= 0 && !is_covered(want)) left_alone.insert(want.group);
  }
  for (int64_t i = 0; i < std::ssize(wanted); ++i) {
    const WantedRange& want = wanted[static_cast<size_t>(i)];
    if (!is_covered(want) || left_alone.contains(want.group)) {
      others_.push_back(i);
      continue;
    }
    OfFile& file = files_[want.file];
    file.wanted = wanted;
    file.parts.push_back(
        {i, want.range, want.destination, want.device, want.name, want.range.nbytes()});
    file.longest_nbytes = std::max(file.longest_nbytes, want.range.nbytes());
  }
  for (auto& [file, of_file] : files_) {
    std::ranges::sort(of_file.parts, {}, [](const Part& part) { return part.range.begin; });
    for (const Part& part : of_file.parts) {
      if (part.destination == nullptr || !part.device->is_host()) continue;
      if (!of_file.runs.empty()) {
        Run& last = of_file.runs.back();
        if (last.range.end == part.range.begin &&
            last.destination + last.range.nbytes() == part.destination) {
          last.range.end = part.range.end;
          continue;
        }
      }
      of_file.runs.push_back({part.range, part.destination});
    }
  }
}

size_t Assembly::OfFile::first_part(int64_t at) const {
  const auto part = std::ranges::lower_bound(
      parts, at - longest_nbytes, {}, [](const Part& candidate) { return candidate.range.begin; });
  return static_cast<size_t>(part - parts.begin());
}

void Assembly::OfFile::add_names(const ByteRange& range, std::set<std::string>* out) const {
  for (size_t i = first_part(range.begin); i < parts.size() && parts[i].range.begin < range.end;
       ++i) {
    const std::string* name = wanted[static_cast<size_t>(parts[i].index)].name;
    if (parts[i].range.end > range.begin && name != nullptr) out->insert(*name);
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

Status Assembly::take(int64_t piece, Bytes bytes, Unpacking& unpacking) {
  const SharedPiece& shared = pieces_[static_cast<size_t>(piece)];
  const auto file = files_.find(shared.file);
  if (file == files_.end()) return ok_status();
  std::vector<Part>& parts = file->second.parts;
  for (size_t i = file->second.first_part(shared.range.begin);
       i < parts.size() && parts[i].range.begin < shared.range.end; ++i) {
    if (parts[i].range.end <= shared.range.begin) continue;
    RETURN_IF_ERROR(take_part(parts[i], shared.range, bytes, unpacking));
  }
  return ok_status();
}

// Takes what a part has in common with `range`, whose bytes these are.
Status Assembly::take_part(Part& part, const ByteRange& range, Bytes bytes, Unpacking& unpacking) {
  const ByteRange common = {std::max(part.range.begin, range.begin),
                            std::min(part.range.end, range.end)};
  const Bytes here = slice(bytes, common.begin - range.begin, common.nbytes());
  if (common == part.range) return consume_(part.index, here, unpacking);
  std::byte* memory = part.destination;
  if (memory == nullptr) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (part.buffer == nullptr) {
      part.buffer.reset(new (std::nothrow) std::byte[static_cast<size_t>(part.range.nbytes())]);
    }
    memory = part.buffer.get();
    if (memory == nullptr) return errno_status(ENOMEM, "cannot allocate a buffer");
  }
  std::byte* place = memory + (common.begin - part.range.begin);
  if (part.destination != nullptr && !part.device->is_host()) {
    const StridedCopy run = {.sizes = {ssize(here)}, .src_strides = {1}, .dst_strides = {1}};
    RETURN_IF_ERROR(unpacking.add(*part.device, *part.name, place, run, here.data()));
  } else if (place != here.data()) {
    std::memcpy(place, here.data(), here.size());
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    part.missing_nbytes -= common.nbytes();
    if (part.missing_nbytes > 0) return ok_status();
  }
  return take_assembled(part, memory, unpacking);
}

// Has a part consumed that came in several pieces, out of `memory`: where it belongs, or a buffer.
Status Assembly::take_assembled(Part& part, std::byte* memory, Unpacking& unpacking) {
  const Bytes all(memory, static_cast<size_t>(part.range.nbytes()));
  if (part.buffer == nullptr) return consume_(part.index, all, unpacking);
  Unpacking of_buffer(all);
  Status status = consume_(part.index, all, of_buffer);
  if (status.ok()) status = of_buffer.start();
  if (status.ok()) status = of_buffer.wait();
  part.buffer.reset();
  return status;
}

}  // namespace torch_ckpt
