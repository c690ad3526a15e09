// Every kernel, and what runs it, byte for byte against the CPU. Needs a GPU.

#include "device/cuda_device.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/dequantization.h"
#include "engine/load/load_job.h"
#include "engine/unpacking.h"
#include "support/indexed_checkpoint.h"
#include "support/pack_cases.h"
#include "support/status_matchers.h"
#include "support/test_tensor.h"

namespace torch_ckpt {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// Memory of the GPU, with bytes of the host in it.
class OnGpu {
 public:
  explicit OnGpu(Bytes bytes) : nbytes_(bytes.size()) {
    EXPECT_EQ(cudaMalloc(&data_, nbytes_ + 1), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, bytes.data(), nbytes_, cudaMemcpyDefault), cudaSuccess);
  }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  ~OnGpu() { cudaFree(data_); }

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  MutableBytes bytes() const { return {data(), nbytes_}; }
  std::vector<std::byte> fetch() const {
    std::vector<std::byte> out(nbytes_);
    EXPECT_EQ(cudaMemcpy(out.data(), data_, nbytes_, cudaMemcpyDefault), cudaSuccess);
    return out;
  }

 private:
  size_t nbytes_;
  void* data_ = nullptr;
};

class CudaDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    const Status available = cuda_available();
    if (!available.ok()) GTEST_SKIP() << available.message();
  }

  // Pinned, and with these bytes.
  Memory pinned(Bytes bytes) {
    Result<Memory> memory = PinnedMemorySource(0).allocate(std::max<int64_t>(1, ssize(bytes)));
    EXPECT_OK(memory.status());
    std::copy(bytes.begin(), bytes.end(), memory->bytes().begin());
    return std::move(*memory);
  }

  static std::unique_ptr<CudaDevice> device(int64_t window_nbytes) {
    Result<std::unique_ptr<CudaDevice>> made = CudaDevice::make(0, window_nbytes);
    EXPECT_OK(made.status());
    return std::move(*made);
  }
};

// The bytes of a staging buffer that copies write to.
std::vector<bool> written(const PackCase& given) {
  std::vector<bool> out(given.staging.size());
  for (const TensorCopy& copy : given.copies) {
    for (const auto& [from, to] : element_pairs(copy.copy)) {
      std::fill_n(out.begin() + to, copy.copy.itemsize, true);
    }
  }
  return out;
}

void expect_packed(const PackCase& given, Bytes found) {
  const std::vector<std::byte> expected = packed_by_cpu(given).second;
  const std::vector<bool> copied = written(given);
  for (size_t i = 0; i < copied.size(); ++i) {
    if (copied[i]) {
      ASSERT_EQ(found[i], expected[i]) << i;
    } else {  // Between copies: as it was, or zero.
      ASSERT_TRUE(found[i] == given.staging[i] || found[i] == std::byte{}) << i;
    }
  }
}

TEST_F(CudaDeviceTest, PackedTensorsAreWhereTheCpuPutsThem) {
  for (const int64_t window_nbytes : {1024, 1 << 20}) {
    const auto gpu = device(window_nbytes);
    for (uint32_t seed = 0; seed < 100; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      const PackCase given = random_pack_case(seed, PackDirection::kPack);
      const OnGpu tensors(given.tensors);
      const Memory image = pinned(given.staging);
      const PackOptions options = {.staging_nbytes = ssize(given.staging),
                                   .window_nbytes = window_nbytes,
                                   .direct_nbytes = seed % 2 == 0 ? 500 : kMiB};
      ASSERT_OK_AND_ASSIGN(
          PackPlan made, plan_pack(PackDirection::kPack, given.copies_in(tensors.data()), options));
      ASSERT_OK_AND_ASSIGN(const auto plan, gpu->upload(std::move(made)));
      const MutableBytes bytes = slice(image.bytes(), 0, ssize(given.staging));
      ASSERT_OK_AND_ASSIGN(const auto event, gpu->pack_to_host(*plan, bytes, nullptr));
      ASSERT_OK(event->wait());
      ASSERT_NO_FATAL_FAILURE(expect_packed(given, bytes));
      EXPECT_EQ(tensors.fetch(), given.tensors);
    }
  }
}

