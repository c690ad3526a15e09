"""JSON files of versions that were written by a stranger: each is refused as damaged, and typed."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tensors import bits

from torch_ckpt import Publisher, Subscriber
from torch_ckpt._core import _native
from torch_ckpt.errors import CheckpointError, CorruptionError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.publishing.examination import damage_of, facts_of
from torch_ckpt.publishing.version_files import _sealed

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

HOSTILE: tuple[Any, ...] = (
    *(None, -1, 0.5, 1 << 31, (1 << 63) - 1, 1 << 64, "", "../x", "Tensor", "float64"),
    *([-1, 5], [1 << 62, 1 << 62], {"x": 1}),
)


def leaves(value: Any) -> Iterator[Callable[[Any], None]]:
    """Yields, for each value within another one, a function that replaces it."""
    places = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(places):

        def replace(other: Any, key: Any = key) -> None:
            value[key] = other

        yield replace
        if isinstance(inner, dict | list):
            yield from leaves(inner)


def changed(contents: bytes) -> Iterator[bytes]:
    """Yields the JSON with one value replaced, each with the digest of its bytes."""
    facts = json.loads(contents)
    del facts["xxh3"]
    for number in range(len(list(leaves(facts)))):
        for other in HOSTILE:
            own = json.loads(json.dumps(facts))
            list(leaves(own))[number](other)
            yield _sealed(own)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3, 20_000), value), "none": torch.zeros(0, 2)}


@pytest.mark.parametrize("file", ["version-1/version.json", "version-2/delta.json", "latest.json"])
def test_no_number_of_a_strangers_json_reaches_the_engine_unchecked(
    tmp_path: Path, file: str, full: bool
) -> None:
    with Publisher(tmp_path) as training:
        training.publish(1, tensors(1.0))
        training.publish(2, tensors(2.0))
    worker, served = Subscriber(tmp_path), tensors(0.0)
    worker.update(served, 1)
    contents, root = (tmp_path / file).read_bytes(), Location(tmp_path)
    # For time. A number prime to that of the values, so that each leaf has some of them.
    assert len(HOSTILE) % 5
    for other in itertools.islice(changed(contents), 0, None, 2 if full else 5):
        (tmp_path / file).write_bytes(other)
        for begin in (worker, Subscriber(tmp_path)):
            with contextlib.suppress(CheckpointError):
                begin.update(served)
            assert float(served["w"].min()) == float(served["w"].max()) in (0.0, 1.0, 2.0)
        facts_of(root)
        damage_of(root, 2)
        (tmp_path / file).write_bytes(contents)
        if worker.version != 1:
            worker.update(served, 1)


def test_a_block_table_with_a_huge_payload_is_damaged(tmp_path: Path) -> None:
    with Publisher(tmp_path) as training:
        training.publish(1, tensors(1.0))
        training.publish(2, tensors(2.0))
    worker, served = Subscriber(tmp_path), tensors(0.0)
    worker.update(served, 1)
    file, commit = next(tmp_path.glob("version-2/rank-*")), tmp_path / "version-2/delta.json"
    facts = json.loads(commit.read_bytes())
    del facts["xxh3"]
    contents, box = bytearray(file.read_bytes()), facts["files"][0][2][0]
    contents[box[4] + 16 : box[4] + 20] = b"\xff" * 4
    box[5] = _native.xxh3(contents[box[4] :])
    file.write_bytes(contents)
    commit.write_bytes(_sealed(facts))
    with pytest.raises(CorruptionError, match=rf"{file}.*'w' cannot have \d+ bytes"):
        worker.update(served)
    assert bits(served["w"]) == bits(tensors(1.0)["w"])
