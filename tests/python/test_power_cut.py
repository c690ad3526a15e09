"""Power cuts during real saves: whatever the disk may hold, our reader and stock DCP's find one
checkpoint, whole.

The C++ tests explore many more states, of saves that C++ does step by step. Here it is `FastWriter`
that saves, so that its own steps are under test, and stock DCP that loads.
"""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ROOT, blank, differences, load, save
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from torch_ckpt import FastReader, FastWriter, NotFoundError

LIMIT, SAMPLES, SEED = 600, 150, 7


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that records: of C++, for tests alone."""
    if not list(ROOT.glob("build/cpp/recorder*.so")):
        pytest.skip("the module recorder is built by tests/check.py")
    monkeypatch.syspath_prepend(ROOT / "build/cpp")
    return importlib.import_module("recorder")


def version(number: int) -> dict[str, Any]:
    """States that only their values tell apart."""
    torch.manual_seed(number)
    return {
        "weight": torch.randn(40, 50),
        "bias": torch.randn(300).bfloat16(),
        "moments": {"first": torch.randn(1500), "second": torch.randn(10, 20)},
        "step": number,
    }


def record_save(recorder: Any, path: Path, state: dict[str, Any]) -> Any:
    """Saves into ``path``; returns what the disk may hold after each of its changes."""
    path.mkdir(exist_ok=True)
    initial = {str(file): file.read_bytes() for file in path.iterdir()}
    writer = FastWriter(path, thread_count=2)
    writer._file_system = recorder.RecordingFileSystem(initial, str(path))
    save(state, writer)
    return recorder.PowerCuts(writer._file_system, LIMIT, SAMPLES, SEED)


def read_part(tree: dict[str, bytes], path: Path) -> tuple[tuple[str, bytes], ...]:
    """What a load can see of a tree: its metadata, indexes, and the files that metadata name."""
    metadata = tree.get(f"{path}/.metadata", b"")
    return tuple(
        (name, contents)
        for name, contents in sorted(tree.items())
        if "/." in name or Path(name).name.encode() in metadata
    )


def found_by(reader: type, path: Path, versions: dict[str, dict[str, Any]]) -> str:
    """Which of the versions a reader loads; what is wrong otherwise."""
    loaded = blank(versions["new"])
    try:
        load(loaded, reader(path))
    except CheckpointException as error:
        (failure, _) = next(iter(error.failures.values()))
        return "nothing" if isinstance(failure, NotFoundError) else f"error: {failure}"
    matching = [n for n, state in versions.items() if differences(state, loaded) == []]
    return matching[0] if matching else "a mix"


@pytest.mark.parametrize("overwrite", [True, False])
def test_power_cut_at_any_instant_leaves_one_whole_checkpoint(
    overwrite: bool, recorder: Any, tmp_path: Path
) -> None:
    path, rebuilt = tmp_path / "saved", tmp_path / "rebuilt"
    versions = {"new": version(2)}
    before = "nothing"
    if overwrite:
        versions["old"] = version(1)
        before = "old"
        save(versions["old"], FastWriter(path, thread_count=2))

    cuts = record_save(recorder, path, versions["new"])

    verdicts: dict[tuple[tuple[str, bytes], ...], tuple[str, str]] = {}
    states = 0
    for instant in range(cuts.last_instant + 1):
        for tree in [*cuts.trees_after(instant), cuts.tree_after_kill(instant)]:
            states += 1
            part = read_part(tree, path)
            if part not in verdicts:
                shutil.rmtree(rebuilt, ignore_errors=True)
                rebuilt.mkdir()
                for name, contents in tree.items():
                    (rebuilt / Path(name).name).write_bytes(contents)
                ours = found_by(FastReader, rebuilt, versions)
                stock = found_by(FileSystemReader, rebuilt, versions)
                verdicts[part] = ours, stock
            ours, stock = verdicts[part]
            done = instant == cuts.last_instant
            where = f"instant {instant}, after: {cuts.change_before(instant)}; {sorted(tree)}"
            assert ours in ({"new"} if done else {before, "new"}), where
            # Where nothing is committed, stock DCP says so in words of its own.
            assert stock == ours or (ours == "nothing" and stock.startswith("error")), where
    print(f"{states} states, {len(verdicts)} of which loads can tell apart; before: {before}")
    assert {ours for ours, _ in verdicts.values()} == {before, "new"}