TEST_F(CudaDeviceTest, UnpackedTensorsAreWhereTheCpuPutsThem) {
  for (const int64_t window_nbytes : {1024, 1 << 20}) {
    const auto gpu = device(window_nbytes);
    for (uint32_t seed = 0; seed < 100; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      const PackCase given = random_pack_case(seed, PackDirection::kUnpack);
      const std::vector<std::byte> expected = packed_by_cpu(given).first;
      const PackOptions options = {.staging_nbytes = ssize(given.staging),
                                   .window_nbytes = window_nbytes,
                                   .direct_nbytes = seed % 2 == 0 ? 500 : kMiB};
      const Memory piece = pinned(given.staging);
      const OnGpu tensors(given.tensors);
      ASSERT_OK_AND_ASSIGN(PackPlan made, plan_pack(PackDirection::kUnpack,
                                                    given.copies_in(tensors.data()), options));
      ASSERT_OK_AND_ASSIGN(const auto plan, gpu->upload(std::move(made)));
      const Bytes bytes = slice(piece.bytes(), 0, ssize(given.staging));
      ASSERT_OK_AND_ASSIGN(const auto event, gpu->unpack_from_host(*plan, bytes, nullptr));
      ASSERT_OK(event->wait());
      EXPECT_EQ(tensors.fetch(), expected);
    }
  }
}

// Many windows through two buffers, again and again, with what is large going past them.
TEST_F(CudaDeviceTest, WindowsDoNotOvertakeEachOther) {
  std::mt19937 random(1);
  const std::vector<std::byte> bytes = random_bytes(96 * kMiB, 5);
  const OnGpu tensors(bytes);
  std::vector<TensorCopy> copies;
  std::vector<int64_t> from;
  int64_t staging = 0;
  for (int64_t at = 0; at < ssize(bytes);) {
    const int64_t most = pick(random, 200) == 0 ? 3 * kMiB : 40000;
    const int64_t nbytes = std::min(ssize(bytes) - at, 2 * (1 + pick(random, most)));
    copies.push_back({tensors.data() + at,
                      {.itemsize = 2,
                       .sizes = {nbytes / 2},
                       .src_strides = {2},
                       .dst_offset = staging,
                       .dst_strides = {2}}});
    from.push_back(at);
    at += nbytes;
    staging = align_up(staging + nbytes, 64) + 384;
  }
  const PackOptions options = {.staging_nbytes = staging, .window_nbytes = 2 * kMiB};
  const auto gpu = device(2 * kMiB);
  ASSERT_OK_AND_ASSIGN(PackPlan made, plan_pack(PackDirection::kPack, copies, options));
  ASSERT_GT(made.windows.size(), 10u);
  ASSERT_GT(made.direct.size(), 1u);
  ASSERT_OK_AND_ASSIGN(const auto plan, gpu->upload(std::move(made)));
  for (int round = 0; round < 3; ++round) {
    const Memory image = pinned(std::vector<std::byte>(static_cast<size_t>(staging)));
    const MutableBytes there = slice(image.bytes(), 0, staging);
    ASSERT_OK_AND_ASSIGN(const auto event, gpu->pack_to_host(*plan, there, nullptr));
    ASSERT_OK(event->wait());
    for (size_t i = 0; i < copies.size(); ++i) {
      const int64_t nbytes = copies[i].copy.sizes[0] * 2;
      ASSERT_EQ(std::memcmp(there.data() + copies[i].copy.dst_offset, bytes.data() + from[i],
                            static_cast<size_t>(nbytes)),
                0)
          << "copy " << i;
    }
  }
}

TEST_F(CudaDeviceTest, PinnedMemoryIsZeroedWholePagesThatTheGpuKnows) {
  ASSERT_OK_AND_ASSIGN(const Memory memory, PinnedMemorySource(0).allocate(3 * kMiB + 5));
  EXPECT_EQ(memory.nbytes() % 4096, 0);
  EXPECT_TRUE(std::ranges::all_of(memory.bytes(), [](std::byte b) { return b == std::byte{}; }));
  cudaPointerAttributes attributes = {};
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, memory.bytes().data()), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
}

