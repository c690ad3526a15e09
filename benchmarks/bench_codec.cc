// How fast one core makes and applies a difference between two versions of bf16 weights, in GB/s of
// the weights, and which share of their bytes the difference has, at several learning rates of one
// Adam step. The parts take turns; the figures are the best of several rounds, by processor time.
//
//   apt-get install -y libzstd-dev
//   cmake -S . -B build/bench -G Ninja -DTORCH_CKPT_BENCHMARKS=ON && ninja -C build/bench
//   build/bench/bench_codec [ROUNDS [MIB]]

#include <time.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/memory.h"
#include "base/xxh3.h"
#include "engine/publish/difference.h"
#include "engine/publish/merge.h"
#include "engine/save/snapshot.h"

namespace torch_ckpt {
namespace {

constexpr double kLearningRates[] = {1e-6, 3e-6, 1e-5, 1e-4};
constexpr double kStdDev = 0.02;

uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Weights before and after a step of Adam, whose masters are fp32.
void make_versions(double rate, Memory& before, Memory& after) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> weight(0, static_cast<float>(kStdDev));
  std::normal_distribution<float> update(0, 1);
  for (int64_t at = 0; at < before.nbytes(); at += 2) {
    const float master = weight(random);
    const float step = update(random) * static_cast<float>(rate);
    store_le(before.bytes().data() + at, to_bf16(master));
    store_le(after.bytes().data() + at, to_bf16(master + step));
  }
}

LiveTensor tensor_of(Memory& memory) {
  return {.name = "weights",
          .dtype = DType::kBFloat16,
          .sizes = {memory.nbytes() / 2},
          .strides = {2},
          .data = memory.bytes().data()};
}

void require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.to_string().c_str());
  std::exit(1);
}

// The processor time of this thread, which has no time slices of other programs.
double thread_seconds() {
  timespec now = {};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

template <typename T>
T value(Result<T> result) {
  require(result.status());
  return std::move(*result);
}

Memory allocate(int64_t nbytes) {
  Memory memory = value(HeapMemorySource().allocate(nbytes));
  require(memory.populate(1));
  return memory;
}

// What is timed at one learning rate.
class Rates {
 public:
  Rates(double rate, int64_t nbytes)
      : rate_(rate), before_(allocate(nbytes)), after_(allocate(nbytes)), live_(allocate(nbytes)) {
    make_versions(rate, before_, after_);
    snapshot_ = value(Snapshot::make(heap_, nbytes, 1));
    digests_.resize(static_cast<size_t>(block_count(nbytes)));
    box_ = {{0}, {nbytes / 2}};
  }

  void round() {
    const LiveTensor before = tensor_of(before_);
    const LiveTensor after = tensor_of(after_);
    const LiveTensor live = tensor_of(live_);
    std::vector<std::byte> mask(before_.bytes().size());
    time(0, [&] { require(snapshot_->copy(std::array{PackedCopy{after, 0}}, 1)); });
    require(take_snapshot(live, before, digests_, 1));
    Result<BoxDifference> taken = BoxDifference();
    time(1, [&] { taken = take_difference(live, after, 0, blocks(), digests_, 1, memory_); });
    BoxDifference difference = value(std::move(taken));
    raw_nbytes_ = difference.nbytes();
    changed_ = difference.changed_nbytes();
    EncodedDifference encoded;
    time(2, [&] { encoded = value(difference.encode(1)); });
    nbytes_ = std::ssize(encoded.payload) + std::ssize(encoded.table);
    const StoredBlocks stored = {
        .box = box_, .itemsize = 2, .table = encoded.table, .payload = encoded.payload};
    time(3, [&] { require(merge_blocks(mask, &before, box_, stored, 1)); });
    std::ranges::fill(mask, std::byte{0});
    time(4, [&] { require(merge_blocks(mask, nullptr, box_, stored, 1)); });
    require(take_snapshot(live, before, digests_, 1));
    time(5, [&] { require(apply_mask(live, mask, 1)); });
    if (std::memcmp(live_.bytes().data(), after_.bytes().data(), mask.size()) != 0) {
      std::fprintf(stderr, "the values differ\n");
      std::exit(1);
    }
  }

  static void print_head() {
    std::printf("%-8s%10s%10s%9s%9s%9s%9s%9s%9s%9s%9s\n", "rate", "changed", "int32+2", "encoded",
                "raw", "copy", "take", "encode", "merge", "decode", "apply");
  }

  void print() const {
    const auto total = static_cast<double>(before_.nbytes());
    const auto share = [&](int64_t nbytes) { return 100 * static_cast<double>(nbytes) / total; };
    std::printf("%-8.0e%9.1f%%%9.1f%%%8.2f%%%8.2f%%", rate_, share(changed_), share(3 * changed_),
                share(nbytes_), share(raw_nbytes_));
    for (const double seconds : best_) std::printf("%9.2f", total / seconds / 1e9);
    std::printf("\n");
  }

 private:
  int64_t blocks() const { return std::ssize(digests_); }

  void time(size_t part, const std::function<void()>& work) {
    const double begin = thread_seconds();
    work();
    best_[part] = std::min(best_[part], thread_seconds() - begin);
  }

  double rate_;
  HeapMemorySource heap_;
  Memory before_;
  Memory after_;
  Memory live_;
  std::unique_ptr<Snapshot> snapshot_;
  std::shared_ptr<DifferenceMemory> memory_ = std::make_shared<DifferenceMemory>();
  std::vector<uint64_t> digests_;
  Box box_;
  int64_t nbytes_ = 0;
  int64_t raw_nbytes_ = 0;
  int64_t changed_ = 0;
  std::array<double, 6> best_ = {1e9, 1e9, 1e9, 1e9, 1e9, 1e9};
};

}  // namespace
}  // namespace torch_ckpt

int main(int argc, char** argv) {
  using namespace torch_ckpt;
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 7;
  const int64_t nbytes = (argc > 2 ? std::atoll(argv[2]) : 64) << 20;
  std::vector<Rates> all;
  for (const double rate : kLearningRates) all.emplace_back(rate, nbytes);
  for (int round = 0; round < rounds; ++round) {
    for (Rates& rates : all) rates.round();
  }
  std::printf("bf16 weights of %lld MiB, one thread, best of %d rounds\n",
              static_cast<long long>(nbytes >> 20), rounds);
  std::printf("share of the weights' bytes; then GB/s of the weights\n");
  Rates::print_head();
  for (const Rates& rates : all) rates.print();
  return 0;
}
