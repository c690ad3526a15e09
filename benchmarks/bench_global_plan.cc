// What planning a save costs the coordinator, on synthetic workloads at scale: CPU seconds of
// GlobalPlan::make and of all assignments, peak resident memory of it all (encoded plans included),
// bytes of wire an item, and how even the result is.
//
//   cmake -S . -B build/bench -G Ninja -DTORCH_CKPT_BENCHMARKS=ON && ninja -C build/bench
//   build/bench/bench_global_plan                  # the small workloads
//   build/bench/bench_global_plan sharded-256      # one by name; alone in its process, for its
//                                                  # own peak

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "plan/balance.h"
#include "plan/global_plan.h"
#include "plan/plan_wire.h"

namespace torch_ckpt {
namespace {

double cpu_seconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double peak_gib() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / (1 << 20);
}

struct Workload {
  std::string name;
  int64_t ranks;
  std::function<ItemTable(int64_t rank)> items;
};

std::string fqn_of(int64_t i) {
  static const char* const kParts[] = {"attention.wq",   "attention.wk",    "attention.wv",
                                       "attention.wo",   "feed_forward.w1", "feed_forward.w2",
                                       "feed_forward.w3"};
  return "model.layers." + std::to_string(i / 7) + "." + kParts[i % 7] + ".weight";
}

Facts facts_of(Dims sizes) {
  return {.is_tensor = true,
          .dtype = "bfloat16",
          .itemsize = 2,
          .memory_format = "contiguous_format",
          .requires_grad = true,
          .pin_memory = false,
          .sizes = std::move(sizes)};
}

void add(ItemTable* table, const std::string& fqn, const Facts& facts, const Box& box) {
  const Status status = table->add_tensor(fqn, facts, ItemKind::kShard, box);
  if (!status.ok()) std::printf("%s\n", status.to_string().c_str());
}

// Matrices sharded on their first dimension, as FSDP does it.
ItemTable sharded(int64_t tensors, int64_t ranks, int64_t rank) {
  ItemTable table;
  for (int64_t i = 0; i < tensors; ++i) {
    const int64_t rows = 16 + i % 5;
    const Facts facts = facts_of({rows * ranks, 4096});
    add(&table, fqn_of(i), facts, {{rows * rank, 0}, {rows, 4096}});
  }
  return table;
}

ItemTable replicated(int64_t tensors) {
  ItemTable table;
  for (int64_t i = 0; i < tensors; ++i) {
    const Facts facts = facts_of({i == 0 ? 2'000'000 : 16 + i % 50, 4096});
    add(&table, fqn_of(i), facts, {{0, 0}, facts.sizes});
  }
  return table;
}

// 64 ranks as FSDP x TP of 16 x 4: matrices sharded both ways, norms only by FSDP, experts on a
// rank each, some things everywhere, and a state of its own on each rank.
ItemTable mixed(int64_t rank) {
  ItemTable table;
  const int64_t row = rank / 4;
  const int64_t column = rank % 4;
  for (int64_t i = 0; i < 20000; ++i) {
    add(&table, fqn_of(i), facts_of({1024, 4096}), {{64 * row, 1024 * column}, {64, 1024}});
    if (i % 4 == 0) add(&table, fqn_of(i) + ".norm", facts_of({4096}), {{256 * row}, {256}});
    if (i % 64 == rank)
      add(&table, fqn_of(i) + ".expert", facts_of({512, 1024}), {{0, 0}, {512, 1024}});
    if (i % 10 == 0)
      add(&table, fqn_of(i) + ".everywhere", facts_of({512, 512}), {{0, 0}, {512, 512}});
  }
  const Status status = table.add_object("rng." + std::to_string(rank), 5000);
  if (!status.ok()) std::printf("%s\n", status.to_string().c_str());
  return table;
}

int run(const Workload& workload) {
  std::vector<std::vector<std::byte>> wires;
  int64_t items = 0;
  int64_t wire_nbytes = 0;
  int64_t item_nbytes = 0;
  double begin = cpu_seconds();
  for (int64_t rank = 0; rank < workload.ranks; ++rank) {
    const ItemTable table = workload.items(rank);
    wires.push_back(encode(table));
    items += table.size();
    wire_nbytes += std::ssize(wires.back());
    item_nbytes += ssize(open_plan(wires.back())->items);
  }
  const double encode_seconds = cpu_seconds() - begin;

  begin = cpu_seconds();
  const int64_t decoded = decode(wires[0])->size();
  const double decode_seconds = cpu_seconds() - begin;

  begin = cpu_seconds();
  const auto plan = GlobalPlan::make({wires.begin(), wires.end()}, {.ranks_per_node = 8});
  if (!plan.ok()) {
    std::printf("%s\n", plan.status().to_string().c_str());
    return 1;
  }
  const double plan_seconds = cpu_seconds() - begin;
  begin = cpu_seconds();
  int64_t answer_nbytes = 0;
  for (int64_t rank = 0; rank < workload.ranks; ++rank) {
    answer_nbytes += std::ssize(encode(plan->assignment(rank)));
  }
  const double answer_seconds = cpu_seconds() - begin;
  const std::vector<int64_t>& load = plan->load();
  const double mean = static_cast<double>(std::accumulate(load.begin(), load.end(), int64_t{0})) /
                      static_cast<double>(load.size());
  const auto rate = [](int64_t count, double seconds) {
    return static_cast<double>(count) / std::max(seconds, 1e-6) / 1e6;
  };
  std::printf(
      "%s: %lld items, %.1f bytes of wire an item (%.1f without entries)\n"
      "  list and encode %.2f s (%.1f M items/s), decode one %.1f M items/s\n"
      "  plan %.2f CPU s, answers %.2f CPU s (%.1f bytes a rank), peak %.2f GiB\n"
      "  %lld boxes, busiest/mean %.4f\n",
      workload.name.c_str(), static_cast<long long>(items),
      static_cast<double>(wire_nbytes) / static_cast<double>(items),
      static_cast<double>(item_nbytes) / static_cast<double>(items), encode_seconds,
      rate(items, encode_seconds), rate(decoded, decode_seconds), plan_seconds, answer_seconds,
      static_cast<double>(answer_nbytes) / static_cast<double>(workload.ranks), peak_gib(),
      static_cast<long long>(plan->stored().box_count()),
      static_cast<double>(*std::max_element(load.begin(), load.end())) / mean);
  return 0;
}

int run_balance() {
  BalanceInput input = {.ranks_per_node = 8,
                        .load = std::vector<int64_t>(8),
                        .replica_sets = {{0, 1, 2, 3, 4, 5, 6, 7}},
                        .groups = {}};
  for (int64_t i = 0; i < 100000; ++i)
    input.groups.push_back({(i % 977 + 2) * 8192, 0, i % 977 + 2, 8192});
  const double begin = cpu_seconds();
  const Balanced balanced = balance(input);
  std::printf("balance: 100000 groups of 8 ranks in %.3f CPU s, %zu pieces\n",
              cpu_seconds() - begin, balanced.pieces.size());
  return 0;
}

}  // namespace
}  // namespace torch_ckpt

int main(int argc, char** argv) {
  using namespace torch_ckpt;
  const std::vector<Workload> workloads = {
      {"replicated-8", 8, [](int64_t) { return replicated(100000); }},
      {"mixed-64", 64, mixed},
      {"sharded-32", 32, [](int64_t rank) { return sharded(100000, 32, rank); }},
      {"sharded-256", 256, [](int64_t rank) { return sharded(100000, 256, rank); }},
      {"sharded-2048", 2048, [](int64_t rank) { return sharded(10000, 2048, rank); }},
  };
  if (argc == 1) {
    run_balance();
    for (size_t i = 0; i < 3; ++i) {
      if (run(workloads[i]) != 0) return 1;
    }
  }
  for (int i = 1; i < argc; ++i) {
    const auto found = std::find_if(workloads.begin(), workloads.end(),
                                    [&](const Workload& w) { return w.name == argv[i]; });
    if (found == workloads.end() || run(*found) != 0) return 1;
  }
  return 0;
}
