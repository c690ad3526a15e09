"""The bytes of a tensor are those of its elements, in whatever memory they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_state_files import as_rank, write
from support.safetensors_files import load_model
from support.tensors import DTYPES, LAYOUTS, OVERLAPS, PACKED, bits, laid_out

import torch_ckpt
from torch_ckpt import FastReader, SafetensorsWriter
from torch_ckpt._core.tensors import bytes_of
from torch_ckpt.formats.equality import same_bits


@pytest.mark.parametrize("dtype", [*DTYPES, *PACKED], ids=str)
def test_the_bytes_of_a_tensor_are_those_of_its_elements_in_any_memory(dtype: torch.dtype) -> None:
    for layout in (*LAYOUTS, *OVERLAPS):
        for sizes in ((), (1,), (1, 1), (1, 5), (5, 1), (3, 4), (131, 999), (0,), (2, 0)):
            is_empty_overlap = 0 in sizes and layout not in ("contiguous", "transposed")
            if is_empty_overlap or ("odd" in layout and dtype.is_complex):
                continue
            tensor = laid_out(layout, sizes, dtype, 7)
            if dtype in PACKED:
                tensor = laid_out(layout, sizes, torch.uint8, 7).view(dtype)
            assert bytes_of(tensor).numpy().tobytes() == bits(tensor), (layout, sizes)
            plain = laid_out("contiguous", sizes, dtype, 7)
            assert same_bits(tensor, plain) == (bits(tensor) == bits(plain)), (layout, sizes)


def test_one_element_with_a_stride_is_compared_with_a_base(tmp_path: Path) -> None:
    state = {"x": torch.arange(6.0)[::2][:1], "y": torch.ones(4)}
    for name in ("a", "b"):
        torch_ckpt.save(
            state, storage_writer=SafetensorsWriter(tmp_path / name, base=tmp_path / "a")
        )
    assert (tmp_path / "b/model.safetensors").samefile(tmp_path / "a/model.safetensors")
    assert bits(load_model(tmp_path / "b")["x"]) == bits(state["x"])


def test_one_element_with_a_stride_that_all_ranks_have_is_one_value(tmp_path: Path) -> None:
    for rank in range(2):
        with as_rank(rank):  # Storages of other lengths, so that elements are compared.
            write(tmp_path / "ranks", rank, {"w": torch.arange(6.0 + rank)[::2][:1]})
    state = {"model.w": torch.ones(1)}
    dcp.load(state, storage_reader=FastReader(tmp_path / "ranks"), no_dist=True)
    assert state["model.w"].item() == 0
