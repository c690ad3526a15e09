"""Sparse patches between two versions: names, flat indices and values, as engines take them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.published import TIES, Engine, published, weights
from support.tensors import bits

from torch_ckpt import Publisher
from torch_ckpt.errors import CorruptionError, MismatchError, NotFoundError
from torch_ckpt.publishing.patches import patches

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

BF16 = torch.bfloat16


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """Versions 1 to 5, of which 1 and 4 are whole."""
    with Publisher(tmp_path, dtype=BF16, whole_every=3) as training:
        for version in range(1, 6):
            training.publish(version, weights(version))
    return tmp_path


@pytest.mark.parametrize(("base", "version"), [(1, 2), (1, 3), (2, 3), (4, 5), (4, None), (3, 3)])
def test_patches_make_one_version_of_another_bit_for_bit(
    policy: Path, base: int, version: int | None
) -> None:
    tensors = {n: v for n, v in published(weights(base), BF16).items() if n not in TIES}
    whole = {name: value.clone() for name, value in tensors.items()}
    seen = set()
    for patch in patches(policy, tensors, base, version):
        assert patch.name not in seen
        seen.add(patch.name)
        assert (patch.shape, patch.dtype) == (whole[patch.name].shape, whole[patch.name].dtype)
        assert patch.indices.dtype == torch.int32
        assert bool((patch.indices.diff() > 0).all())
        flat = whole[patch.name].view(-1)
        changed = flat.clone()
        changed[patch.indices.long()] = patch.values
        # Each of them has changed.
        assert bits(changed[patch.indices.long()]) == bits(patch.values)
        size = changed.itemsize
        pairs = zip(bits(flat), bits(changed), strict=True)
        differ = {at // size for at, (old, new) in enumerate(pairs) if old != new}
        assert differ == set(patch.indices.tolist())
        flat.copy_(changed)
    expected = published(weights(version or 5), BF16)
    assert {n: bits(v) for n, v in whole.items()} == {n: bits(expected[n]) for n in whole}
    before = published(weights(base), BF16)
    assert {n: bits(v) for n, v in tensors.items()} == {n: bits(before[n]) for n in tensors}


@pytest.mark.parametrize("dim", [0, 1])
def test_indices_of_a_slice_are_those_of_the_whole_tensor(policy: Path, dim: int) -> None:
    before, after = (published(weights(n), BF16) for n in (1, 3))
    engine = Engine(before, 1, 3, dim)
    for name, value in engine.tensors.items():
        if isinstance(value, tuple):
            own = before[name]
            for at, (begin, size) in enumerate(zip(value[1], value[2].shape, strict=True)):
                own = own.narrow(at, begin, size)
            value[2].copy_(own)
        else:
            value.copy_(before[name])
    tensors = {name: value for name, value in engine.tensors.items() if name not in TIES}
    for patch in patches(policy, tensors, 1, 3):
        flat = before[patch.name].view(-1)
        flat[patch.indices.long()] = patch.values
    for name, value in tensors.items():
        own, expected = before[name], after[name]
        for at, (begin, size) in enumerate(
            zip(value[1], value[2].shape, strict=True) if isinstance(value, tuple) else ()
        ):
            own, expected = own.narrow(at, begin, size), expected.narrow(at, begin, size)
        assert bits(own) == bits(expected), name


def test_what_is_no_base_is_refused_by_name(policy: Path) -> None:
    tensors = published(weights(1), BF16)
    with pytest.raises(NotFoundError, match="from version 3 to version 5"):
        next(patches(policy, tensors, 3))
    with pytest.raises(NotFoundError, match="version 7"):
        next(patches(policy, tensors, 1, 7))
    with pytest.raises(MismatchError, match=r"'matrix'.*float32"):
        next(patches(policy, {"matrix": tensors["matrix"].float()}, 1, 2))
    with pytest.raises(MismatchError, match=r"'other'.*no such tensor"):
        next(patches(policy, {"other": tensors["matrix"]}, 1, 2))
    with pytest.raises(MismatchError, match=r"'matrix'.*version-2"):
        next(patches(policy, {"matrix": tensors["matrix"] + 1}, 1, 2))
    (file,) = policy.glob("version-3/rank-*")
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 3] ^= 1
    file.write_bytes(contents)
    with pytest.raises(CorruptionError, match="version-3"):
        next(patches(policy, tensors, 1, 3))
