"""Tensors on a CUDA device go through the same files as those on the CPU."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.flips import flip
from support.quantized import (
    FP8,
    MXFP4,
    fp8_tensors,
    mxfp4_tensors,
    of_mxfp4,
    scaled,
    write_model,
)
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter

from torch_ckpt import FastLoadPlanner, FastReader, FastWriter, IoOptions
from torch_ckpt._core import _tensor_view

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

warnings.filterwarnings("ignore", message=".*no_dist.*|.*disabled.*single process.*")

SMALL_BUFFERS = IoOptions(buffer_nbytes=1 << 20)


def cuda_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    return {
        "large": torch.randn(3000, 1000, generator=generator, device="cuda"),
        "transposed": torch.randn(500, 300, generator=generator, device="cuda").t(),
        "bf16": torch.randn(777, generator=generator, device="cuda").bfloat16(),
        "scalar": torch.tensor(2.5, device="cuda"),
        "conjugated": torch.randn(9, dtype=torch.complex64, device="cuda").conj(),
        "empty": torch.empty(0, 3, device="cuda"),
    }


@pytest.mark.parametrize("reader", [FastReader, FileSystemReader])
def test_saved_cuda_tensors_load_into_cuda_tensors(tmp_path, reader):
    state = cuda_state()
    # Less buffer than data, so that copies from the device are written in several batches.
    dcp.save(state, storage_writer=FastWriter(tmp_path, io=SMALL_BUFFERS), no_dist=True)

    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, storage_reader=reader(tmp_path), no_dist=True)

    for name, tensor in state.items():
        assert loaded[name].device == tensor.device
        assert torch.equal(loaded[name], tensor), name


def test_a_cpu_checkpoint_loads_onto_the_device_and_is_cast(tmp_path):
    state = {"weight": torch.randn(64, 32)}
    dcp.save(state, storage_writer=FastWriter(tmp_path), no_dist=True)

    loaded = {"weight": torch.zeros(64, 32, dtype=torch.float16, device="cuda")}
    dcp.load(loaded, storage_reader=FastReader(tmp_path), no_dist=True)

    assert torch.equal(loaded["weight"], state["weight"].to("cuda", torch.float16))


def seeded(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    """A CPU tensor of random bits, NaNs of all kinds among them."""
    nbytes = dtype.itemsize * torch.Size(sizes).numel()
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)
    return (bits % 2 if dtype == torch.bool else bits).view(dtype).view(sizes)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def many_tensors() -> dict[str, torch.Tensor]:
    """Some of every kind that takes a way of its own."""
    state = {f"small.{i}": seeded(1 + i % 50, seed=i) for i in range(2000)}
    state |= {f"even.{i}": seeded(64, 3 * i, dtype=torch.bfloat16, seed=i) for i in range(40)}
    dtypes = [torch.bool, torch.int8, torch.float16, torch.int64, torch.complex128]
    state |= {str(dtype): seeded(333, 7, dtype=dtype) for dtype in dtypes}
    state |= {"large": seeded(5000, 1031), "odd": seeded(7_000_003, dtype=torch.uint8)}
    state |= {"scalar": seeded(), "empty": torch.empty(0, 3)}
    return state


def places_for(state: dict[str, torch.Tensor], *, mixed: bool) -> dict[str, torch.Tensor]:
    """Where to load to: CUDA tensors, every third one a view that is strided some way or other.

    Args:
        state: What is loaded.
        mixed: Whether every fourth one is on the CPU.
    """
    places = {}
    for number, (name, tensor) in enumerate(state.items()):
        device = "cpu" if mixed and number % 4 == 0 else "cuda"
        sizes = list(tensor.shape)
        if number % 3 or not sizes:
            place = torch.zeros(sizes, dtype=tensor.dtype, device=device)
        elif number % 2:
            wider = [size + 1 for size in sizes]
            place = torch.zeros(wider, dtype=tensor.dtype, device=device)
            for dim, size in enumerate(sizes):
                place = place.narrow(dim, 1, size)
        else:
            place = torch.zeros(sizes[::-1], dtype=tensor.dtype, device=device).permute(
                *range(len(sizes) - 1, -1, -1)
            )
        places[name] = place
    return places


@pytest.mark.parametrize("planner", [DefaultLoadPlanner, FastLoadPlanner])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("io", [None, SMALL_BUFFERS])
@pytest.mark.parametrize("writer", [FastWriter, FileSystemWriter])
def test_tensors_of_every_kind_load_onto_the_gpu_bit_for_bit(tmp_path, planner, mixed, io, writer):
    state = many_tensors()
    dcp.save(state, storage_writer=writer(tmp_path), no_dist=True)
    places = places_for(state, mixed=mixed)

    reader = FastReader(tmp_path, io=io)
    dcp.load(places, storage_reader=reader, planner=planner(), no_dist=True)

    different = [name for name, tensor in state.items() if bits(places[name]) != bits(tensor)]
    assert not different


def test_dense_cuda_tensors_are_loaded_by_the_engine_and_not_by_torch(tmp_path, monkeypatch):
    state = {"weight": seeded(3000, 100), "bias": seeded(3000)}
    dcp.save(state, storage_writer=FastWriter(tmp_path), no_dist=True)
    loaded = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in state.items()}

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was made on the CPU and copied by torch")

    monkeypatch.setattr("torch_ckpt.storage.target_copies.TargetCopies.put", refuse)
    dcp.load(loaded, storage_reader=FastReader(tmp_path), no_dist=True)

    assert all(_tensor_view.is_loadable(tensor) for tensor in loaded.values())
    assert all(bits(loaded[name]) == bits(tensor) for name, tensor in state.items())


def test_quantised_tensors_are_loaded_into_cuda_tensors_of_any_strides(tmp_path):
    weight, scales = fp8_tensors(300, 200)
    tensors = {"w.weight": weight, "w.weight_scale_inv": scales}
    write_model(tmp_path, tensors, FP8)
    wanted = scaled(weight, scales)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for whole in (torch.zeros(300, 200), torch.zeros(200, 300).t(), torch.zeros(300, 400)):
            target = whole.to("cuda", dtype)[:, :200]
            dcp.load({"w.weight": target}, storage_reader=FastReader(tmp_path), no_dist=True)
            assert torch.equal(target.cpu(), wanted.to(dtype))


def test_mxfp4_tensors_are_loaded_into_cuda_tensors(tmp_path):
    blocks, scales = mxfp4_tensors(3, 48, 96)
    write_model(tmp_path, {"up_blocks": blocks, "up_scales": scales}, MXFP4)
    wanted = of_mxfp4(blocks, scales).mT
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        target = torch.zeros(3, 96, 48, dtype=dtype, device="cuda")
        reader = FastReader(tmp_path, dequantize=True)
        dcp.load({"up": target}, storage_reader=reader, no_dist=True)
        assert torch.equal(target.cpu(), wanted.to(dtype))


def test_a_load_comes_after_what_the_current_stream_has_still_to_do(tmp_path):
    state = {"weight": seeded(4_000_000)}
    dcp.save(state, storage_writer=FastWriter(tmp_path), no_dist=True)
    stream = torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(stream):
            loaded = {"weight": torch.empty(4_000_000, device="cuda")}
            torch.cuda._sleep(200_000_000)  # Cycles of the GPU: about 0.1 s.
            loaded["weight"].fill_(1.0)
            dcp.load(loaded, storage_reader=FastReader(tmp_path), no_dist=True)
        # By another stream at once: what was loaded is there.
        assert bits(loaded["weight"]) == bits(state["weight"])


def test_damage_is_found_on_the_way_to_the_gpu_and_named(tmp_path):
    dcp.save({"weight": seeded(2000, 100)}, storage_writer=FastWriter(tmp_path), no_dist=True)
    (data_file,) = tmp_path.glob("*.distcp")
    flip(data_file, data_file.stat().st_size // 2)

    loaded = {"weight": torch.zeros(2000, 100, device="cuda")}
    with pytest.raises(dcp.api.CheckpointException, match="'weight'"):
        dcp.load(loaded, storage_reader=FastReader(tmp_path), no_dist=True)
