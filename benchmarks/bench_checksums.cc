// How fast the candidates for the checksums of blocks are: on one block that stays in the
// second-level cache, and on blocks that come from memory. Prints the best of several rounds, in
// GB/s.
//
//   apt-get install -y libisal-dev
//   cmake -S . -B build/bench -G Ninja -DTORCH_CKPT_BENCHMARKS=ON && ninja -C build/bench
//   build/bench/bench_checksums

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "base/block_sums.h"
#include "base/crc.h"
#include "base/xxh3.h"

#if TORCH_CKPT_HAVE_ISAL
#include <isa-l/crc.h>
#endif

namespace torch_ckpt {
namespace {

constexpr int64_t kTotal = int64_t{512} << 20;  // Bytes of a round, far beyond any cache.
constexpr int kRounds = 7;

using Work = std::function<uint64_t(Bytes block)>;

volatile uint64_t sink = 0;  // So that nothing is left out as useless.

// The best rate over blocks that begin `stride` apart; 0 for one block again and again.
double best_gb_per_s(const std::vector<std::byte>& bytes, int64_t stride, const Work& work) {
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t at = 0; at < kTotal; at += kSumBlockNbytes) {
      sink = sink + work(slice(Bytes(bytes), stride == 0 ? 0 : at, kSumBlockNbytes));
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    best = std::max(best, static_cast<double>(kTotal) / seconds.count() / 1e9);
  }
  return best;
}

}  // namespace
}  // namespace torch_ckpt

int main() {
  using namespace torch_ckpt;
  std::vector<std::byte> bytes(kTotal);
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(i * 2654435761u >> 13);
  std::vector<std::byte> copy(kSumBlockNbytes);
  const std::vector<std::pair<const char*, Work>> candidates = {
    {"memcpy, for comparison",
     [&](Bytes block) {
       std::memcpy(copy.data(), block.data(), block.size());
       return static_cast<uint64_t>(copy[block[0] == std::byte{1} ? 1 : 2]);
     }},
    {"CRC-32 (libdeflate)", [](Bytes block) { return uint64_t{crc32(0, block)}; }},
#if TORCH_CKPT_HAVE_ISAL
    {"CRC-32C (ISA-L)",
     [](Bytes block) {
       auto* data = reinterpret_cast<unsigned char*>(const_cast<std::byte*>(block.data()));
       return uint64_t{crc32_iscsi(data, static_cast<int>(block.size()), 0)};
     }},
#endif
    {"XXH3-64", [](Bytes block) { return xxh3(block); }},
  };
  std::printf("blocks of %lld bytes, best of %d rounds of %lld MiB\n",
              static_cast<long long>(kSumBlockNbytes), kRounds,
              static_cast<long long>(kTotal >> 20));
  std::printf("%-24s %12s %12s\n", "GB/s", "in cache", "from memory");
  for (const auto& [name, work] : candidates) {
    std::printf("%-24s %12.1f %12.1f\n", name, best_gb_per_s(bytes, 0, work),
                best_gb_per_s(bytes, kSumBlockNbytes, work));
  }
  return 0;
}
