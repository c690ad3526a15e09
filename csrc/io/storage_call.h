#pragma once

// StorageCall: the calls of the operating system or of a store in which threads wait now.
//
// A disk or store that hangs blocks the thread that uses it. Another thread lists these calls, so
// that a log names the file.

#include <cstdint>
#include <string>
#include <vector>

namespace torch_ckpt {

class IoCounts;

// A snapshot of a call in progress.
struct LongCall {
  uint64_t key;     // The same for all calls of one job. A later job may have it as well.
  uint64_t number;  // No other call of this process has it.
  std::string doing;
  std::string path;
  double waited_s;
  int64_t done_nbytes;
  int64_t total_nbytes;  // 0 if the call is of no job.
};

// Lists the call of this thread while it lives. Any thread may make one, also within another one:
// then the outer one is listed.
class StorageCall {
 public:
  // `doing` is a participle, such as "renaming". All three must outlive this object.
  StorageCall(const char* doing, const std::string& path, const IoCounts* job = nullptr);
  ~StorageCall();
  StorageCall(const StorageCall&) = delete;
  StorageCall& operator=(const StorageCall&) = delete;

  // Returns the calls that last longer than this. Of the calls of a job, it returns the longest.
  static std::vector<LongCall> longer_than(double seconds);

  // Waits until any call is in progress.
  static void wait_for_any();

 private:
  const char* const doing_;
  const std::string& path_;
  const IoCounts* const job_;
  const bool is_outer_;
  uint64_t number_ = 0;
  int64_t began_ns_ = 0;
  StorageCall* previous_ = nullptr;
  StorageCall* next_ = nullptr;
};

}  // namespace torch_ckpt
