"""Power cuts during real saves: whatever the disk may hold, our reader and stock DCP's find one
checkpoint, whole.

The C++ tests explore many more states, of saves that C++ does step by step. Here it is `FastWriter`
that saves, so that its own steps are under test, and stock DCP that loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import blank, differences, files, load, save
from power_cuts import LIMIT, SAMPLES, SEED, rebuild, record, trees_of_a_save
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.planner import SavePlanner

from torch_ckpt import FastReader, FastWriter
from torch_ckpt.errors import NotFoundError


def version(number: int) -> dict[str, Any]:
    """States that only their values tell apart."""
    torch.manual_seed(number)
    return {
        "weight": torch.randn(40, 50),
        "bias": torch.randn(300).bfloat16(),
        "moments": {"first": torch.randn(1500), "second": torch.randn(10, 20)},
        "step": number,
    }


def read_range(tree: dict[str, bytes], path: Path) -> tuple[tuple[str, bytes], ...]:
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


Tree = tuple[dict[str, bytes], bool, str]
"""What the disk may hold, whether the save had ended, and where it was."""


def check_trees(
    trees: Iterable[Tree],
    path: Path,
    rebuilt: Path,
    versions: dict[str, dict[str, Any]],
    before: str,
    *,
    is_new: bool,
) -> None:
    """Loads what each tree has at a path: what was there before, or the new checkpoint, whole.

    With ``is_new``, the directory must not appear before the checkpoint.
    """
    verdicts: dict[tuple[tuple[str, bytes], ...], tuple[str, str]] = {}
    states = 0
    for tree, done, where in trees:
        states += 1
        part = read_range(tree, path)
        if part not in verdicts:
            rebuild(tree, rebuilt)
            ours = found_by(FastReader, rebuilt, versions)
            stock = found_by(FileSystemReader, rebuilt, versions)
            verdicts[part] = ours, stock
        ours, stock = verdicts[part]
        if is_new and any(Path(name).parent == path for name in tree):
            assert ours == "new", f"the directory appears before the checkpoint: {where}"
        assert ours in ({"new"} if done else {before, "new"}), where
        # Where nothing is committed, stock DCP says so in words of its own.
        assert stock == ours or (ours == "nothing" and stock.startswith("error")), where
    print(f"{states} states, {len(verdicts)} of which loads can tell apart; before: {before}")
    assert {ours for ours, _ in verdicts.values()} == {before, "new"}


@pytest.fixture(autouse=True)
def no_cached_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """With DCP's plan caching, which other tests use, a new directory is not hidden."""
    monkeypatch.setattr(SavePlanner, "_cached_global_plan", {})


@pytest.mark.parametrize("before", ["old", "nothing", "no directory"])
def test_power_cut_at_any_instant_leaves_one_whole_checkpoint(
    before: str, recorder: Any, tmp_path: Path
) -> None:
    path, rebuilt = tmp_path / "saved", tmp_path / "rebuilt"
    versions = {"new": version(2)}
    if before == "nothing":
        path.mkdir()
    if before == "old":
        versions["old"] = version(1)
        save(versions["old"], FastWriter(path, thread_count=2))
    is_new, before = before == "no directory", before.replace("no directory", "nothing")

    writer = FastWriter(path, thread_count=2)
    trees = trees_of_a_save(recorder, path, writer, versions["new"])
    check_trees(trees, path, rebuilt, versions, before, is_new=is_new)


def tuned(number: int) -> dict[str, Any]:
    """States of which most is the same."""
    return version(1) | {"bias": version(number)["bias"], "step": number}


def frozen(number: int) -> dict[str, Any]:
    """States of which nothing changes, so that a save writes no file."""
    return {key: value for key, value in version(1).items() if key != "step"}


@pytest.mark.parametrize("before", ["old", "nothing", "no directory"])
@pytest.mark.parametrize("make", [tuned, frozen])
def test_power_cut_while_files_are_linked_leaves_the_base_and_one_whole_checkpoint(
    make: Callable[[int], dict[str, Any]], before: str, recorder: Any, tmp_path: Path
) -> None:
    path, base, rebuilt = tmp_path / "saved", tmp_path / "base", tmp_path / "rebuilt"
    save(make(1), FastWriter(base, thread_count=2, base=tmp_path / "none"))
    versions = {"new": make(2)}
    if before == "nothing":
        path.mkdir()
    if before == "old":
        versions["old"] = make(3) | {"weight": version(3)["weight"]}
        save(versions["old"], FastWriter(path, thread_count=2))
    is_new, before = before == "no directory", before.replace("no directory", "nothing")

    of_base = {str(base / name): contents for name, contents in files(base).items()}

    def trees_without_base() -> Iterator[Tree]:
        writer = FastWriter(path, thread_count=2, base=f"recorded://{base}")
        trees = trees_of_a_save(recorder, path, writer, versions["new"], base)
        for tree, done, where in trees:
            assert {name: tree.pop(name, None) for name in of_base} == of_base, where
            yield tree, done, where

    check_trees(trees_without_base(), path, rebuilt, versions, before, is_new=is_new)
    taken = [file for file in path.glob("*.distcp") if file.stat().st_nlink > 1]
    assert len(taken) == 2, "the save has linked nothing"


def test_a_save_makes_durable_what_it_takes_of_a_base_that_is_not(
    recorder: Any, tmp_path: Path
) -> None:
    path, base, rebuilt = tmp_path / "saved", tmp_path / "base", tmp_path / "rebuilt"
    recording = record(recorder, path)
    none = f"recorded://{tmp_path / 'none'}"
    save(tuned(1), FastWriter(f"recorded://{base}", sync_files=False, base=none))
    save(tuned(2), FastWriter(f"recorded://{path}", base=f"recorded://{base}"))
    cuts = recorder.PowerCuts(recording, LIMIT, SAMPLES, SEED)
    trees = cuts.trees_after(cuts.last_instant)
    assert any(f"{base}/.metadata" not in tree for tree in trees), "the base is durable"
    for tree in trees:
        rebuild(tree, rebuilt)
        for reader in (FastReader, FileSystemReader):
            assert found_by(reader, rebuilt, {"new": tuned(2)}) == "new", sorted(tree)


def small(number: int) -> dict[str, bytes]:
    return {"metrics.json": b'{"loss": %d}' % number, "branch.json": b'{"continued_from": null}'}


@pytest.mark.parametrize(
    "new", [small(2), {"metrics.json": b"{}"}, {}], ids=["both", "one", "none"]
)
@pytest.mark.parametrize("before", ["old", "nothing", "no directory"])
def test_power_cut_leaves_the_small_files_of_a_step_whole(
    before: str, new: dict[str, bytes], recorder: Any, tmp_path: Path
) -> None:
    """Once the save has ended, they are those of the new checkpoint."""
    path = tmp_path / "saved"
    if before == "nothing":
        path.mkdir()
    if before == "old":
        former = FastWriter(path)
        former.small_files = small(1)
        save(version(1), former)
    writer = FastWriter(path)
    writer.small_files = new
    states = 0
    for tree, done, where in trees_of_a_save(recorder, path, writer, version(2)):
        states += 1
        for name in small(1):
            found, wanted = tree.get(f"{path}/{name}"), new.get(name)
            is_committed = f"{path}/.metadata" in tree and before != "old"
            known = {wanted} if done or is_committed else {wanted, None}
            if before == "old" and not done:
                known.add(small(1)[name])
            assert found in known, f"{name}: {where}"
    print(states, "states")
