#pragma once

// A folder for one test, gone with everything in it when the test ends.

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace torch_ckpt {

class TempDirectory {
 public:
  // Under $TMPDIR, or /tmp. Another `parent` chooses the file system.
  explicit TempDirectory(std::string parent = "") {
    if (parent.empty()) {
      const char* chosen = std::getenv("TMPDIR");
      parent = chosen != nullptr && *chosen != '\0' ? chosen : "/tmp";
    }
    path_ = parent + "/torch_ckpt_test_XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) path_.clear();
  }
  ~TempDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  // Empty when the folder could not be made.
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace torch_ckpt
