#pragma once

// Upload: an object that is written as a stream, by requests of an `IoQueue`. Used by the files of
// `StoreFileSystem`.
//
// A client of a store pulls the bytes, in its own thread. The writer pushes them, from the threads
// of a queue. A write returns once the client no longer needs its memory, so no bytes are copied,
// and no memory is needed beyond that of the writes in flight.
//
// A client retains a part until all its bytes have arrived. If the writer has less memory than a
// part, its bytes are copied, and the copies take at most the memory of two parts. An object that
// fits one part is copied, too, and written in one request at its end.

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/bytes.h"
#include "base/status.h"
#include "io/object_store.h"

namespace torch_ckpt {

// Length of the parts of an object of so many bytes, which may grow to twice this length.
int64_t part_nbytes(int64_t object_nbytes);

class Upload {
 public:
  // Requires: `store` outlives the upload.
  Upload(ObjectStore& store, std::string path);
  ~Upload();  // Abandons an upload that has not finished.
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  // Sets the length that the object will have at least, which determines that of its parts.
  // Requires: no byte was written.
  void expect(int64_t nbytes);

  // The length of the parts, if all writes are as long. Longer writes are a part each.
  int64_t part_nbytes() const;

  // Passes bytes to the client, after all bytes before `offset`, and waits until their memory is
  // not in use. The last writes return when `finish` has ended the object.
  // Several threads may call it, `in_flight` at a time. Requires: the offsets are those of a file
  // without gaps; all writes but the last have one length.
  Status write(int64_t offset, Bytes bytes, int in_flight);

  // Waits for all bytes before `nbytes`, ends the object, and waits until the store has it.
  Status finish(int64_t nbytes);

  // Makes every call fail from now on, also those that wait. A write still waits for the client to
  // release its memory.
  void abandon();

 private:
  struct State;
  struct Copy;
  class Source;

  void start(int64_t window_nbytes, int in_flight);  // Requires: the lock.
  void run();
  Status pass(std::unique_lock<std::mutex> lock, Bytes bytes);
  Status pass_copy(std::unique_lock<std::mutex> lock, Bytes bytes);

  ObjectStore& store_;
  const std::string path_;
  const std::shared_ptr<State> state_;  // Shared with copies, which a client may release later.
  int64_t expected_nbytes_ = 0;
  // Written by the first `write` that does not fit one request, with the lock.
  bool has_started_ = false;
  bool copies_ = false;
  int64_t part_nbytes_ = 0;
  std::thread thread_;  // The client's.
};

}  // namespace torch_ckpt
