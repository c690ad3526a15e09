#pragma once

// A data file of random tensors: saved by a SaveJob, loaded by a LoadJob, and compared with the
// elements of the tensors, one by one. Shared by random_file_test.cc, which chooses by seed, and
// the fuzz target save_load_fuzzer, which chooses by its input.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/crc.h"
#include "engine/load/load_job.h"
#include "format/zip_frame.h"
#include "support/memory_file_system.h"
#include "support/opened_index.h"
#include "support/saved_checkpoint.h"
#include "support/saved_file.h"
#include "support/status_matchers.h"
#include "support/strided_oracle.h"
#include "support/test_tensor.h"

namespace torch_ckpt {

// Decisions: random ones of a seed, or those that the bytes of an input make, then zeros.
class Choices {
 public:
  explicit Choices(uint32_t seed) : random_(seed) {}
  explicit Choices(Bytes input) : input_(input), is_input_(true) {}

  // A number in [0, limit).
  int64_t below(int64_t limit) {
    if (!is_input_) return pick(random_, limit);
    int64_t value = 0;
    for (int64_t left = limit - 1; left > 0; left >>= 8) {
      value = value << 8 | (input_.empty() ? 0 : static_cast<int64_t>(input_.front()));
      input_ = input_.subspan(input_.empty() ? 0 : 1);
    }
    return value % limit;
  }
  bool one_in(int64_t count) { return below(count) == count - 1; }
  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }

 private:
  std::mt19937 random_;
  Bytes input_;
  bool is_input_ = false;
};

struct RandomFile {
  MemoryOptions disk;
  int64_t block_nbytes = 0;
  int64_t blocks = 0;
  SaveOptions save;
  LoadOptions load;
  std::vector<TestTensor> tensors;
  std::vector<bool> is_skipped;      // Its slice stays zero.
  std::vector<std::string> objects;  // Appended.
};

// The bytes of a tensor's memory, which differ from those of every other number.
inline void fill(std::vector<std::byte>& memory, uint64_t number) {
  uint64_t state = (number + 1) * 0x9E3779B97F4A7C15;
  for (size_t at = 0; at < memory.size(); at += sizeof state) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    std::memcpy(memory.data() + at, &state, std::min(sizeof state, memory.size() - at));
  }
}

// A view with these strides, at a random address that suits the dtype.
inline TestTensor view_of(Choices& choices, DType dtype, const Dims& sizes, const Dims& strides,
                          uint64_t number) {
  const int64_t size = itemsize(dtype);
  int64_t extent = size;
  for (size_t d = 0; d < sizes.size(); ++d)
    extent += std::max<int64_t>(sizes[d] - 1, 0) * strides[d];
  const int64_t offset = choices.one_of<int64_t>({0, 0, 64, size, 4096 - size});
  TestTensor out;
  out.memory = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(extent + 3 * 4096));
  fill(*out.memory, number);
  const auto begin = reinterpret_cast<uintptr_t>(out.memory->data());
  out.live = {
      .name = "t" + std::to_string(number), .dtype = dtype, .sizes = sizes, .strides = strides};
  out.live.data = out.memory->data() + (4096 - begin % 4096) % 4096 + offset;
  return out;
}

// Sizes of a tensor: of few elements, or of about as many bytes as a window or an in-place write.
inline Dims sizes_of(Choices& choices, int64_t itemsize) {
  if (choices.one_in(8)) return {};
  Dims sizes;
  for (int64_t dims = choices.below(3); dims > 0; --dims) sizes.push_back(1 + choices.below(9));
  const int64_t nbytes = choices.one_of<int64_t>({40, 5'000, 60'000, 140'000, 270'000, 1'060'000});
  const int64_t numel = checked_numel(sizes).value_or(1);
  const int64_t size = nbytes / itemsize / numel + choices.below(100);
  sizes.insert(sizes.begin() + choices.below(std::ssize(sizes) + 1), size);
  if (choices.one_in(20)) sizes[static_cast<size_t>(choices.below(std::ssize(sizes)))] = 0;
  return sizes;
}

