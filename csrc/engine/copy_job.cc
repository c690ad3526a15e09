#include "engine/copy_job.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "engine/file_sums.h"

namespace torch_ckpt {
namespace {

// Bounds the time until a cancellation takes effect.
constexpr auto kLongestSleep = std::chrono::milliseconds(50);

// After a stall, the copy exceeds its rate only until it has recovered this much time.
constexpr auto kMaxDelay = std::chrono::seconds(1);

// Returns the length of the pieces of a file: whole blocks, and if the rate allows a block in a
// second, no more bytes than in a second.
int64_t piece_nbytes(int64_t nbytes_per_s, int64_t block_nbytes) {
  int64_t nbytes = kPieceNbytes;
  while (nbytes_per_s > 0 && nbytes > nbytes_per_s && nbytes / 2 % block_nbytes == 0) nbytes /= 2;
  return nbytes;
}

}  // namespace

CopyJob::CopyJob(std::shared_ptr<const StoredIndex> index, int64_t nbytes_per_s)
    : index_(std::move(index)), nbytes_per_s_(nbytes_per_s), free_at_(Clock::now()) {}

Status CopyJob::copy(int64_t file, FileSystem& from, const std::string& source, FileSystem& to,
                     const std::string& target) {
  if (file < 0 || file >= index_->file_count()) {
    return invalid_argument("the index has no file ", file);
  }
  ASSIGN_OR_RETURN(const StoredFile indexed, index_->file(file));
  const FileSums sums(index_, indexed);
  int64_t end = 0;
  const auto check = [&](int64_t offset, Bytes piece) -> Status {
    RETURN_IF_ERROR(pace(ssize(piece)));
    end = offset + ssize(piece);
    // Pieces are whole blocks, unless the file is longer than the index says.
    if (end > sums.file_nbytes || offset % sums.block_nbytes != 0 ||
        (end % sums.block_nbytes != 0 && end != sums.file_nbytes)) {
      return corruption("cannot copy ", source, ": the index has ", sums.file_nbytes,
                        " bytes of it, in blocks of ", sums.block_nbytes,
                        ", and it has bytes up to ", end);
    }
    ASSIGN_OR_RETURN(const int64_t mismatch, sums.first_mismatch(offset, piece));
    if (mismatch >= 0) {
      return corruption("cannot copy ", source, ": the checksum of the block at ", mismatch,
                        " does not match");
    }
    copied_nbytes_.fetch_add(ssize(piece), std::memory_order_relaxed);
    return ok_status();
  };
  RETURN_IF_ERROR(
      copy_file(from, source, to, target, check, piece_nbytes(nbytes_per_s_, sums.block_nbytes)));
  if (end != sums.file_nbytes) {
    return corruption("cannot copy ", source, ": it has ", end, " bytes instead of ",
                      sums.file_nbytes);
  }
  return ok_status();
}

Status CopyJob::pace(int64_t nbytes) {
  const auto cancelled = [this] { return cancelled_.load(std::memory_order_relaxed); };
  if (nbytes_per_s_ > 0) {
    const std::chrono::duration<double> lasts(static_cast<double>(nbytes) /
                                              static_cast<double>(nbytes_per_s_));
    free_at_ = std::max(free_at_, Clock::now() - kMaxDelay) +
               std::chrono::duration_cast<Clock::duration>(lasts);
    while (!cancelled() && Clock::now() < free_at_) {
      std::this_thread::sleep_until(std::min(free_at_, Clock::now() + kLongestSleep));
    }
  }
  return cancelled() ? torch_ckpt::cancelled("the copy was cancelled") : ok_status();
}

}  // namespace torch_ckpt
