#pragma once

// Files that tests compare with, found beside the sources. With TORCH_CKPT_UPDATE_GOLDEN set in the
// environment, `expect_golden` writes the file instead; what changed is then for `git diff` to
// show.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

namespace torch_ckpt {

// `relative` counts from the root of the repository.
inline std::filesystem::path repository_path(const std::string& relative) {
  return std::filesystem::absolute(__FILE__).parent_path() / "../../.." / relative;
}

inline std::string read_repository_file(const std::string& relative) {
  std::ifstream file(repository_path(relative), std::ios::binary);
  EXPECT_TRUE(file.is_open()) << relative;
  return {std::istreambuf_iterator<char>(file), {}};
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
