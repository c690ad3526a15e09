"""Digests of tensor values: equal for equal values, whatever the memory of the tensors is like."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import torch_ckpt
from torch_ckpt import FastSavePlanner, FastWriter
from torch_ckpt._core.tensors import DTYPE_CODES, to_plain
from torch_ckpt.coordination import orchestrate
from torch_ckpt.planning.replica_check import DIGEST_NBYTES, agree, combined, numbers_of
from torch_ckpt.planning.value_digests import samples_of, value_digests

UNKNOWN = bytes(DIGEST_NBYTES)


def digest_of(tensor: Any, mode: Any = "sample") -> bytes:
    return value_digests([tensor], mode)


def random_tensor(draw: random.Random) -> torch.Tensor:
    """A tensor of any dtype and strides, short or long, lazily conjugated or negated."""
    dtype = draw.choice(list(DTYPE_CODES))
    shape = [draw.randint(1, draw.choice([3, 40, 130])) for _ in range(draw.randint(0, 3))]
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), dtype=torch.uint8)
    tensor = bits.view(dtype).reshape(shape)
    if tensor.dim() > 1 and draw.random() < 0.5:
        tensor = tensor.transpose(0, -1)
    if tensor.dim() and draw.random() < 0.3:
        tensor = tensor[:: draw.randint(1, 3)]
    if dtype in (torch.complex64, torch.complex128):
        tensor = draw.choice([tensor, tensor.conj(), tensor.conj().imag])
    return tensor


def test_a_view_has_the_digest_of_a_contiguous_copy(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    tensors = [random_tensor(draw) for _ in range(300)]
    copies = [to_plain(tensor).clone(memory_format=torch.contiguous_format) for tensor in tensors]
    for mode in ("sample", "full"):
        assert value_digests(tensors, mode) == value_digests(copies, mode)
    # As other devices have them sampled, in one batch.
    sampled = samples_of(tensors)
    assert value_digests(sampled, "sample") == value_digests(tensors, "sample")
    assert all(sample.nbytes <= 8192 and sample.device.type == "cpu" for sample in sampled)


def test_only_the_wanted_tensors_are_read() -> None:
    tensors = [torch.full((3,), float(i)) for i in range(5)]
    every = value_digests(tensors, "sample")
    some = value_digests(tensors, "sample", [3, 1])
    for i in range(5):
        own = slice(i * DIGEST_NBYTES, (i + 1) * DIGEST_NBYTES)
        assert some[own] == (every[own] if i in (1, 3) else UNKNOWN)
    assert len({every[i : i + 8] for i in range(0, len(every), 8)}) == 5


def test_what_has_no_values_here_is_unknown() -> None:
    gone = torch.zeros(1000)
    gone.untyped_storage().resize_(0)
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    meta = torch.zeros(3, device="meta")
    for unknown in (None, "an object", gone, quantized, meta, torch.ones(3).to_sparse()):
        for mode in ("sample", "full"):
            assert value_digests([torch.ones(2), unknown], mode)[8:] == UNKNOWN
    assert digest_of(torch.zeros(0)) != UNKNOWN


@pytest.mark.parametrize("mode", ["sample", "full"])
def test_a_device_that_cannot_give_a_sample_fails_no_save(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    def cannot(*_: Any) -> Any:
        raise NotImplementedError("this device has no cat")

    monkeypatch.setattr(torch, "cat", cannot)
    conjugated = torch.ones(3, dtype=torch.complex64).conj()
    found = value_digests([torch.ones(2), conjugated], mode)
    assert (found[8:] == UNKNOWN) == (mode == "sample")
    assert found[:8] != UNKNOWN


def test_values_are_combined_by_the_ranks_that_have_them() -> None:
    values = value_digests([torch.full((3,), float(i)) for i in range(6)], "sample")
    changed = value_digests([torch.full((3,), float(i + (i == 4))) for i in range(6)], "sample")
    equal = [(0, 1, 2), (7, 4, 1), (0, 5, 1)]
    assert numbers_of(equal) == [1, 2, 4, 5]
    assert agree([combined(values, equal), combined(values, equal)])
    assert not agree([combined(values, equal), combined(changed, equal)])
    # A set of ranks that does not have the changed tensor.
    assert agree([combined(values, [(0, 1, 2)]), combined(changed, [(0, 1, 2)])])
    unknown = values[:8] + UNKNOWN + values[16:]
    assert not agree([combined(unknown, equal), combined(unknown, equal)])
    assert agree([])


def test_a_writer_finds_the_planner_of_the_save(tmp_path: Path) -> None:
    assert orchestrate.calling_planner() is None
    found: list[Any] = []

    class Writer(FastWriter):
        def prepare_local_plan(self, plan: Any) -> Any:
            found.append(orchestrate.calling_planner())
            return super().prepare_local_plan(plan)

    for save in (dcp.save, torch_ckpt.save):
        for own in (DefaultSavePlanner(), FastSavePlanner()):
            save({"w": torch.ones(3)}, storage_writer=Writer(tmp_path), planner=own)
            assert found.pop() is own
    assert orchestrate.calling_planner() is None
