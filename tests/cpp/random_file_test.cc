// SaveJob and LoadJob against a model, over random layouts, disks and window sizes.

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "support/random_file.h"

namespace torch_ckpt::random_file_test {
namespace {

// TEST_CASES and TEST_SEED replace the number of cases and the first seed.
uint32_t from_environment(const char* name, uint32_t otherwise) {
  const char* text = std::getenv(name);
  const auto number = text == nullptr ? 0 : std::strtoul(text, nullptr, 10);
  return number == 0 ? otherwise : static_cast<uint32_t>(number);
}

TEST(RandomFileTest, EveryByteIsStoredAndLoadedInEveryMode) {
  const uint32_t first = from_environment("TEST_SEED", 1);
  const uint32_t count = from_environment("TEST_CASES", 300);
  for (uint32_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("TEST_CASES=1 TEST_SEED=" + std::to_string(seed));
    Choices choices(seed);
    expect_saves_and_loads(choices);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace torch_ckpt::random_file_test
