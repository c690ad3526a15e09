"""Checkpoints of a former version load, and what is written today has the same bytes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import golden_checkpoints
import pytest
import torch
import torch.distributed.checkpoint as dcp
from forks import run_python
from support.commit_files import index_file
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from torch_ckpt import FastLoadPlanner, FastReader, FastWriter
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.verify import examine

pytestmark = pytest.mark.thin(1.0)  # Each version and each kind of reader is a case.

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "checkpoints"
NAMES = sorted(path.name for path in GOLDEN.iterdir())
READERS: dict[str, Any] = {
    "ours": lambda path: {"storage_reader": FastReader(path)},
    "ours, with our planner": lambda path: {
        "storage_reader": FastReader(path),
        "planner": FastLoadPlanner(),
    },
    "stock": lambda path: {"storage_reader": dcp.FileSystemReader(path)},
}


def emptied(value: Any) -> Any:
    """The same with other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(one) for key, one in value.items()}
    return [emptied(one) for one in value] if isinstance(value, list) else None


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    return [bits(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reader", READERS)
def test_a_checkpoint_of_a_former_version_loads(reader: str, name: str) -> None:
    loaded = emptied(golden_checkpoints.full_state())
    dcp.load(loaded, no_dist=True, **READERS[reader](GOLDEN / name))
    assert bits(loaded) == bits(golden_checkpoints.full_state())


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_a_former_version_verifies(name: str) -> None:
    report = examine(Location(GOLDEN / name))
    assert not report.damage
    assert not report.doubts
    loaded = _load_state_dict_from_keys("step", storage_reader=FastReader(GOLDEN / name))
    assert loaded == {"step": 7}


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_a_former_version_has_the_id_that_it_was_saved_with(name: str) -> None:
    found = [
        reader(GOLDEN / name).read_metadata().storage_meta.save_id
        for reader in (FastReader, dcp.FileSystemReader)
    ]
    assert found == ["5a" * 8] * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_a_former_version_is_replaced_whole(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    shutil.copytree(GOLDEN / name, path)
    dcp.save({"new": torch.ones(3)}, storage_writer=FastWriter(path), no_dist=True)
    assert not [file.name for file in path.iterdir() if "5a" * 8 in file.name]
    assert len(list(path.iterdir())) == 3  # .metadata, its index, and a data file.
    assert not examine(Location(path)).damage


def without_mark(index: bytes) -> bytes:
    """An index without the writer's revision, the former mark of the plan, and its checksum."""
    return index[:52] + index[56:264] + index[296:312] + index[320:]


def test_what_is_written_today_has_the_same_bytes(tmp_path: Path) -> None:
    script = Path(golden_checkpoints.__file__)
    done = run_python(script, tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stdout
    for path in sorted(GOLDEN.rglob("*")):
        if path.is_dir():
            continue
        same = tmp_path / path.relative_to(GOLDEN)
        if path.name == ".index":  # Its name before 0.3.0.
            written = index_file(same.parent).read_bytes()
            assert without_mark(written) == without_mark(path.read_bytes()), path
        elif torch.__version__.startswith("2.13."):  # Torch itself pickles objects.
            assert same.read_bytes() == path.read_bytes(), path
