"""Tensors on a CUDA device go through the same files as those on the CPU."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from torch_ckpt import FastReader, FastWriter, IoOptions

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

warnings.filterwarnings("ignore", message=".*no_dist.*|.*disabled.*single process.*")

SMALL_BUFFERS = IoOptions(buffer_nbytes=1 << 20, block_nbytes=256 << 10)


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
