#pragma once

// A device of ordinary memory that does everything as late as it may, as a GPU that is busy.
//
// Its tensors are at addresses where no processor finds anything, so that nothing but its own
// `pack` reads and `unpack` writes them. These make a plan, as a GPU's do, and carry it out only
// when it is waited for, or when it has been asked a few times whether it is done: a buffer that is
// used again too early shows as wrong bytes. One piece of work may fail, when it is begun or when
// it is waited for.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "device/device.h"
#include "device/pack_plan.h"
#include "engine/live_tensor.h"
#include "support/pack_on_cpu.h"

namespace torch_ckpt {

// Safe to use from any thread. Outlives its events and buffers.
class LaterDevice : public Device {
 public:
  explicit LaterDevice(int asked_before_done = 3, int64_t window_nbytes = 4096)
      : asked_before_done_(asked_before_done), window_nbytes_(window_nbytes), buffers_(*this) {}
  ~LaterDevice() override { EXPECT_EQ(pending_, 0) << "work was neither waited for nor done"; }

  // Where that memory is as this device has it.
  static std::byte* address(std::byte* memory) { return memory + kFar; }

  // The same tensor, as one of this device.
  LiveTensor holding(LiveTensor live) const {
    live.data = address(live.data);
    live.device = this;
    return live;
  }

  // Work number `n`, from 0, fails with this status: at its beginning, or when it is waited for.
  void fail(int64_t n, bool at_beginning, Status status) {
    failing_ = n;
    fails_at_beginning_ = at_beginning;
    failure_ = std::move(status);
  }

  // Memory cannot be pinned.
  void fail_to_pin(Status status) { not_pinned_ = std::move(status); }

  // No buffers are to be had.
  void fail_buffers(Status status) { no_buffers_ = std::move(status); }

  int64_t begun() const { return begun_; }            // Pieces of work.
  int64_t copied() const { return copied_; }          // Tensors, or parts of them.
  int64_t multiplied() const { return multiplied_; }  // Pieces of quantised tensors.
  int64_t pending() const { return pending_; }        // Pieces of work.
  int64_t most_pending() const { return most_pending_; }
  int64_t pinned() const { return pinned_; }                  // Pieces of memory.
  int64_t from_elsewhere() const { return from_elsewhere_; }  // Than from buffers of its own.

  bool is_host() const override { return false; }
  MemorySource& buffers() const override { return buffers_; }

  Result<std::unique_ptr<DeviceEvent>> unpack(std::span<const TensorCopy> copies,
                                              Bytes buffer) const override {
    // Not written to.
    return begin(PackDirection::kUnpack, copies,
                 {const_cast<std::byte*>(buffer.data()), buffer.size()});
  }
  Result<std::unique_ptr<DeviceEvent>> pack(std::span<const TensorCopy> copies,
                                            MutableBytes buffer) const override {
    return begin(PackDirection::kPack, copies, buffer);
  }
  Result<std::unique_ptr<DeviceEvent>> multiply(const ProductTable& table, Bytes codes,
                                                std::span<const float> values,
                                                std::span<const float> scales) const override {
    ProductTable here = table;
    here.products -= kFar;
    const std::lock_guard<std::mutex> lock(mutex_);
    ++multiplied_;
    return begin([here, codes, values = std::vector(values.begin(), values.end()),
                  scales = std::vector(scales.begin(), scales.end())] {
      multiply_on_cpu(here, codes, values, scales);
    });
  }
  Result<std::shared_ptr<void>> pin(MutableBytes bytes) const override {
    RETURN_IF_ERROR(not_pinned_);
    ++pinned_;
    return std::shared_ptr<void>(bytes.data(), [this](void*) { --pinned_; });
  }

 private:
  static constexpr int64_t kFar = int64_t{1} << 60;

  // Heap blocks that the device remembers.
  class Buffers : public MemorySource {
   public:
    explicit Buffers(LaterDevice& device) : device_(device) {}
    Result<Memory> allocate(int64_t nbytes) override {
      RETURN_IF_ERROR(device_.no_buffers_);
      ASSIGN_OR_RETURN(Memory memory, HeapMemorySource().allocate(nbytes));
      const std::lock_guard<std::mutex> lock(device_.mutex_);
      device_.own_.emplace_back(memory.bytes());
      return memory;
    }

   private:
    LaterDevice& device_;
  };

