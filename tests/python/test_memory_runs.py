"""Runs: what a stager copies of storages that tensors share, in as few bytes as possible."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.states import same
from support.tensors import DTYPES, bits, random_tensor

from torch_ckpt import SnapshotStager
from torch_ckpt.staging.copied_state import CopiedState
from torch_ckpt.staging.memory_runs import CopiedTensor, copy_elements, runs_of

pytestmark = pytest.mark.timeout(120)


def copies_of(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Copies as a stager makes them, and how many bytes they have in all."""
    copied = [CopiedTensor(live, torch.empty(0, dtype=live.dtype)) for live in tensors]
    runs = runs_of(copied)
    for run in runs:
        memory = torch.empty(run.nbytes, dtype=torch.uint8)
        copy_elements(run.live(), memory)
        run.set_memory(memory)
    return [copy for _, copy in copied], sum(run.nbytes for run in runs)


def bytes_in(tensor: torch.Tensor) -> set[int]:
    """The addresses of all bytes of a tensor's elements."""
    offsets = torch.arange(tensor.storage_offset(), tensor.storage_offset() + 1)
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        offsets = (offsets[:, None] + torch.arange(size) * stride).reshape(-1)
    begin = tensor.untyped_storage().data_ptr()
    size = tensor.itemsize
    return {begin + size * at + byte for at in offsets.tolist() for byte in range(size)}


def random_view(whole: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Any strided view of some elements of a one-dimensional tensor."""
    view = whole.view(rng.choice([dtype for dtype in DTYPES if dtype != torch.bool]))
    while True:
        sizes = [rng.randint(1, 5) for _ in range(rng.randint(0, 3))]
        strides = [rng.choice([0, 1, 1, 2, 3, 7, 16, 60]) for _ in sizes]
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if last < len(view):
            return view.as_strided(sizes, strides, rng.randrange(len(view) - last))


def test_copies_of_any_views_have_the_values_and_no_more_bytes_than_ranges_or_elements(
    rng: random.Random,
) -> None:
    fewer_than_ranges = shared = 0
    for _ in range(400):
        storages = [random_tensor([16 * rng.randint(1, 60)], torch.uint8) for _ in range(2)]
        views = [random_view(rng.choice(storages), rng) for _ in range(rng.randint(1, 6))]
        copies, nbytes = copies_of(views)
        for view, copy in zip(views, copies, strict=True):
            assert (copy.dtype, copy.shape) == (view.dtype, view.shape)
            assert bits(copy) == bits(view)
        addresses = [bytes_in(view) for view in views]
        spanned = set[int]().union(*(range(min(each), max(each) + 1) for each in addresses))
        distinct = {(view.data_ptr(), view.dtype, view.size(), view.stride()) for view in views}
        elements = sum(dtype.itemsize * size.numel() for _, dtype, size, _ in distinct)
        padding = 15 * len(views)  # Ranges of several tensors begin at multiples of 16.
        assert nbytes <= min(len(spanned), elements) + padding
        fewer_than_ranges += nbytes < len(spanned)
        storage = {copy.untyped_storage().data_ptr() for copy in copies}
        shared += len(storage) < len(views)
    assert fewer_than_ranges > 20
    assert shared > 20


def test_elements_that_are_far_apart_are_copied_alone() -> None:
    base = torch.arange(1 << 22)
    stager = SnapshotStager()
    state = {"sparse": base[:: 1 << 15], "columns": base[:4096].view(64, 64)[:, :2]}
    staged = stager.stage(state)
    assert same(staged, state)
    storages = [tensor.untyped_storage() for tensor in staged.values()]
    assert sum({each.data_ptr(): each.nbytes() for each in storages}.values()) < 8192
    assert staged["sparse"].is_contiguous()


def test_views_that_overlap_share_one_copy() -> None:
    base = torch.arange(4096)
    state = {"base": base, "rows": base.view(64, 64)[3:7], "column": base.view(64, 64)[:, 5]}
    staged = SnapshotStager().stage(state)
    assert same(staged, state)
    pointers = [staged[name].data_ptr() - staged["base"].data_ptr() for name in state]
    assert pointers == [0, 3 * 64 * 8, 5 * 8]


def test_views_with_gaps_share_the_range_of_dense_ones_and_do_not_join_others() -> None:
    """Two parts far from one another, and a view with an element in each."""
    base = torch.arange(1 << 16)
    views = [base[:100], base[50:200], base[10:60:7], base[-10:], base[:: (1 << 16) - 1]]
    copies, nbytes = copies_of(views)
    assert [copy.tolist() for copy in copies] == [view.tolist() for view in views]
    assert nbytes == (200 + 10 + 2) * 8
    assert len({copy.untyped_storage().data_ptr() for copy in copies[:3]}) == 1


def test_equal_views_with_gaps_share_a_copy_and_others_keep_the_order_of_their_dimensions() -> None:
    base = torch.arange(1 << 12).view(64, 64)
    views = [base[:, ::9], base[:, ::9], base[:, ::9].t()]
    copies, nbytes = copies_of(views)
    assert [copy.tolist() for copy in copies] == [view.tolist() for view in views]
    assert nbytes == 2 * views[0].nbytes
    assert copies[0].data_ptr() == copies[1].data_ptr()
    assert [copy.is_contiguous() for copy in copies] == [True, True, False]
    assert copies[2].t().is_contiguous()


def storages_of(value: Any) -> dict[int, int]:
    """Address and length of each storage in a nested tuple."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    return {key: nbytes for each in value for key, nbytes in storages_of(each).items()}


def test_tensors_in_tuples_are_copied_without_their_storages() -> None:
    base = torch.arange(1 << 16)
    tagged = base[20:30]
    tagged.note = [base[5:7]]
    parameter = torch.nn.Parameter(torch.arange(8.0)[::3])
    live = (base[:10], [base[5:12], (parameter, tagged, base[:0])], base[40 :: 1 << 14], base[3])
    copy = CopiedState({"t": live}).state["t"]
    assert same(copy, live)
    assert sum(storages_of(copy).values()) < 300
    assert copy[0][5:].data_ptr() == copy[1][0].data_ptr()  # They overlap.
    assert copy[1][1][1].note[0].tolist() == [5, 6]
    assert isinstance(copy[1][1][0], torch.nn.Parameter)
    base.fill_(-1)
    assert copy[0].tolist() == list(range(10))


def test_a_view_with_gaps_shares_the_elements_that_another_view_has() -> None:
    base = torch.arange(1 << 12)
    copy = CopiedState({"t": (base[::64], base[1:2], base[128:130])}).state["t"]
    copy[2].fill_(-1)
    assert copy[0][:4].tolist() == [0, 64, -1, 192]


def test_columns_without_common_elements_are_copied_without_the_others() -> None:
    table = torch.arange(1 << 16).view(-1, 256)
    copy = CopiedState({"t": (table[:, 3], table[:, 7:9])}).state["t"]
    assert same(copy, (table[:, 3], table[:, 7:9]))
    assert sum(storages_of(copy).values()) == 3 * 256 * 8


def test_one_tensor_in_several_containers_stays_one() -> None:
    shared = torch.ones(3)
    cycle: list[Any] = [shared]
    cycle.append((cycle, shared))
    copy = CopiedState({"a": (shared, {"b": shared}), "c": (cycle,)}).state
    assert copy["a"][0] is copy["a"][1]["b"] is copy["c"][0][0] is copy["c"][0][1][1]
    assert copy["c"][0][1][0] is copy["c"][0]
