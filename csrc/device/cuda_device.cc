#if TORCH_CKPT_HAVE_CUDA

#include "device/cuda_device.h"

#include <array>
#include <cstring>
#include <iterator>
#include <utility>

#include "device/cuda_call.h"
#include "device/kernels.h"

namespace torch_ckpt {
namespace {

// Makes all later work on `stream` wait for `event`.
Status wait_for(cudaStream_t stream, cudaEvent_t event) {
  return cuda_status(cudaStreamWaitEvent(stream, event, 0), "have a stream wait");
}
Status record(cudaEvent_t event, cudaStream_t stream) {
  return cuda_status(cudaEventRecord(event, stream), "record an event");
}

Status copy_async(void* to, const void* from, int64_t nbytes, cudaStream_t stream) {
  const cudaError_t error =
      cudaMemcpyAsync(to, from, static_cast<size_t>(nbytes), cudaMemcpyDefault, stream);
  if (error == cudaSuccess) return ok_status();
  return cuda_status(error, str_cat("copy ", nbytes, " bytes to or from a GPU"));
}

// GPU memory that is allocated and freed in stream order: the free waits for the last use without
// blocking the host. Must not outlive the stream.
class StreamMemory {
 public:
  // Allocates memory for later work on `stream`.
  static Result<StreamMemory> allocate(int64_t nbytes, cudaStream_t stream) {
    void* data = nullptr;
    RETURN_IF_ERROR(cuda_status(cudaMallocAsync(&data, static_cast<size_t>(nbytes), stream),
                                str_cat("allocate ", nbytes, " bytes on a GPU")));
    return StreamMemory(data, stream);
  }
  // Sets the stream that orders the free. Requires: all uses are on that stream.
  void free_on(cudaStream_t stream) { stream_ = stream; }