  class Event : public DeviceEvent {
   public:
    Event(const LaterDevice& device, std::function<void()> work, Status status)
        : device_(device),
          work_(std::move(work)),
          status_(std::move(status)),
          questions_left_(device.asked_before_done_) {}
    ~Event() override { EXPECT_TRUE(is_done_) << "nobody has waited for a device"; }

    Status wait() const override {
      const std::lock_guard<std::mutex> lock(device_.mutex_);
      carry_out();
      return status_;
    }
    Result<bool> done() const override {
      const std::lock_guard<std::mutex> lock(device_.mutex_);
      if (questions_left_-- > 0) return false;
      carry_out();
      RETURN_IF_ERROR(status_);
      return true;
    }

   private:
    void carry_out() const {
      if (std::exchange(is_done_, true)) return;
      --device_.pending_;
      if (status_.ok()) work_();
    }

    const LaterDevice& device_;
    const std::function<void()> work_;
    const Status status_;
    mutable int questions_left_;
    mutable bool is_done_ = false;
  };

  // As a GPU does: windows go through memory of its own, in which all is zero that is not copied.
  static void run(const PackPlan& plan, MutableBytes buffer) {
    const bool packs = plan.direction == PackDirection::kPack;
    for (const DirectCopy& copy : plan.direct) {
      const MutableBytes place = slice(buffer, copy.staging_offset, copy.nbytes);
      if (packs) std::copy_n(copy.tensor, copy.nbytes, place.begin());
      if (!packs) std::ranges::copy(place, copy.tensor);
    }
    for (const PackWindow& window : plan.windows) {
      std::vector<std::byte> memory(static_cast<size_t>(plan.window_nbytes + kStagingAlignment));
      auto* aligned = reinterpret_cast<std::byte*>(
          align_up(reinterpret_cast<int64_t>(memory.data()), kStagingAlignment));
      const MutableBytes here(aligned + (window.begin - window.base()),
                              static_cast<size_t>(window.end - window.begin));
      const MutableBytes there = slice(buffer, window.begin, ssize(here));
      if (!packs) std::ranges::copy(there, here.begin());
      run_window_on_cpu(plan, window, aligned);
      if (packs) std::ranges::copy(here, there.begin());
    }
  }

  Result<std::unique_ptr<DeviceEvent>> begin(PackDirection direction,
                                             std::span<const TensorCopy> copies,
                                             MutableBytes buffer) const {
    std::vector<TensorCopy> here(copies.begin(), copies.end());
    for (TensorCopy& copy : here) copy.tensor -= kFar;
    const PackOptions options = {
        .staging_nbytes = ssize(buffer), .window_nbytes = window_nbytes_, .direct_nbytes = 3000};
    ASSIGN_OR_RETURN(PackPlan plan, plan_pack(direction, here, options));
    const std::lock_guard<std::mutex> lock(mutex_);
    ASSIGN_OR_RETURN(auto event, begin([plan = std::move(plan), buffer] { run(plan, buffer); }));
    copied_ += std::ssize(copies);
    if (!is_own(buffer)) ++from_elsewhere_;
    return event;
  }

  // Requires: the caller owns `mutex_`.
  Result<std::unique_ptr<DeviceEvent>> begin(std::function<void()> work) const {
    const bool fails = begun_++ == failing_;
    if (fails && fails_at_beginning_) return failure_;
    most_pending_ = std::max(most_pending_, ++pending_);
    return std::unique_ptr<DeviceEvent>(
        std::make_unique<Event>(*this, std::move(work), fails ? failure_ : ok_status()));
  }

  bool is_own(Bytes buffer) const {
    return std::ranges::any_of(own_, [&](Bytes own) {
      return own.data() <= buffer.data() &&
             buffer.data() + buffer.size() <= own.data() + own.size();
    });
  }

  const int asked_before_done_;
  const int64_t window_nbytes_;
  int64_t failing_ = -1;
  bool fails_at_beginning_ = false;
  Status failure_;
  Status no_buffers_;
  Status not_pinned_;
  mutable std::mutex mutex_;  // Guards what follows.
  mutable Buffers buffers_;
  std::vector<Bytes> own_;
  mutable int64_t begun_ = 0;
  mutable int64_t copied_ = 0;
  mutable int64_t multiplied_ = 0;
  mutable int64_t pending_ = 0;
  mutable int64_t most_pending_ = 0;
  mutable int64_t from_elsewhere_ = 0;
  mutable int64_t pinned_ = 0;
};

}  // namespace torch_ckpt
