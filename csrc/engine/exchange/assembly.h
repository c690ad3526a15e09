#pragma once

// Assembly: assembles wanted ranges from the pieces of an exchange. Pieces are cut for all ranks
// together, so their boundaries differ from those of this rank's wanted ranges.

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/read_stream.h"

namespace torch_ckpt {

// A piece of a file that this rank obtains through an exchange.
struct SharedPiece {
  File* file = nullptr;
  ByteRange range;
  int32_t from = -1;  // As in ExchangePiece.
  int32_t to = -1;
  const FileSums* sums = nullptr;  // Block checksums of the file; nullptr skips verification.
};

// Safe to use from any thread after construction.
class Assembly {
 public:
  // Calls `consume` once for each wanted range that the pieces cover.
  // Requires: the pieces of a file ascend and do not overlap; all arguments outlive the Assembly.
  Assembly(std::span<const WantedRange> wanted, std::span<const SharedPiece> pieces,
           const ConsumeRange& consume);

  // The wanted ranges that the pieces do not cover completely, or whose group they do not cover.
  const std::vector<int64_t>& others() const { return others_; }

  // Final address of the bytes of a piece, or nullptr if they must be consumed from a buffer.
  std::byte* place(int64_t piece) const;

  // The FQNs of a file's wanted ranges; nullptr if the pieces cover no wanted range of the file.
  const RangeNames* names(const File* file) const;

  // Consumes the bytes of a piece, which may be at the address that `place` returns. The caller
  // starts `unpacking`, and may reuse the bytes when its copies are done. Called once for each
  // piece.
  Status add(int64_t piece, Bytes bytes, Unpacking& unpacking);

  // The first wanted range whose device is not the host, or nullptr.
  const WantedRange* for_device() const { return for_device_; }

 private:
  // A wanted range that the pieces cover.
  struct Target {
    int64_t index = 0;  // Index of the wanted range.
    ByteRange range;
    std::byte* destination = nullptr;  // In the memory of `device`.
    const Device* device = nullptr;
    const std::string* name = nullptr;
    int64_t missing_nbytes = 0;
    std::unique_ptr<std::byte[]> buffer = nullptr;  // Assembles several pieces.
  };
  struct Run {  // Targets that are adjacent in the file and in memory.
    ByteRange range;
    std::byte* destination;
  };
  struct FileTargets : public RangeNames {
    std::span<const WantedRange> wanted;
    std::vector<Target> targets;  // Ascending.
    std::vector<Run> runs;
    int64_t longest_nbytes = 0;

    size_t first_target(int64_t at) const;  // Index of the first target that may end after `at`.
    void add_names(const ByteRange& range, std::set<std::string>* out) const override;
  };

  Status consume_target(Target& target, const ByteRange& range, Bytes bytes, Unpacking& unpacking);
  Status consume_assembled(Target& target, std::byte* memory, Unpacking& unpacking);

  std::span<const SharedPiece> pieces_;
  const ConsumeRange& consume_;
  std::map<const File*, FileTargets> files_;
  std::vector<int64_t> others_;
  const WantedRange* for_device_;
  std::mutex mutex_;  // Guards missing_nbytes and buffer of all targets.
};

}  // namespace torch_ckpt
