#pragma once

// Files that tests compare with, found beside the sources. With TORCH_CKPT_UPDATE_GOLDEN set in the
// environment, `expect_golden` writes the file instead; what changed is then for `git diff` to
// show.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <string_view>

namespace torch_ckpt {

// `relative` counts from the root of the repository.
inline std::filesystem::path repository_path(const std::string& relative) {
  return std::filesystem::path(TORCH_CKPT_SOURCE_DIR) / relative;
}

inline std::string read_repository_file(const std::string& relative) {
  std::ifstream file(repository_path(relative), std::ios::binary);
  EXPECT_TRUE(file.is_open()) << relative;
  return {std::istreambuf_iterator<char>(file), {}};
}

// The bytes of the listing under a heading of FORMAT.md. Its lines are "<offset>  <bytes>
// <remark>", the first two in hexadecimal.
inline std::string format_md_listing(const std::string& heading) {
  std::istringstream lines(read_repository_file("csrc/format/FORMAT.md"));
  std::string shown;
  bool inside = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("## ")) inside = line == "## " + heading;
    if (!inside || line.size() < 8 || line.substr(4, 2) != "  " ||
        line.find_first_not_of("0123456789abcdef") != 4) {
      continue;
    }
    EXPECT_EQ(std::stoul(line.substr(0, 4), nullptr, 16), shown.size()) << line;
    std::istringstream row(line.substr(6, line.find("  ", 6) - 6));
    for (std::string byte; row >> byte;) {
      shown += static_cast<char>(std::stoul(byte, nullptr, 16));
    }
  }
  EXPECT_FALSE(shown.empty()) << "FORMAT.md has no listing under \"" << heading << '"';
  return shown;
}

inline void expect_golden(const std::string& relative, std::string_view bytes) {
  if (std::getenv("TORCH_CKPT_UPDATE_GOLDEN") != nullptr) {
    std::filesystem::create_directories(repository_path(relative).parent_path());
    std::ofstream file(repository_path(relative), std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  EXPECT_TRUE(read_repository_file(relative) == bytes) << relative << " differs";
}

}  // namespace torch_ckpt
