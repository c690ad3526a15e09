// Runs a fuzz target without libFuzzer, for compilers that lack it. Each PATH is a file or a folder
// of files. The target runs on every file unchanged, then on N mutations of the files. Runs with
// the same arguments are identical.
//
//   <target> [-runs=N] [-seed=N] PATH...

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" __attribute__((weak)) int LLVMFuzzerInitialize(int* argc, char*** argv);

namespace {

using Input = std::vector<uint8_t>;
namespace fs = std::filesystem;

void add(const fs::path& path, std::vector<Input>* inputs) {
  if (fs::is_directory(path)) {
    std::vector<fs::path> entries(fs::directory_iterator(path), {});
    std::sort(entries.begin(), entries.end());
    for (const fs::path& entry : entries) add(entry, inputs);
    return;
  }
  std::ifstream file(path, std::ios::binary);
  inputs->emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  // Returns a random input with one to four edits. An edit changes a bit, a byte or a number.
  // Otherwise it removes or duplicates a range, or replaces it by a range of another input.
  Input mutate(const std::vector<Input>& inputs) {
    Input input = inputs[below(inputs.size())];
    const Input& other = inputs[below(inputs.size())];
    for (size_t edits = 1 + below(4); edits > 0 && !input.empty(); --edits) {
      const size_t at = below(input.size());
      const size_t count = std::min(1 + below(64), input.size() - at);
      const auto begin = input.begin() + static_cast<std::ptrdiff_t>(at);
      switch (below(6)) {
        case 0:
          input[at] ^= static_cast<uint8_t>(1U << below(8));
          break;
        case 1:
          input[at] = static_cast<uint8_t>(below(256));
          break;
        case 2:
          std::fill_n(begin, std::min<size_t>(count, 8), below(2) == 0 ? 0xFF : 0);
          break;
        case 3:
          input.erase(begin, begin + static_cast<std::ptrdiff_t>(count));
          break;
        case 4: {
          const Input copy(begin, begin + static_cast<std::ptrdiff_t>(count));
          input.insert(begin, copy.begin(), copy.end());
          break;
        }
        default: {
          if (other.empty()) break;
          const size_t from = below(other.size());
          const size_t length = std::min(count, other.size() - from);
          std::copy_n(other.begin() + static_cast<std::ptrdiff_t>(from), length, begin);
        }
      }
    }
    return input;
  }

 private:
  // The results of std::uniform_int_distribution differ between standard libraries.
  size_t below(size_t limit) { return static_cast<size_t>(random_() % limit); }

  std::mt19937_64 random_;
};

}  // namespace

int main(int argc, char** argv) {
  if (LLVMFuzzerInitialize != nullptr) LLVMFuzzerInitialize(&argc, &argv);
  uint64_t runs = 0;
  uint64_t seed = 1;
  std::vector<Input> inputs;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("-runs=")) {
      runs = std::stoull(argument.substr(6));
    } else if (argument.starts_with("-seed=")) {
      seed = std::stoull(argument.substr(6));
    } else {
      add(argument, &inputs);
    }
  }
  if (inputs.empty()) {
    std::cerr << "no inputs\n";
    return 1;
  }
  for (const Input& input : inputs) LLVMFuzzerTestOneInput(input.data(), input.size());
  Mutator mutator(seed);
  for (uint64_t i = 0; i < runs; ++i) {
    const Input input = mutator.mutate(inputs);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::cout << inputs.size() << " inputs and " << runs << " mutations\n";
}
