// Saves the tensors that arbitrary bytes describe into a file in memory, checks every byte of it,
// and loads random boxes. The model is tests/cpp/support/random_file.h.

#include <gtest/gtest.h>

#include "base/bytes.h"
#include "support/random_file.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  testing::InitGoogleTest(argc, *argv);
  testing::FLAGS_gtest_break_on_failure = true;
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  torch_ckpt::Choices choices(torch_ckpt::Bytes(reinterpret_cast<const std::byte*>(data), size));
  torch_ckpt::expect_saves_and_loads(choices);
  return 0;
}
