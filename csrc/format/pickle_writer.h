#pragma once

// Writes pickles of protocol 4: opcodes in frames, and a memo by value. The counterpart of
// pickle_reader.h. Used by `metadata_pickle`.
//
// Python's pickler memoises every object, by identity. Here the caller chooses which values to
// memoise, and equal values share one memo number. So frequent values have memo numbers below 256,
// which are recalled by two bytes.

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "base/xxh3.h"
#include "format/pickle_reader.h"

namespace torch_ckpt {

// The memo number of a value, or kNoMemo for a value that is not written yet.
using Memo = uint32_t;
inline constexpr Memo kNoMemo = UINT32_MAX;

// Hash table of memo numbers by value. Requires: the bytes of all keys outlive the table.
class MemoTable {
 public:
  // Returns the memo number of `key`. If it is kNoMemo, the caller assigns one before the next
  // call. Requires: the key is shorter than 4 GiB.
  Memo& operator[](Bytes key) {
    if (2 * (used_ + 1) > slots_.size()) grow();
    Slot& slot = find(key);
    if (slot.memo == kNoMemo) {
      ++used_;
      slot.key = key.data();
      slot.nbytes = static_cast<uint32_t>(key.size());
    }
    return slot.memo;
  }

 private:
  struct Slot {
    const std::byte* key = nullptr;
    uint32_t nbytes = 0;
    Memo memo = kNoMemo;  // kNoMemo marks an empty slot.
  };

  Slot& find(Bytes key) {
    const size_t mask = slots_.size() - 1;
    size_t at = static_cast<size_t>(xxh3(key)) & mask;
    while (slots_[at].memo != kNoMemo && !equal(slots_[at], key)) at = (at + 1) & mask;
    return slots_[at];
  }

  static bool equal(const Slot& slot, Bytes key) {
    return slot.nbytes == key.size() &&
           (key.empty() || std::memcmp(slot.key, key.data(), key.size()) == 0);
  }

  void grow() {
    std::vector<Slot> old(std::max<size_t>(64, 2 * slots_.size()));
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.memo != kNoMemo) find({slot.key, slot.nbytes}) = slot;
    }
  }

  std::vector<Slot> slots_;  // Size is a power of two; at most half of the slots are used.
  size_t used_ = 0;
};

// A text or a global that occurs often in one pickle, with its memo.
struct PickleWord {
  std::string_view text = {};
  Memo memo = kNoMemo;
};
struct PickleGlobal {
  std::string_view module = {};
  std::string_view name = {};
  Memo memo = kNoMemo;
};

// Used by one thread. Requires: all texts are UTF-8 and outlive the writer.
class PickleWriter {
 public:
  explicit PickleWriter(size_t expected_nbytes) {
    out_.reserve(expected_nbytes);
    op(pickle_opcodes::kProto);
    put<uint8_t>(kProtocol);
    begin_frame();
  }

  void op(uint8_t code) { put(code); }

  // Writes several opcodes without arguments.
  template <size_t kCount>
  void ops(const std::array<uint8_t, kCount>& codes) {
    std::memcpy(room(kCount), codes.data(), kCount);
  }

  void number(int64_t value) {
    if (value >= 0 && value <= UINT8_MAX) {
      put_op<uint8_t>(pickle_opcodes::kBinInt1, value);
    } else if (value >= 0 && value <= UINT16_MAX) {
      put_op<uint16_t>(pickle_opcodes::kBinInt2, value);
    } else if (value >= INT32_MIN && value <= INT32_MAX) {
      put_op<int32_t>(pickle_opcodes::kBinInt, value);
    } else {
      // The fewest bytes that represent the value and its sign.
      int nbytes = 5;
      while (nbytes < 8 && value >> (8 * nbytes - 1) != value >> 63) ++nbytes;
      put_op<uint8_t>(pickle_opcodes::kLong1, nbytes);
      std::memcpy(room(static_cast<size_t>(nbytes)), &value, static_cast<size_t>(nbytes));
    }
  }

  void boolean(bool value) { op(value ? pickle_opcodes::kNewTrue : pickle_opcodes::kNewFalse); }

  // Memoises the value written last.
  Memo memoise() {
    op(pickle_opcodes::kMemoize);
    fits_ = fits_ && memos_ + 1 < kNoMemo;
    return memos_++;
  }

  void recall(Memo memo) {
    if (memo <= UINT8_MAX) {
      put_op<uint8_t>(pickle_opcodes::kBinGet, memo);
    } else {
      put_op<uint32_t>(pickle_opcodes::kLongBinGet, memo);
    }
  }

