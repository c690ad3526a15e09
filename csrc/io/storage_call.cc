#include "io/storage_call.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <new>

#include "io/io_counts.h"

namespace torch_ckpt {
namespace {

int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// The calls in progress, in the order of their begin.
struct Calls {
  std::mutex mutex;  // Guards the members below.
  std::condition_variable has_any;
  StorageCall* first = nullptr;
  StorageCall* last = nullptr;
  uint64_t count = 0;      // Calls so far.
  uint64_t inherited = 0;  // Those of them that began before the fork of this process.
};

thread_local bool has_call = false;

// Never destroyed: threads may wait when the process ends.
alignas(Calls) std::byte memory_of_calls[sizeof(Calls)];

Calls& calls() {
  static Calls* const made = [] {
    // A forked child has neither the threads of these calls nor, perhaps, a mutex that is free.
    ::pthread_atfork(nullptr, nullptr, [] {
      // Not calls(): another thread of the parent may have been about to make them.
      const uint64_t count = std::launder(reinterpret_cast<Calls*>(memory_of_calls))->count;
      Calls* const anew = new (memory_of_calls) Calls();
      anew->count = anew->inherited = count;
      has_call = false;
    });
    return new (memory_of_calls) Calls();
  }();
  return *made;
}

}  // namespace

StorageCall::StorageCall(const char* doing, const std::string& path, const IoCounts* job)
    : doing_(doing), path_(path), job_(job), is_outer_(!has_call) {
  if (!is_outer_) return;
  has_call = true;
  began_ns_ = now_ns();
  Calls& all = calls();
  {
    const std::lock_guard lock(all.mutex);
    number_ = ++all.count;
    previous_ = all.last;
    (previous_ == nullptr ? all.first : previous_->next_) = this;
    all.last = this;
  }
  all.has_any.notify_one();
}

StorageCall::~StorageCall() {
  if (!is_outer_) return;
  has_call = false;
  Calls& all = calls();
  const std::lock_guard lock(all.mutex);
  if (number_ <= all.inherited) return;  // The child of a fork within this call does not list it.
  (previous_ == nullptr ? all.first : previous_->next_) = next_;
  (next_ == nullptr ? all.last : next_->previous_) = previous_;
}

std::vector<LongCall> StorageCall::longer_than(double seconds) {
  std::map<uint64_t, LongCall> found;
  const int64_t now = now_ns();
  Calls& all = calls();
  const std::lock_guard lock(all.mutex);
  for (const StorageCall* call = all.first; call != nullptr; call = call->next_) {
    const double waited_s = static_cast<double>(now - call->began_ns_) * 1e-9;
    if (waited_s < seconds) continue;
    const IoCounts* const job = call->job_;
    const uint64_t key = job == nullptr ? call->number_ : reinterpret_cast<uintptr_t>(job);
    found.try_emplace(key, LongCall{key, call->number_, call->doing_, call->path_, waited_s,
                                    job == nullptr ? 0 : job->done_nbytes(),
                                    job == nullptr ? 0 : job->total_nbytes()});
  }
  std::vector<LongCall> out;
  for (auto& [key, call] : found) out.push_back(std::move(call));
  return out;
}

void StorageCall::wait_for_any() {
  Calls& all = calls();
  std::unique_lock lock(all.mutex);
  all.has_any.wait(lock, [&] { return all.first != nullptr; });
}

}  // namespace torch_ckpt
