"""CUDA tensors are staged by the engine: for a snapshot of this process, and for the agent."""

import os
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torch_ckpt import FastReader, FastWriter, SnapshotStager
from torch_ckpt._core import _native
from torch_ckpt.agent import SnapshotAgent

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

warnings.filterwarnings("ignore", message=".*no_dist.*|.*disabled.*single process.*")

SLEEP_CYCLES = 200_000_000
"""Cycles of the GPU: about 0.1 s."""


def random_bits(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def state_of_all_kinds() -> dict[str, torch.Tensor]:
    """Small and large, strided, overlapping and lazily conjugated; some on the CPU between them."""
    state: dict[str, torch.Tensor] = {}
    for number in range(2000):
        device = "cpu" if number % 7 == 0 else "cuda"
        state[f"small.{number}"] = random_bits(1 + number % 300, number).to(device)
    large = random_bits(40_000_000, 1).cuda()
    state["large"] = large.view(torch.int32)
    state["view of large"] = large[3:1003]
    state["transposed"] = large[:3_000_000].view(1000, 3000).t()
    state["every third"] = large[::3]
    state["conjugated"] = torch.randn(9, dtype=torch.complex64, device="cuda").conj()
    state["far apart"] = torch.arange(4_000_000, device="cuda")[::100_000].view(4, 10).t()
    state["expanded"] = torch.ones(1, 5, device="cuda").expand(4, 5)
    state["bf16"] = torch.randn(777, device="cuda").bfloat16()
    state["scalar"] = torch.tensor(2.5, device="cuda")
    state["empty"] = torch.empty(0, 3, device="cuda")
    return state


def same(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def load(path: os.PathLike[str], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    loaded = {n: torch.zeros(t.shape, dtype=t.dtype, device=t.device) for n, t in like.items()}
    dcp.load(loaded, storage_reader=FastReader(path), no_dist=True)
    return loaded


@pytest.mark.parametrize("blocking", [True, False])
def test_what_is_staged_is_what_was_there(tmp_path, blocking):
    state = state_of_all_kinds()
    expected = {name: tensor.clone() for name, tensor in state.items()}
    stager = SnapshotStager(blocking=blocking)
    for step in range(3):
        writer = FastWriter(tmp_path / str(step), stager=stager)
        future = dcp.async_save(state, storage_writer=writer, no_dist=True)
        if not blocking:
            future = future.upload_completion
            stager.wait_staged()
        with torch.no_grad():
            for name in ("large", "bf16", "scalar", "small.1"):
                state[name].fill_(0)
        future.result()
        assert same(load(tmp_path / str(step), state), expected)
        for name, tensor in expected.items():
            if name not in ("expanded", "view of large", "transposed", "every third"):
                state[name].copy_(tensor)
    stager.close()


def test_the_engine_and_not_torch_copies_from_the_gpu(tmp_path, monkeypatch):
    state = {f"w.{i}": torch.randn(100, i + 1, device="cuda") for i in range(500)}
    staged = SnapshotStager().stage  # Before torch is taken away from it.

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("torch copied a tensor")

    monkeypatch.setattr(torch.Tensor, "copy_", refuse)
    monkeypatch.setattr(torch.Tensor, "cpu", refuse)
    copy = staged(state)
    monkeypatch.undo()
    assert all(torch.equal(copy[name], tensor.cpu()) for name, tensor in state.items())


def test_memory_of_a_snapshot_is_pinned_when_it_is_reserved():
    assert _native.why_no_cuda() is None
    state = {"w": torch.randn(1000, 1000, device="cuda")}
    stager = SnapshotStager()
    stager.reserve(state)
    snapshot = stager._snapshot
    assert snapshot is not None
    assert torch.frombuffer(snapshot, dtype=torch.uint8).is_pinned()
    stager.close()


def test_staging_comes_after_what_the_current_stream_has_still_to_do():
    stream = torch.cuda.Stream()
    for blocking in (True, False):
        stager = SnapshotStager(blocking=blocking)
        with torch.cuda.stream(stream):
            state = {"w": torch.zeros(1_000_000, device="cuda")}
            stager.stage(state)
            stager.wait_staged()
            torch.cuda._sleep(SLEEP_CYCLES)
            state["w"].fill_(7.0)
            copy = stager.stage(state)
        stager.wait_staged()
        copied = copy if blocking else copy.result()
        assert bool((copied["w"] == 7.0).all())
        del copy, copied
        stager.close()


def test_training_goes_on_while_tensors_are_copied():
    """A stager that does not block leaves the stream of training alone."""
    state = {"w": torch.randn(1_000_000_000, device="cuda")}  # 4 GB.
    stager = SnapshotStager(blocking=False)
    stager.reserve(state)
    stager.stage(state).result()
    numbers = torch.ones(10, device="cuda")
    numbers.sum()  # CUDA loads a kernel when it is first used.
    torch.cuda.synchronize()
    future = stager.stage(state)
    done = torch.cuda.Event()
    numbers.sum()
    done.record()
    done.synchronize()
    assert not future.done()  # The copy takes 60 ms at least, the kernel none.
    future.result()
    stager.close()


def test_the_agent_has_what_was_on_the_gpu(tmp_path):
    state = state_of_all_kinds()
    expected = {name: tensor.clone() for name, tensor in state.items()}
    agent = SnapshotAgent(tmp_path / "run")
    try:
        agent.reserve(state)
        for step in range(3):
            future = agent.async_save(state, tmp_path / "run" / f"step-{step}", step=step)
            assert future is not None
            future.result()
            assert same(load(tmp_path / "run" / f"step-{step}", state), expected)
    finally:
        agent.close(drop=True)