// Strides in bytes: row-major, another order of dimensions, gaps between rows, or repeated rows.
inline Dims strides_of(Choices& choices, const Dims& sizes, int64_t itemsize) {
  const int64_t kind = choices.below(5);
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (kind == 2 || kind == 3) std::ranges::reverse(order);
  Dims strides(sizes.size());
  int64_t extent = itemsize;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = extent;
    extent *= std::max<int64_t>(sizes[order[i]], 1);
    if (kind == 3) extent += itemsize;
  }
  if (kind == 4 && !sizes.empty()) strides.front() = 0;
  return strides;
}

inline RandomFile random_file(Choices& choices) {
  RandomFile out;
  out.disk = {.alignment = choices.one_of<int64_t>({1, 512, 4096}),
              .resident = choices.one_in(2),
              .seed = static_cast<uint32_t>(choices.below(256))};
  out.block_nbytes = (1 + choices.below(16)) * 4096;
  out.blocks = 2 + choices.below(4);
  out.save.caching = choices.one_in(3) ? Caching::kBuffered : Caching::kDirect;
  out.save.sum_block_nbytes = choices.one_of<int64_t>({4096, kSumBlockNbytes});
  const int64_t read_nbytes = out.block_nbytes + 4 * out.save.sum_block_nbytes;
  const auto threads = static_cast<int>(1 + choices.below(3));
  out.load = {.buffer_nbytes = (2 + choices.below(4)) * threads * read_nbytes,
              .block_nbytes = read_nbytes,
              .threads = threads,
              .caching = choices.one_in(3) ? Caching::kBuffered : Caching::kDirect,
              .verify = !choices.one_in(4)};
  for (int64_t count = 1 + choices.below(7); count > 0; --count) {
    const auto dtype = static_cast<DType>(choices.below(kDTypeCount));
    const Dims sizes = sizes_of(choices, itemsize(dtype));
    const Dims strides = strides_of(choices, sizes, itemsize(dtype));
    out.tensors.push_back(view_of(choices, dtype, sizes, strides, out.tensors.size()));
    out.is_skipped.push_back(choices.one_in(10));
  }
  for (int64_t count = choices.below(3); count > 0; --count) {
    out.objects.emplace_back(static_cast<size_t>(choices.one_of<int64_t>({0, 1, 777, 100'001})),
                             'x');
  }
  return out;
}

inline std::string describe(const RandomFile& file) {
  std::string out = str_cat("alignment ", file.disk.alignment, ", blocks of ", file.block_nbytes,
                            file.save.caching == Caching::kDirect ? ", direct" : ", buffered");
  for (size_t i = 0; i < file.tensors.size(); ++i) {
    const LiveTensor& live = file.tensors[i].live;
    out += str_cat("\n  ", dtype_info(live.dtype).name, " ", to_string(live.sizes), " strides ",
                   to_string(live.strides), " at ", reinterpret_cast<uintptr_t>(live.data) % 4096,
                   file.is_skipped[i] ? " skipped" : "");
  }
  return out;
}

// Expects that the file consists of the frames of the tensors, the objects, and zeros.
inline void expect_every_byte(const RandomFile& file, const Layout& layout,
                              const std::vector<Slice>& appended, const std::string& contents) {
  std::string expected(
      static_cast<size_t>(appended.empty() ? layout.nbytes : appended.back().end()), '\0');
  for (size_t i = 0; i < file.tensors.size(); ++i) {
    if (file.is_skipped[i]) continue;
    const LiveTensor& live = file.tensors[i].live;
    const Slice& slice = layout.slices[i];
    const std::string payload = file.tensors[i].packed();
    const auto frame = TensorFrame::make(live.dtype, live.sizes);
    ASSERT_OK(frame);
    std::byte* out = reinterpret_cast<std::byte*>(expected.data());
    frame->write_head({out + slice.offset, static_cast<size_t>(slice.nbytes.head)});
    payload.copy(expected.data() + slice.payload_offset(), payload.size());
    frame->write_tail(crc32(0, as_bytes(payload)),
                      {out + slice.tail_offset(), static_cast<size_t>(slice.nbytes.tail)});
  }
  for (size_t i = 0; i < appended.size(); ++i) {
    file.objects[i].copy(expected.data() + appended[i].offset, file.objects[i].size());
  }
  ASSERT_EQ(contents.size(), expected.size());
  const auto [a, b] = std::ranges::mismatch(contents, expected);
  EXPECT_TRUE(a == contents.end()) << "byte " << a - contents.begin() << " differs";
}

// A request for a random box of a stored tensor, into a view of its own.
struct RandomLoad {
  TensorRequest request;
  TestTensor destination;
  std::vector<std::byte> expected;  // The memory of the destination after the load.
};

inline RandomLoad random_load(Choices& choices, const TestTensor& saved, const StoredSlice& slice,
                              uint64_t number) {
  Dims offsets(saved.live.sizes.size(), 0);
  Dims sizes = saved.live.sizes;
  for (size_t d = 0; d < sizes.size() && choices.one_in(2); ++d) {
    offsets[d] = choices.below(sizes[d] + 1);
    sizes[d] = choices.below(sizes[d] - offsets[d] + 1);
  }
  const int64_t size = itemsize(saved.live.dtype);
  Dims strides = strides_of(choices, sizes, size);
  if (!strides.empty() && strides.front() == 0) strides = times(contiguous_strides(sizes), size);
  RandomLoad out;
  out.destination = view_of(choices, saved.live.dtype, sizes, strides, number);
  out.expected = *out.destination.memory;
  const TestTensor source = saved.narrowed(offsets, sizes);
  std::byte* memory =
      out.expected.data() + (out.destination.live.data - out.destination.memory->data());
  for_each_index(sizes, [&](const Dims& index) {
    std::memcpy(memory + dot(index, strides), source.live.data + dot(index, source.live.strides),
                static_cast<size_t>(size));
  });
  out.request = part(slice, offsets, out.destination);
  return out;
}

// Saves the file, checks every byte of it, and loads random boxes of it, with its index and
// without.
inline void expect_saves_and_loads(Choices& choices) {
  const RandomFile file = random_file(choices);
  SCOPED_TRACE(describe(file));
  MemoryFileSystem fs(file.disk);
  const Layout layout = layout_of(file.tensors);
  const auto pool = make_pool(file.blocks * file.block_nbytes, file.block_nbytes);
  const std::string path = std::string(kCheckpoint) + "/a";
  ASSERT_OK_AND_ASSIGN(auto job, SaveJob::start(fs, path, layout, *pool, file.save));
  Index index = {.save_id = "0123456789abcdef", .has_entries = true};
  std::vector<StoredSlice> slices;
  for (size_t i = 0; i < file.tensors.size(); ++i) {
    const LiveTensor& live = file.tensors[i].live;
    const Slice& slice = layout.slices[i];
    slices.push_back({"a", slice.offset, slice.total_nbytes(), live.name});
    if (file.is_skipped[i]) continue;
    ASSERT_OK(job->write(static_cast<int64_t>(i), live));
    index.entries.push_back(entry_of(live, slice, 0));
  }
  std::vector<Slice> appended;
  for (const std::string& object : file.objects) {
    ASSERT_OK_AND_ASSIGN(const Slice slice, job->append(as_bytes(object)));
    appended.push_back(slice);
  }
  ASSERT_OK(job->finish());
  index.files.push_back({.name = "a", .sums = job->sums()});
  expect_every_byte(file, layout, appended, *fs.contents(path));
  for (const auto& opened_index : {opened(index), std::shared_ptr<const StoredIndex>()}) {
    std::vector<RandomLoad> loads;
    std::vector<TensorRequest> requests;
    for (size_t i = 0; i < file.tensors.size(); ++i) {
      for (int64_t count = file.is_skipped[i] ? 0 : choices.below(3); count > 0; --count) {
        loads.push_back(random_load(choices, file.tensors[i], slices[i], 100 + loads.size()));
        requests.push_back(loads.back().request);
      }
    }
    ASSERT_OK_AND_ASSIGN(const auto load, LoadJob::make(fs, kCheckpoint, file.load, opened_index));
    ASSERT_OK(load->run(requests, {}));
    for (const RandomLoad& one : loads) {
      EXPECT_TRUE(*one.destination.memory == one.expected)
          << one.request.slice.name << ", box " << to_string(one.request.box) << ", strides "
          << to_string(one.destination.live.strides) << (opened_index ? ", with" : ", without")
          << " an index";
    }
  }
}

}  // namespace torch_ckpt