TEST_F(CudaDeviceTest, MemoryThatCannotBePinnedIsAnErrorAndNoMore) {
  const Status status = pin({reinterpret_cast<std::byte*>(uintptr_t{4096}), 4096}, 0).status();
  EXPECT_NE(status.message().find("cannot pin 4096 bytes: cudaError"), std::string::npos);
  EXPECT_OK(PinnedMemorySource(0).allocate(4096).status());
}

TEST_F(CudaDeviceTest, AGpuThatIsNotThereIsAnErrorByName) {
  const Status status = CudaDevice::make(1000).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("cudaErrorInvalidDevice"), std::string::npos);
}

TEST_F(CudaDeviceTest, AnImageOfTheWrongSizeIsRefused) {
  const auto gpu = device(kMiB);
  const PackOptions options = {.staging_nbytes = 100};
  ASSERT_OK_AND_ASSIGN(const auto plan, gpu->upload(*plan_pack(PackDirection::kPack, {}, options)));
  std::byte image[99];
  EXPECT_EQ(gpu->pack_to_host(*plan, image, nullptr).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(CudaDeviceTest, BuffersAreUnpackedAsByTheCpuWhetherTheyArePinnedOrNot) {
  const auto tensors = std::make_unique<CudaTensors>(device(4096), nullptr);
  for (uint32_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const PackCase given = random_pack_case(seed, PackDirection::kUnpack);
    const Memory memory = pinned(given.staging);
    for (const Bytes buffer :
         {Bytes(given.staging), Bytes(slice(memory.bytes(), 0, ssize(given.staging)))}) {
      const OnGpu there(given.tensors);
      ASSERT_OK_AND_ASSIGN(const auto event,
                           tensors->unpack(given.copies_in(there.data()), buffer));
      ASSERT_OK(event->wait());
      EXPECT_EQ(there.fetch(), packed_by_cpu(given).first);
    }
  }
}

TEST_F(CudaDeviceTest, TensorsAreStagedInMemoryThatIsPinnedOrNot) {
  const auto tensors = std::make_unique<CudaTensors>(device(4096), nullptr);
  for (uint32_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const PackCase given = random_pack_case(seed, PackDirection::kPack);
    const OnGpu there(given.tensors);
    for (const bool pins : {false, true}) {
      std::vector<std::byte> staging = given.staging;
      std::shared_ptr<void> pinned;
      if (pins) {
        ASSERT_OK_AND_ASSIGN(pinned, tensors->pin(staging));
      }
      ASSERT_OK_AND_ASSIGN(const auto event, tensors->pack(given.copies_in(there.data()), staging));
      ASSERT_OK(event->wait());
      ASSERT_NO_FATAL_FAILURE(expect_packed(given, staging));
    }
  }
}

TEST_F(CudaDeviceTest, WhereTheGpuIsFullContiguousTensorsAreStagedAllTheSame) {
  const std::vector<std::byte> bytes = random_bytes(1000, 1);
  const OnGpu there(bytes);
  // Windows that there is no room for even on an empty GPU. The streams need some memory, too.
  const auto tensors = std::make_unique<CudaTensors>(device(int64_t{1} << 42), nullptr);
  std::vector<void*> taken;
  for (size_t nbytes = size_t{1} << 40; nbytes >= (size_t{1} << 16);) {
    void* some = nullptr;
    if (cudaMalloc(&some, nbytes) == cudaSuccess) {
      taken.push_back(some);
    } else {
      cudaGetLastError();
      nbytes /= 2;
    }
  }
  std::vector<std::byte> staging(1000);
  std::vector<TensorCopy> copies;
  for (int64_t i = 0; i < 10; ++i) {
    copies.push_back(
        {there.data() + 100 * i,
         {.sizes = {100}, .src_strides = {1}, .dst_offset = 100 * i, .dst_strides = {1}}});
  }
  ASSERT_OK_AND_ASSIGN(const auto event, tensors->pack(copies, staging));
  ASSERT_OK(event->wait());
  EXPECT_EQ(staging, bytes);
  copies[3].copy = {.sizes = {50}, .src_strides = {2}, .dst_offset = 300, .dst_strides = {1}};
  EXPECT_FALSE(tensors->pack(copies, staging).ok());
  for (void* some : taken) cudaFree(some);
}

// Of many buffers at a time, by several threads, each given back when its event is done.
TEST_F(CudaDeviceTest, ProductsAreThoseOfTheCpu) {
  const auto tensors = std::make_unique<CudaTensors>(device(kMiB), nullptr);
  for (const DType from : {DType::kFloat8E4M3FN, DType::kFloat8E5M2, DType::kFloat4E2M1FNX2}) {
    for (const DType to : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      const bool is_packed = from == DType::kFloat4E2M1FNX2;
      QuantizedTensor facts{.dtype = from,
                            .sizes = {300, 448},
                            .block = is_packed ? Dims{1, 32} : Dims{128, 128},
                            .is_transposed = is_packed,
                            .scales = {"f", 0, is_packed ? 300 * 14 : 3 * 4, "w_scale"},
                            .scale_dtype = DType::kUInt8,
                            .targets = {to}};
      const Box box = is_packed ? Box{{3, 7}, {401, 290}} : Box{{7, 3}, {290, 401}};
      auto made = Dequantization::make(facts, box, to, "w");
      ASSERT_OK(made.status());
      made->scales() = random_bytes(made->scale_nbytes(), 7);
      std::vector<std::byte> stored = random_bytes(300 * 448, 8);
      // A NaN may have any bits.
      for (std::byte& code : stored) code &= is_packed ? std::byte{0xff} : std::byte{0xbb};
      for (std::byte& scale : made->scales()) scale &= std::byte{0x7f};
      const Memory codes = pinned(stored);
      const Dims strides = {box.sizes[1] * itemsize(to), itemsize(to)};
      std::vector<std::byte> wanted(static_cast<size_t>(290 * 401 * itemsize(to)));
      const OnGpu found(wanted);
      const std::string name = "w";
      Unpacking unpacking(codes.bytes());
      for (const QuantizedPiece& piece : made->cut(5000, 64)) {
        const std::byte* bytes = codes.bytes().data() + piece.range.begin;
        made->run(piece.box, bytes, strides, wanted.data());
        ASSERT_OK(unpacking.add_dequantized(*tensors, name, found.data(), strides, *made, piece.box,
                                            bytes));
      }
      ASSERT_OK(unpacking.wait());
      EXPECT_EQ(found.fetch(), wanted);
    }
  }
}

TEST_F(CudaDeviceTest, ALoadLeavesOnTheGpuWhatWasSaved) {
  for (const bool indexed : {true, false}) {
    Indexed a;
    const auto gpu = std::make_unique<CudaTensors>(device(8192), nullptr);
    ASSERT_OK_AND_ASSIGN(const auto job, LoadJob::make(a.fs, kCheckpoint, Indexed::options(),
                                                       indexed ? opened(*a.index) : nullptr));
    for (int round = 0; round < 10; ++round) {
      std::vector<std::unique_ptr<OnGpu>> loaded;
      std::vector<TensorRequest> requests;
      for (size_t i = 0; i < a.saved.size(); ++i) {
        const TestTensor destination = a.destination(i);
        loaded.push_back(std::make_unique<OnGpu>(*destination.memory));
        requests.push_back(whole(a.slices[i], destination));
        requests.back().live.data = loaded.back()->data();
        requests.back().live.device = gpu.get();
      }
      ASSERT_OK(job->run(requests, {}));
      for (size_t i = 0; i < a.saved.size(); ++i) {
        EXPECT_EQ(loaded[i]->fetch(), *a.saved[i].memory) << i;
      }
    }
  }
}

}  // namespace
}  // namespace torch_ckpt
