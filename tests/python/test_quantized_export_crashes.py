"""Exports in FP8 that die or fail at any call: no folder's config states what its files are not."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load
from support.faulty_calls import DEATH, MADE, Answer, FaultyStore, Run, lost, refused, stop_at_calls
from syscalls import can_stop
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from torch_ckpt import FastReader, SafetensorsWriter
from torch_ckpt.conversion.convert import convert
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.process_state import PROCESS

pytestmark = pytest.mark.skipif(not can_stop(), reason="no system calls can be stopped here")

EIO = 5
PLAIN = {"model_type": "x"}
ANSWERS = {"dies": DEATH, "fails": refused(EIO), "is lost": lost(EIO)}


def state(number: int, *names: str) -> dict[str, torch.Tensor]:
    names = ("up.weight", "lm_head.weight", "norm.weight", *names)
    return {
        name: torch.full((128,) if "norm" in name else (128, 256), float(number)).bfloat16()
        for name in names
    }


def export(folder: Location, number: int, *names: str, **options: Any) -> None:
    writer = SafetensorsWriter(folder.checkpoint_id, **options)
    torch_ckpt.save(state(number, *names), storage_writer=writer, no_dist=True)


def with_plain_config(folder: Location) -> None:
    (folder / "config.json").replace(json.dumps(PLAIN).encode(), sync=False)


FP8: dict[str, Any] = {"quantize": "fp8-block-128"}
CASES: dict[str, Callable[[Location], None]] = {
    "a folder with a config": with_plain_config,
    "the same model in FP8": lambda folder: export(folder, 1, **FP8),
    "a smaller model in FP8": lambda folder: export(folder, 1, max_shard_nbytes=40_000, **FP8),
    "a plain model": lambda folder: export(folder, 1),
}


def files_of_loaders(folder: Location) -> Iterator[list[str]]:
    """The files of the model that loaders open; some of them look for the index first."""
    names = folder.names()
    if "model.safetensors" in names:
        yield ["model.safetensors"]
    if "model.safetensors.index.json" in names:
        index = json.loads((folder / "model.safetensors.index.json").read())
        yield sorted(set(index["weight_map"].values()))


def check_true(folder: Location, where: object) -> None:
    """Checks the config against the files."""
    try:
        stated = json.loads((folder / "config.json").read()).get("quantization_config")
    except NotFoundError:
        stated = None
    for files in files_of_loaders(folder):
        found: dict[str, torch.Tensor] = {}
        for name in files:
            found |= load((folder / name).read())
        for fqn, value in found.items():
            is_stated = bool(stated) and fqn.endswith(".weight") and value.ndim == 2
            if is_stated:
                is_stated = fqn.removesuffix(".weight") not in stated["modules_to_not_convert"]
            assert is_stated == (value.dtype == torch.float8_e4m3fn), (where, fqn, stated)


class Scene:
    """A folder, on disk or on a store, and calls to it that are answered by the test."""

    def __init__(self, folder: Path, store: FaultyStore | None) -> None:
        self._parent, self._store = folder, store
        self.folder = Location(folder / "model")
        if store is not None:
            MemoryFileSystem.store.clear()  # It lists all files of all tests each time.
            self.folder = Location(f"faulty://tests/{folder.name}")
        self.folder.create_directories()

    def run(self, at_call: Callable[[int, str], Answer], function: Callable[[], None]) -> Run:
        PROCESS.probed.clear()
        if self._store is not None:
            return self._store.stop_at_calls(at_call, function)
        return stop_at_calls(self._parent, at_call, function)


@pytest.fixture(params=["disk", "store"])
def scenes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Iterator[Scene]]:
    monkeypatch.setenv("TORCH_CKPT_IO", "threads")  # Nothing stops the calls of io_uring.
    store = FaultyStore() if request.param == "store" else None
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # Nothing is synced there.
        paths = (Path(folder) / str(number) for number in itertools.count())
        yield (Scene(path, store) for path in paths)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def converted(source: Path, folder: Location) -> None:
    convert(Location(source), folder, "safetensors", overwrite=True, **FP8)


@pytest.mark.thin(1)
@pytest.mark.parametrize("ends", ANSWERS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["save", "convert"])
def test_the_config_is_true_of_the_files_after_a_save_that_ends_at_any_call(
    way: str, case: str, ends: str, scenes: Iterator[Scene], tmp_path: Path
) -> None:
    torch_ckpt.save(state(2, "down.weight"), checkpoint_id=tmp_path, no_dist=True)
    is_refused = case == "a plain model"
    for number, scene in enumerate(scenes):
        CASES[case](scene.folder)
        check_true(scene.folder, "before")
        ended = scene.run(
            lambda at, _, number=number: ANSWERS[ends] if at == number else MADE,
            (lambda scene=scene: export(scene.folder, 2, "down.weight", **FP8))
            if way == "save"
            else (lambda scene=scene: converted(tmp_path, scene.folder)),
        )
        check_true(scene.folder, ended.calls[number:][:1])
        if number >= len(ended.calls):
            assert (ended.error is not None) == is_refused, ended
            break
        if not is_refused:
            export(scene.folder, 3, "down.weight", **FP8)
            check_true(scene.folder, f"after the save that follows {ended.calls[number]}")
            loaded = {name: torch.zeros_like(v) for name, v in state(0, "down.weight").items()}
            reader = FastReader(scene.folder.checkpoint_id)
            torch_ckpt.load(loaded, storage_reader=reader, no_dist=True)
            assert all((value == 3).all() for value in loaded.values())


def test_a_plain_save_does_not_leave_a_config_that_states_fp8(tmp_path: Path) -> None:
    folder = Location(tmp_path)
    export(folder, 1, **FP8)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointException, match="quant_method 'fp8'"):
        export(folder, 2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    stored = {"up.weight": torch.ones(128, 128).to(torch.float8_e4m3fn)}
    stored["up.weight_scale_inv"] = torch.ones(1, 1)
    torch_ckpt.save(stored, storage_writer=SafetensorsWriter(tmp_path), no_dist=True)


def test_a_config_that_another_program_has_written_anew_is_completed_again(tmp_path: Path) -> None:
    folder = Location(tmp_path)
    export(folder, 1, **FP8)
    with_plain_config(folder)
    export(folder, 2, **FP8)
    check_true(folder, "after")
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "x"
