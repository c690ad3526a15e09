"""CUDA tensors are saved through pinned memory; here, CPU tensors take the same path."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from checkpoints import failure_of, load, save
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from torch_ckpt import FastReader, FastWriter
from torch_ckpt.storage import data_file

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]


class Temporaries(DefaultSavePlanner):
    """Resolves tensors to copies, as they are on another device."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        resolved = super().resolve_data(write_item)
        if isinstance(resolved, torch.Tensor):
            return resolved.t().clone().t() if resolved.dim() == 2 else resolved.clone()
        return resolved


@pytest.mark.parametrize("batch_nbytes", [1, 1000, 64 << 20])
def test_tensors_saved_through_pinned_memory_load_bit_for_bit(
    batch_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_file, "_PINNED_NBYTES", batch_nbytes)
    is_pinned = iter(range(1000))  # Every third tensor takes the path of temporaries.
    monkeypatch.setattr(data_file, "_copies_by_engine", lambda _: next(is_pinned) % 3 != 0)
    torch.manual_seed(0)
    state = {
        f"{dtype} {size}": torch.randn(size).to(dtype)
        for dtype in DTYPES
        for size in [(), (0,), (7,), (3, 5), (301, 99), (2, 3, 4)]
    }

    save({**state, "step": 3}, FastWriter(tmp_path), planner=Temporaries())

    assert next(is_pinned) > len(state) // 2
    places = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    loaded = load({**places, "step": 0}, FastReader(tmp_path))
    assert loaded["step"] == 3
    for name, tensor in state.items():
        found = loaded[name].reshape(-1).view(torch.uint8)
        assert torch.equal(found, tensor.reshape(-1).view(torch.uint8)), name


def test_an_error_keeps_no_pinned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[str | None] = []

    class Failing(Temporaries):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
            resolved.append(write_item.index.fqn)
            if resolved.count("w9") == 2:  # The second time is for the copy.
                raise RuntimeError("cannot resolve 'w9'")
            return super().resolve_data(write_item)

    monkeypatch.setattr(data_file, "_PINNED_NBYTES", 1 << 12)
    monkeypatch.setattr(data_file, "_copies_by_engine", lambda _: True)
    state = {f"w{i}": torch.ones(1 << 10) for i in range(10)}

    error = failure_of(save, state, FastWriter(tmp_path), planner=Failing())

    assert "'w9'" in str(error)
    left = [one for one in gc.get_objects() if type(one) is data_file._PinnedCopies]
    assert left, "the frames of the error are gone"
    assert all(one._snapshot is None and not one._tensors for one in left)