  StreamMemory() = default;
  StreamMemory(StreamMemory&& other) noexcept { *this = std::move(other); }
  StreamMemory& operator=(StreamMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~StreamMemory() {
    if (data_ != nullptr) cudaFreeAsync(data_, stream_);
  }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  StreamMemory(void* data, cudaStream_t stream) : data_(data), stream_(stream) {}
  void* data_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

class Event final : public DeviceEvent {
 public:
  Event(int ordinal, OwnedEvent event) : ordinal_(ordinal), event_(std::move(event)) {}
  ~Event() override {
    const CurrentDevice current(ordinal_);
    event_ = {};
  }

  Status wait() const override {
    const CurrentDevice current(ordinal_);
    return cuda_status(cudaEventSynchronize(event_.get()), "finish the work of a GPU");
  }
  Result<bool> done() const override {
    const CurrentDevice current(ordinal_);
    const cudaError_t error = cudaEventQuery(event_.get());
    if (error == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    RETURN_IF_ERROR(cuda_status(error, "finish the work of a GPU"));
    return true;
  }

 private:
  const int ordinal_;
  OwnedEvent event_;
};

class Plan final : public CudaPlan {
 public:
  Plan(int ordinal, PackPlan plan, StreamMemory memory, PackTables tables)
      : ordinal_(ordinal), plan_(std::move(plan)), memory_(std::move(memory)), tables_(tables) {}
  ~Plan() override {
    const CurrentDevice current(ordinal_);
    memory_ = {};
  }
  const PackPlan& plan() const override { return plan_; }
  const PackTables& tables() const { return tables_; }

 private:
  const int ordinal_;
  const PackPlan plan_;
  StreamMemory memory_;
  const PackTables tables_;  // Pointers into `memory_`.
};

class Gpu final : public CudaDevice {
 public:
  Gpu(int ordinal, int64_t window_nbytes) : ordinal_(ordinal), window_nbytes_(window_nbytes) {}
  ~Gpu() override {
    const CurrentDevice current(ordinal_);
    (void)synchronize();
    buffers_ = {};
    for (OwnedEvent* event : {&requested_, &joined_}) *event = {};
    for (OwnedStream* stream : {&uploads_, &copies_, &kernels_}) *stream = {};
  }

  Status open();

  int ordinal() const override { return ordinal_; }
  int64_t window_nbytes() const override { return window_nbytes_; }
  Result<std::unique_ptr<CudaPlan>> upload(PackPlan plan) override;
  Result<std::unique_ptr<DeviceEvent>> pack_to_host(const CudaPlan& plan, MutableBytes image,
                                                    CudaStream after) override {
    return start([&] { return pack_windows(plan, image, after); });
  }
  Result<std::unique_ptr<DeviceEvent>> unpack_from_host(const CudaPlan& plan, Bytes piece,
                                                        CudaStream after) override {
    return start([&] { return unpack_windows(plan, piece, after); });
  }
  Result<std::unique_ptr<DeviceEvent>> multiply(const ProductTable& table, Bytes codes,
                                                std::span<const float> values,
                                                std::span<const float> scales,
                                                CudaStream after) override {
    return start([&] { return multiply_now(table, codes, values, scales, after); });
  }

 private:
  // A GPU buffer that transfers one window.
  struct Buffer {
    StreamMemory memory;
    OwnedEvent filled;   // The buffer has the data of the window.
    OwnedEvent drained;  // The data was consumed; the buffer may be refilled.
  };

  template <typename Work>
  Result<std::unique_ptr<DeviceEvent>> start(const Work& work);
  Status pack_windows(const CudaPlan& plan, MutableBytes image, CudaStream after);
  Status unpack_windows(const CudaPlan& plan, Bytes piece, CudaStream after);
  Status multiply_now(ProductTable table, Bytes codes, std::span<const float> values,
                      std::span<const float> scales, CudaStream after);
  Status launch(const CudaPlan& plan, const PackWindow& window, const std::byte* memory);
  Status begin(const PackPlan& plan, PackDirection direction, int64_t nbytes, CudaStream after);
  Status allocate_buffers();
  Status synchronize();

  const int ordinal_;
  const int64_t window_nbytes_;
  OwnedStream kernels_;
  OwnedStream copies_;
  OwnedStream uploads_;   // For tables only: short work, so a call that waits for it returns soon.
  OwnedEvent requested_;  // All earlier work of the caller's stream.
  OwnedEvent joined_;     // Work of one internal stream that another one waits for.
  std::array<Buffer, 2> buffers_;
};

Status Gpu::open() {
  RETURN_IF_ERROR(cuda_available());
  const CurrentDevice current(ordinal_);
  RETURN_IF_ERROR(current.status());
  ASSIGN_OR_RETURN(kernels_, make_stream());
  ASSIGN_OR_RETURN(copies_, make_stream());
  ASSIGN_OR_RETURN(uploads_, make_stream());
  ASSIGN_OR_RETURN(requested_, make_event());
  ASSIGN_OR_RETURN(joined_, make_event());
  for (Buffer& buffer : buffers_) {
    ASSIGN_OR_RETURN(buffer.filled, make_event());
    ASSIGN_OR_RETURN(buffer.drained, make_event());
  }
  return ok_status();
}

Status Gpu::synchronize() {
  Status first;
  for (const OwnedStream* stream : {&uploads_, &kernels_, &copies_}) {
    // The stream was never made; null would mean the default stream.
    if (stream->get() == nullptr) continue;
    const Status status =
        cuda_status(cudaStreamSynchronize(stream->get()), "finish the work of a GPU");
    if (first.ok()) first = status;
  }
  return first;
}

Result<std::unique_ptr<CudaPlan>> Gpu::upload(PackPlan plan) {
  if (plan.window_nbytes > window_nbytes_) {
    return invalid_argument("a plan has windows of ", plan.window_nbytes,
                            " bytes, the buffers for them ", window_nbytes_);
  }
  if (plan.windows.empty()) {  // No work for the kernel.
    return std::unique_ptr<CudaPlan>(
        std::make_unique<Plan>(ordinal_, std::move(plan), StreamMemory(), PackTables()));
  }
  const CurrentDevice current(ordinal_);
  RETURN_IF_ERROR(current.status());
  const auto nbytes_of = [](const auto& table) {
    return static_cast<int64_t>(table.size() * sizeof(table[0]));
  };
  const int64_t chunks_at = align_up(nbytes_of(plan.shapes), kStagingAlignment);
  const int64_t first_at = align_up(chunks_at + nbytes_of(plan.chunks), kStagingAlignment);
  std::vector<std::byte> tables(static_cast<size_t>(first_at + nbytes_of(plan.first_chunk)));
  const auto put = [&](int64_t offset, const auto& table) {
    if (!table.empty()) {
      std::memcpy(tables.data() + offset, table.data(), static_cast<size_t>(nbytes_of(table)));
    }
  };
  put(0, plan.shapes);
  put(chunks_at, plan.chunks);
  put(first_at, plan.first_chunk);

  ASSIGN_OR_RETURN(StreamMemory memory, StreamMemory::allocate(ssize(tables), uploads_.get()));
  // A copy from pageable memory: `tables` has been read when the call returns.
  RETURN_IF_ERROR(copy_async(memory.data(), tables.data(), ssize(tables), uploads_.get()));
  RETURN_IF_ERROR(record(joined_.get(), uploads_.get()));
  RETURN_IF_ERROR(wait_for(kernels_.get(), joined_.get()));
  memory.free_on(kernels_.get());
  const PackTables on_device = {
      reinterpret_cast<const PackShape*>(memory.data()),
      reinterpret_cast<const PackChunk*>(memory.data() + chunks_at),
      reinterpret_cast<const int32_t*>(memory.data() + first_at),
  };
  return std::unique_ptr<CudaPlan>(
      std::make_unique<Plan>(ordinal_, std::move(plan), std::move(memory), on_device));
}

// Starts work on both streams; `kernels_` finishes last. If an error occurs midway, waits for the
// started work: nothing may use the caller's memory after an error is returned.
template <typename Work>
Result<std::unique_ptr<DeviceEvent>> Gpu::start(const Work& work) {
  const CurrentDevice current(ordinal_);
  RETURN_IF_ERROR(current.status());
  ASSIGN_OR_RETURN(OwnedEvent done, make_event());
  Status status = work();
  if (status.ok()) status = record(done.get(), kernels_.get());
  if (!status.ok()) {
    (void)synchronize();
    return status;
  }
  return std::unique_ptr<DeviceEvent>(std::make_unique<Event>(ordinal_, std::move(done)));
}

Status Gpu::begin(const PackPlan& plan, PackDirection direction, int64_t nbytes, CudaStream after) {
  if (plan.direction != direction || plan.staging_nbytes != nbytes) {
    return invalid_argument("a plan ", plan.direction == PackDirection::kPack ? "" : "un", "packs ",
                            plan.staging_nbytes, " bytes; it was used to ",
                            direction == PackDirection::kPack ? "" : "un", "pack ", nbytes);
  }
  RETURN_IF_ERROR(record(requested_.get(), after));
  RETURN_IF_ERROR(wait_for(kernels_.get(), requested_.get()));
  return wait_for(copies_.get(), requested_.get());
}

Status Gpu::allocate_buffers() {
  for (Buffer& buffer : buffers_) {
    if (buffer.memory.data() != nullptr) continue;
    ASSIGN_OR_RETURN(buffer.memory, StreamMemory::allocate(window_nbytes_, kernels_.get()));
    // The other stream may use the buffer only after its allocation.
    RETURN_IF_ERROR(record(buffer.drained.get(), kernels_.get()));
  }
  return ok_status();
}

Status Gpu::launch(const CudaPlan& plan, const PackWindow& window, const std::byte* memory) {
  return cuda_status(
      launch_pack(static_cast<const Plan&>(plan).tables(), plan.plan().bases(window, memory),
                  window.first_worker, window.worker_end, kernels_.get()),
      "start a kernel that packs");
}

// One stream copies and computes: the copy takes almost all of the time.
Status Gpu::multiply_now(ProductTable table, Bytes codes, std::span<const float> values,
                         std::span<const float> scales, CudaStream after) {
  RETURN_IF_ERROR(record(requested_.get(), after));
  RETURN_IF_ERROR(wait_for(kernels_.get(), requested_.get()));
  const Bytes parts[] = {codes, std::as_bytes(values), std::as_bytes(scales)};
  uint64_t* const addresses[] = {&table.codes, &table.values, &table.scales};
  int64_t nbytes = 0;
  for (const Bytes part : parts) nbytes += align_up(ssize(part), kStagingAlignment);
  // Freed in stream order, after the kernel.
  ASSIGN_OR_RETURN(const StreamMemory memory, StreamMemory::allocate(nbytes, kernels_.get()));
  std::byte* next = memory.data();
  for (size_t i = 0; i < std::size(parts); ++i) {
    RETURN_IF_ERROR(copy_async(next, parts[i].data(), ssize(parts[i]), kernels_.get()));
    *addresses[i] = reinterpret_cast<uint64_t>(next);
    next += align_up(ssize(parts[i]), kStagingAlignment);
  }
  return cuda_status(launch_products(table, kernels_.get()), "start a kernel that multiplies");
}

Status Gpu::pack_windows(const CudaPlan& cuda_plan, MutableBytes image, CudaStream after) {
  const PackPlan& plan = cuda_plan.plan();
  RETURN_IF_ERROR(begin(plan, PackDirection::kPack, ssize(image), after));
  // Direct copies first: the link is busy while the first window is packed.
  for (const DirectCopy& copy : plan.direct) {
    RETURN_IF_ERROR(
        copy_async(image.data() + copy.staging_offset, copy.tensor, copy.nbytes, copies_.get()));
  }
  if (!plan.windows.empty()) RETURN_IF_ERROR(allocate_buffers());
  for (size_t i = 0; i < plan.windows.size(); ++i) {
    const PackWindow& window = plan.windows[i];
    Buffer& buffer = buffers_[i % buffers_.size()];
    RETURN_IF_ERROR(wait_for(kernels_.get(), buffer.drained.get()));
    // Clear the buffer: old bytes must not appear in the gaps of a file.
    RETURN_IF_ERROR(cuda_status(
        cudaMemsetAsync(buffer.memory.data(), 0, static_cast<size_t>(window.end - window.base()),
                        kernels_.get()),
        "clear a buffer"));
    RETURN_IF_ERROR(launch(cuda_plan, window, buffer.memory.data()));
    RETURN_IF_ERROR(record(buffer.filled.get(), kernels_.get()));
    RETURN_IF_ERROR(wait_for(copies_.get(), buffer.filled.get()));
    RETURN_IF_ERROR(copy_async(image.data() + window.begin,
                               buffer.memory.data() + (window.begin - window.base()),
                               window.end - window.begin, copies_.get()));
    RETURN_IF_ERROR(record(buffer.drained.get(), copies_.get()));
  }
  RETURN_IF_ERROR(record(joined_.get(), copies_.get()));
  return wait_for(kernels_.get(), joined_.get());
}

Status Gpu::unpack_windows(const CudaPlan& cuda_plan, Bytes piece, CudaStream after) {
  const PackPlan& plan = cuda_plan.plan();
  RETURN_IF_ERROR(begin(plan, PackDirection::kUnpack, ssize(piece), after));
  if (!plan.windows.empty()) RETURN_IF_ERROR(allocate_buffers());
  for (size_t i = 0; i < plan.windows.size(); ++i) {
    const PackWindow& window = plan.windows[i];
    Buffer& buffer = buffers_[i % buffers_.size()];
    RETURN_IF_ERROR(wait_for(copies_.get(), buffer.drained.get()));
    RETURN_IF_ERROR(copy_async(buffer.memory.data() + (window.begin - window.base()),
                               piece.data() + window.begin, window.end - window.begin,
                               copies_.get()));
    RETURN_IF_ERROR(record(buffer.filled.get(), copies_.get()));
    RETURN_IF_ERROR(wait_for(kernels_.get(), buffer.filled.get()));
    RETURN_IF_ERROR(launch(cuda_plan, window, buffer.memory.data()));
    RETURN_IF_ERROR(record(buffer.drained.get(), kernels_.get()));
  }
  // Direct copies last: the link is busy while the last window is unpacked.
  for (const DirectCopy& copy : plan.direct) {
    RETURN_IF_ERROR(
        copy_async(copy.tensor, piece.data() + copy.staging_offset, copy.nbytes, copies_.get()));
  }
  RETURN_IF_ERROR(record(joined_.get(), copies_.get()));
  return wait_for(kernels_.get(), joined_.get());
}

}  // namespace

Result<std::unique_ptr<CudaDevice>> CudaDevice::make(int ordinal, int64_t window_nbytes) {
  auto device = std::make_unique<Gpu>(ordinal, window_nbytes);
  RETURN_IF_ERROR(device->open());
  return std::unique_ptr<CudaDevice>(std::move(device));
}

}  // namespace torch_ckpt

#endif  // TORCH_CKPT_HAVE_CUDA
