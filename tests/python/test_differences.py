"""Native differences of tensors: their values, and what the engine refuses."""

from __future__ import annotations

import pytest
import torch

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt.errors import CorruptionError, MismatchError

pytestmark = pytest.mark.skipif(
    _native.why_no_zstd() is not None, reason=str(_native.why_no_zstd())
)

BOX = ([0, 0], [300, 500])


def view(tensor: torch.Tensor) -> _native.TensorView:
    """A writable view."""
    return _tensor_view.view(tensor, "w", True)


def snapshot_of(tensor: torch.Tensor) -> tuple[torch.Tensor, bytearray]:
    """A snapshot of a tensor, and the digests of its blocks."""
    snapshot = torch.empty(tensor.shape, dtype=tensor.dtype)
    blocks = -(-snapshot.nbytes // _native.BLOCK_NBYTES)
    digests = bytearray(8 * blocks)
    _native.take_snapshot(view(snapshot), view(tensor), digests, 2)
    return snapshot, digests


def test_a_difference_brings_another_copy_to_the_same_bits() -> None:
    live = torch.randn(500, 300).to(torch.bfloat16).t()
    target = live.clone()
    snapshot, digests = snapshot_of(live)
    with torch.no_grad():
        live[torch.rand(live.shape) < 0.08] *= 1.01
        live[7, 7] = float("nan")
    end, memory = len(digests) // 8, _native.DifferenceMemory()
    taken = _native.take_difference(view(snapshot), view(live), 0, end, digests, 2, memory)
    assert taken.nbytes > 0
    payload, table = taken.encode()
    assert len(table) == _native.BLOCK_ROW_NBYTES * len(digests) // 8

    rows = [offset for offset in (0, 100, 200)]
    for first in rows:  # Each part of the rows by itself.
        part = target[first : first + 100]
        mask = bytearray(part.nbytes)
        box = ([first, 0], [100, 500])
        _native.merge_blocks(mask, view(part), box, BOX, 2, table, 0, payload, 2)
        _native.apply_mask(view(part), mask, 2)
    assert torch.equal(target.view(torch.int16), live.view(torch.int16))
    assert torch.equal(snapshot.view(torch.int16), live.contiguous().view(torch.int16))


def test_other_values_and_damage_are_refused_by_their_own_errors() -> None:
    live = torch.zeros(300, 500)
    snapshot, digests = snapshot_of(live)
    live[0, 0] = 1
    end, memory = len(digests) // 8, _native.DifferenceMemory()
    taken = _native.take_difference(view(snapshot), view(live), 0, end, digests, 1, memory)
    payload, table = taken.encode()
    mask = bytearray(live.nbytes)
    with pytest.raises(MismatchError, match=r"block 0 of .* not those of the version before"):
        _native.merge_blocks(mask, view(live), BOX, BOX, 4, table, 0, payload, 1)
    with pytest.raises(CorruptionError, match=r"block 0 of .* is damaged"):
        _native.merge_blocks(mask, None, BOX, BOX, 4, table, 0, payload[:-1] + b"x", 1)
    with pytest.raises(ValueError, match="encoded already"):
        taken.encode()
    with pytest.raises(ValueError, match="the snapshot is float32"):
        _native.take_difference(view(snapshot), view(live.half()), 0, 1, digests, 1, memory)
    with pytest.raises(ValueError, match="no element has 3 bytes"):
        _native.merge_blocks(mask, None, BOX, BOX, 3, table, 0, payload, 1)
    with pytest.raises(ValueError, match="read-only"):
        _native.apply_mask(_tensor_view.view(live, "w", False), mask, 1)
    with pytest.raises((ValueError, BufferError)):
        _native.merge_blocks(bytes(mask), None, BOX, BOX, 4, table, 0, payload, 1)