  // Writes or recalls a text, and returns its memo.
  Memo text(std::string_view value) {
    Memo& memo = texts_[as_bytes(value)];
    if (memo == kNoMemo) {
      put_text(value);
      memo = memoise();
    } else {
      recall_text(value, memo);
    }
    return memo;
  }

  void word(PickleWord& word) {
    if (word.memo == kNoMemo) {
      word.memo = text(word.text);
    } else {
      recall_text(word.text, word.memo);
    }
  }

  void global(PickleGlobal& global) {
    if (global.memo != kNoMemo) return recall(global.memo);
    text(global.module);
    put_text(global.name);
    op(pickle_opcodes::kStackGlobal);
    global.memo = memoise();
  }

  // Calls write(i) for each i in [0, count) and adds the written items to the list or dict before
  // them. `single` is the opcode that adds one item, `several` the opcode that adds a batch. The
  // batch size bounds the stack of the unpickler.
  template <typename Write>
  void fill(size_t count, uint8_t single, uint8_t several, const Write& write) {
    for (size_t i = 0; i < count;) {
      const size_t end = std::min(count, i + kBatch);
      const bool alone = end - i == 1;
      if (!alone) op(pickle_opcodes::kMark);
      for (; i < end; ++i) write(i);
      op(alone ? single : several);
      if (size() - frame_ >= kFrameNbytes) {
        end_frame();
        begin_frame();
      }
    }
  }

  // Writes a tuple of the values that write(i) writes for each i in [0, count).
  template <typename Write>
  void tuple(size_t count, const Write& write) {
    constexpr uint8_t kShort[] = {pickle_opcodes::kEmptyTuple, pickle_opcodes::kTuple1,
                                  pickle_opcodes::kTuple2, pickle_opcodes::kTuple3};
    const bool is_short = count < std::size(kShort);
    if (!is_short) op(pickle_opcodes::kMark);
    for (size_t i = 0; i < count; ++i) write(i);
    op(is_short ? kShort[count] : uint8_t{pickle_opcodes::kTuple});
  }

  // Errors: kInvalidArgument if a length or the memo exceeds the range of its opcode.
  Result<std::vector<std::byte>> finish() {
    op(pickle_opcodes::kStop);
    end_frame();
    if (!fits_) return invalid_argument("cannot write a pickle: a text or the memo is too large");
    out_.resize(size());
    return std::move(out_);
  }

 private:
  static constexpr uint8_t kProtocol = 4;
  static constexpr size_t kBatch = 1000;
  static constexpr size_t kFrameNbytes = size_t{64} << 10;

  std::byte* room(size_t nbytes) {
    if (static_cast<size_t>(end_ - next_) < nbytes) [[unlikely]]
      grow(nbytes);
    return std::exchange(next_, next_ + nbytes);
  }

  void grow(size_t nbytes) {
    const size_t used = size();
    out_.resize(std::max({out_.capacity(), 2 * out_.size(), used + nbytes}));
    next_ = out_.data() + used;
    end_ = out_.data() + out_.size();
  }

  size_t size() const { return out_.empty() ? 0 : static_cast<size_t>(next_ - out_.data()); }

  template <typename T>
  void put(T value) {
    store_le(room(sizeof(T)), value);
  }

  template <typename T>
  void put_op(uint8_t code, int64_t argument) {
    std::byte* to = room(1 + sizeof(T));
    store_le(to, code);
    store_le(to + 1, static_cast<T>(argument));
  }

  void recall_text(std::string_view value, Memo memo) {
    if (memo > UINT8_MAX && value.size() < sizeof(Memo)) {
      put_text(value);  // At most as long as recalling its memo.
    } else {
      recall(memo);
    }
  }

  void put_text(std::string_view value) {
    if (value.size() <= UINT8_MAX) {
      put_op<uint8_t>(pickle_opcodes::kShortBinUnicode, static_cast<int64_t>(value.size()));
    } else {
      fits_ = fits_ && value.size() <= UINT32_MAX;
      put_op<uint32_t>(pickle_opcodes::kBinUnicode, static_cast<int64_t>(value.size()));
    }
    if (!value.empty()) std::memcpy(room(value.size()), value.data(), value.size());
  }

  // Frames let an unpickler read a file in large chunks.
  void begin_frame() {
    put_op<uint64_t>(pickle_opcodes::kFrame, 0);
    frame_ = size();
  }
  void end_frame() { store_le<uint64_t>(out_.data() + frame_ - sizeof(uint64_t), size() - frame_); }

  std::vector<std::byte> out_;  // Written up to next_.
  std::byte* next_ = nullptr;
  std::byte* end_ = nullptr;
  size_t frame_ = 0;  // Offset of the contents of the last frame.
  MemoTable texts_;
  Memo memos_ = 0;  // Number of memoised values.
  bool fits_ = true;
};

}  // namespace torch_ckpt
