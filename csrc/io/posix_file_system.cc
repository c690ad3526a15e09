#include "io/posix_file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/retry.h"
#include "io/posix_file.h"
#include "io/storage_call.h"
#include "io/thread_queue.h"
#include "io/uring_queue.h"

namespace torch_ckpt {
namespace {

#ifndef FUSE_SUPER_MAGIC
constexpr long FUSE_SUPER_MAGIC = 0x65735546;
#endif

constexpr mode_t kDirectoryMode = 0777;  // Reduced by the umask of the process.

// OK if `path` is a directory; kNotFound if nothing exists there.
Status check_directory(const std::string& path) {
  struct stat stat = {};
  int error = 0;
  if (::stat(path.c_str(), &stat) != 0) {
    error = errno;
  } else if (!S_ISDIR(stat.st_mode)) {
    error = ENOTDIR;
  }
  return error == 0 ? ok_status() : errno_status(error, str_cat("cannot create folder ", path));
}

// As `check_directory`, for a name that exists according to mkdir, which does not follow links.
Status check_existing_name(const std::string& path) {
  const Status found = check_directory(path);
  if (found.code() != StatusCode::kNotFound) return found;
  // A slash at the end would follow the link.
  const std::string name = path.substr(0, path.find_last_not_of('/') + 1);
  std::error_code error;
  const std::string target = std::filesystem::read_symlink(name, error).string();
  if (error) return found;  // No link: another process has removed the folder meanwhile.
  return Status(StatusCode::kNotFound,
                str_cat("cannot create folder ", path, ": it is a symbolic link whose target ",
                        target, " does not exist (ENOENT)"),
                ENOENT);
}

}  // namespace

Result<std::unique_ptr<File>> PosixFileSystem::open(const std::string& path, OpenMode mode,
                                                    Caching caching) {
  ASSIGN_OR_RETURN(std::unique_ptr<File> file, PosixFile::open(path, mode, caching));
  return file;
}

Status PosixFileSystem::create_directories(const std::string& path) {
  const StorageCall call("creating", path);
  if (path.empty()) return invalid_argument("cannot create a folder without a name");
  const Status found = check_directory(path);
  if (found.code() != StatusCode::kNotFound) return found;

  const std::string parent = parent_directory(path);
  if (parent == path) return found;  // "." or "/" does not exist: there is no parent to create.
  RETURN_IF_ERROR(create_directories(parent));
  if (::mkdir(path.c_str(), kDirectoryMode) != 0) {
    // Another rank created the directory first, and syncs the parent; or it is a broken link.
    if (errno == EEXIST) return check_existing_name(path);
    return errno_status(errno, str_cat("cannot create folder ", path));
  }
  return sync_directory(parent);
}

Result<std::vector<std::string>> PosixFileSystem::list_directory(const std::string& path) {
  const StorageCall call("listing", path);
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(path.c_str()), ::closedir);
  if (!directory) return errno_status(errno, str_cat("cannot list ", path));
  std::vector<std::string> names;
  for (;;) {
    errno = 0;  // readdir returns null at the end and on errors; errno distinguishes them.
    const dirent* entry = ::readdir(directory.get());
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  if (errno != 0) return errno_status(errno, str_cat("cannot list ", path));
  std::sort(names.begin(), names.end());
  return names;
}

Status PosixFileSystem::rename(const std::string& from, const std::string& to) {
  const StorageCall call("renaming", from);
  if (retry_interrupted([&] { return ::rename(from.c_str(), to.c_str()); }) != 0) {
    return errno_status(errno, str_cat("cannot rename ", from, " to ", to));
  }
  return ok_status();
}

Status PosixFileSystem::link(const std::string& from, const std::string& to, bool sync) {
  const StorageCall call("linking", from);
  // A name of the file itself, not of a symbolic link to it, which may break or change.
  if (::linkat(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), AT_SYMLINK_FOLLOW) != 0) {
    const int error = errno;
    const auto text = str_cat("cannot link ", from, " to ", to);
    switch (error) {
      // EPERM: no links at all, or not to the files of others. EMLINK: it has too many.
      case EXDEV:
      case EPERM:
      case EMLINK:
      case EOPNOTSUPP:
      case ENOSYS:
        return unsupported(text, ": ", std::strerror(error));
      default:
        return errno_status(error, text);
    }
  }
  // A program that purges old files would otherwise remove the new name for the age of the old one.
  (void)::utimensat(AT_FDCWD, to.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
  if (!sync) return ok_status();
  const Descriptor file(
      retry_interrupted([&] { return ::open(to.c_str(), O_RDONLY | O_CLOEXEC); }));
  if (!file.valid() || ::fsync(file.get()) != 0) {
    const int error = errno;
    (void)::unlink(to.c_str());
    return errno_status(error, str_cat("cannot sync ", to));
  }
  return ok_status();
}

bool PosixFileSystem::renames_directories(const std::string& parent) {
  const StorageCall call("inspecting", parent);
  struct statfs stat = {};
  const int rc = retry_interrupted([&] { return ::statfs(parent.c_str(), &stat); });
  return rc == 0 && stat.f_type != FUSE_SUPER_MAGIC;
}

Status PosixFileSystem::exchange(const std::string& one, const std::string& other) {
  const StorageCall call("exchanging", one);
  constexpr unsigned kExchange = 1 << 1;  // RENAME_EXCHANGE, of newer headers than we need.
  const auto exchanged = retry_interrupted([&] {
    return ::syscall(SYS_renameat2, AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), kExchange);
  });
  if (exchanged != 0) {
    return errno_status(errno, str_cat("cannot exchange ", one, " and ", other));
  }
  return ok_status();
}

Status PosixFileSystem::remove(const std::string& path) {
  const StorageCall call("removing", path);
  if (retry_interrupted([&] { return std::remove(path.c_str()); }) != 0) {
    return errno_status(errno, str_cat("cannot remove ", path));
  }
  return ok_status();
}

Result<double> PosixFileSystem::modified_s(const std::string& path) {
  const StorageCall call("inspecting", path);
  struct stat stat = {};
  if (::stat(path.c_str(), &stat) != 0) return errno_status(errno, str_cat("cannot find ", path));
  return static_cast<double>(stat.st_mtim.tv_sec) +
         1e-9 * static_cast<double>(stat.st_mtim.tv_nsec);
}

Status PosixFileSystem::sync_directory(const std::string& path) {
  const StorageCall call("syncing", path);
  const Descriptor directory(
      retry_interrupted([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  if (!directory.valid()) return errno_status(errno, str_cat("cannot open folder ", path));
  if (::fsync(directory.get()) == 0) return ok_status();
  switch (errno) {
    // The file system or a sandbox has no such call. Its own order of writes must do.
    case EINVAL:
    case EOPNOTSUPP:
    case ENOSYS:
    case EPERM:
      return ok_status();
    default:
      return errno_status(errno, str_cat("cannot sync folder ", path));
  }
}

std::unique_ptr<IoQueue> PosixFileSystem::make_queue(int depth) {
  const char* wish = std::getenv("TORCH_CKPT_IO");
  if (wish != nullptr && std::string_view(wish) == "threads") {
    return make_thread_queue(depth, "TORCH_CKPT_IO=threads is set");
  }
#if TORCH_CKPT_HAVE_URING
  Result<std::unique_ptr<IoQueue>> queue = make_uring_queue(depth);
  if (queue.ok()) return std::move(*queue);
  return make_thread_queue(depth, queue.status().message());
#else
  return make_thread_queue(depth, "built without liburing");
#endif
}

}  // namespace torch_ckpt
