#pragma once

// Wanted ranges, put together of the pieces in which they come: those of an exchange begin and end
// where it suits all ranks.

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

// A piece of a file that an exchange brings.
struct SharedPiece {
  File* file = nullptr;
  ByteRange range;
  int32_t from = -1;  // As of ExchangePiece.
  int32_t to = -1;
  const FileSums* sums = nullptr;  // Of the file, where it is to be checked.
};

// Used by any thread once it is made.
class Assembly {
 public:
  // The pieces of a file ascend and do not overlap. `consume` is called once for each wanted range
  // of which the pieces have all. Everything outlives it.
  Assembly(std::span<const WantedRange> wanted, std::span<const SharedPiece> pieces,
           const ConsumeRange& consume);

  // The wanted ranges that the pieces do not have, or not all of, or not all of their group.
  const std::vector<int64_t>& others() const { return others_; }

  // Where the bytes of a piece belong as they are; nullptr where they must be looked at.
  std::byte* place(int64_t piece) const;

  // Whose bytes the pieces of a file are; nullptr where nobody here wants any.
  const RangeNames* names(const File* file) const;

  // Takes a piece, once, which may lie where `place` says; its bytes may go when this returns, and
  // what it has added to `unpacking`, of a buffer that has them, is started and done.
  Status take(int64_t piece, Bytes bytes, Unpacking& unpacking);

  // Of the wanted ranges, the first that goes to a device other than the CPU, or nullptr.
  const WantedRange* for_device() const { return for_device_; }

 private:
  struct Part {
    int64_t index = 0;  // Of the wanted range.
    ByteRange range;
    std::byte* destination = nullptr;  // In memory of the device.
    const Device* device = nullptr;
    const std::string* name = nullptr;
    int64_t missing_nbytes = 0;
    std::unique_ptr<std::byte[]> buffer = nullptr;  // Of one that comes in several pieces.
  };
  struct Run {  // Parts that follow one another in the file and in memory.
    ByteRange range;
    std::byte* destination;
  };
  struct OfFile : public RangeNames {
    std::span<const WantedRange> wanted;
    std::vector<Part> parts;  // Ascending.
    std::vector<Run> runs;
    int64_t longest_nbytes = 0;

    size_t first_part(int64_t at) const;  // That may reach behind `at`.
    void add_names(const ByteRange& range, std::set<std::string>* out) const override;
  };

  Status take_part(Part& part, const ByteRange& range, Bytes bytes, Unpacking& unpacking);
  Status take_assembled(Part& part, std::byte* memory, Unpacking& unpacking);

  std::span<const SharedPiece> pieces_;
  const ConsumeRange& consume_;
  std::map<const File*, OfFile> files_;
  std::vector<int64_t> others_;
  const WantedRange* for_device_;
  std::mutex mutex_;  // Guards what parts lack, and their buffers.
};

}  // namespace torch_ckpt
