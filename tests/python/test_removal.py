"""Steps that cannot be removed, that cannot be renamed, or that retention does not understand."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.run_steps import (
    CHANGES,
    data_file,
    names_in_run,
    removes_until_killed,
    save_steps,
    state_of,
    steps_in,
    warned,
)
from waits import until

from torch_ckpt import FastWriter, Run, load, save
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import metadata_prefixes
from torch_ckpt.ladder import removal, retention
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.ladder.step_files import what_is_missing
from torch_ckpt.storage.verify import check_whole

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def immutable() -> Iterator[Callable[[Path], None]]:
    """Makes a file or directory immutable until the test ends."""
    made: list[Path] = []

    def make(path: Path) -> None:
        done = subprocess.run(["chattr", "+i", path], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"files cannot be made immutable here: {done.stderr.strip()}")
        made.append(path)

    yield make
    for path in made:
        found = [path, *path.parent.parent.glob(f"*/{path.name}")]  # Its directory may be renamed.
        subprocess.run(["chattr", "-i", *found], capture_output=True)


@pytest.fixture
def overlay(tmp_path: Path, mount_tmpfs: Callable[[str], Path]) -> Iterator[Callable[[Path], Path]]:
    """Mounts an overlay above a directory, whose subdirectories cannot be renamed there."""
    mounted: list[Path] = []

    def mount(lower: Path) -> Path:
        disk, merged = mount_tmpfs("size=8m"), tmp_path / "merged"
        for path in (disk / "upper", disk / "work", merged):
            path.mkdir()
        (lower / "probe").mkdir()
        layers = f"lowerdir={lower},upperdir={disk}/upper,workdir={disk}/work,redirect_dir=off"
        layers = layers.replace(" ", "\\ ")
        command = ["mount", "-t", "overlay", "-o", layers, "overlay", str(merged)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"cannot mount an overlay here: {done.stderr.strip()}")
        mounted.append(merged)
        with pytest.raises(OSError, match="cross-device"):
            (merged / "probe").rename(merged / "renamed")
        return merged

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True)


# ---- Removals that are killed ----


def calls_of(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The calls with which a piece of work changes files, and the name of each first argument."""
    made: list[tuple[str, str]] = []

    def recorded(name: str, method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Location) -> None:
            made.append((name, arguments[0].name))
            method(*arguments)

        return call

    with monkeypatch.context() as patch:
        for name in CHANGES:
            patch.setattr(Location, name, recorded(name, getattr(Location, name)))
        work()
    return made


def test_all_steps_are_hidden_before_one_sync_and_deleted_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 0)
    for step in range(1, 150):  # More than are hidden before leases are looked up again.
        shutil.copytree(tmp_path / "step-0", tmp_path / f"step-{step}")
    disk = StepDirectories(Location(tmp_path))

    made = calls_of(lambda: Retention(keep_last=1).apply(disk, 149), monkeypatch)

    assert steps_in(tmp_path) == [149]
    made = [call for call in made if not call[1].startswith(".pending-")]  # Announcements.
    names = [name for name, _ in made]
    assert names[:150] == ["rename"] * 149 + ["sync"]
    assert made[149] == ("sync", tmp_path.name)
    assert set(names[150:]) == {"remove"}
    assert names_in_run(tmp_path) == ["step-149"]


def test_the_remains_of_a_killed_removal_are_deleted_after_a_sync_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1, 2, 3)
    assert removes_until_killed(tmp_path, 3, CHANGES) == -signal.SIGKILL  # Before the sync.
    assert steps_in(tmp_path) == [3]

    made = calls_of(StepDirectories(Location(tmp_path)).sweep, monkeypatch)

    assert made[0] == ("sync", tmp_path.name)
    assert {name for name, _ in made[1:]} == {"remove"}
    assert names_in_run(tmp_path) == ["step-3"]


FULL: dict[str, dict[str, Any]] = {
    "direct": {},
    "thread": {"asynchronous": True},
    "agent": {"asynchronous": True, "agent": True},
    "local": {"local": "local"},
}


@pytest.mark.parametrize("name", FULL)
def test_a_disk_that_the_remains_of_a_killed_removal_have_filled_is_freed(
    tmp_path: Path, small_disk: Path, memory: Path, name: str
) -> None:
    options, directory = dict(FULL[name]), small_disk / "run"
    if "local" in options:
        options["local"], directory = directory, tmp_path / "run"

    def save(run: Run, step: int) -> bool:
        run.save(step, state_of(step, 700_000))
        with contextlib.suppress(StorageError):
            run.wait()
        return step in steps_in(small_disk / "run")

    with Run(directory, **options) as run:
        assert save(run, 1)
    shutil.copytree(small_disk / "run" / "step-1", small_disk / "run" / ".removed-step-9-01234567")
    with Run(directory, **options, on_failure="warn", max_failures=99, reuse="off") as run:
        until(lambda: any([save(run, 2), save(run, 3)]))


def test_a_run_that_the_remains_of_a_killed_removal_have_filled_is_freed(
    tmp_path: Path, small_disk: Path
) -> None:
    run = small_disk / "run"
    save(state_of(1, 600_000), checkpoint_id=run / "step-1")
    for number in (8, 9):
        shutil.copytree(run / "step-1", run / f".removed-step-{number}-01234567")
    options: dict[str, Any] = {"on_failure": "warn", "keep_last": 1, "reuse": "off"}
    with Run(run, local=tmp_path / "local", **options) as job:
        for step in (2, 3):
            job.save(step, state_of(step, 600_000))
            with contextlib.suppress(StorageError):
                job.wait(promoted=True)
    assert steps_in(run)[-1] == 3


def test_a_removal_that_is_killed_at_any_call_leaves_each_step_whole_or_gone(
    tmp_path: Path,
) -> None:
    save_steps(tmp_path / "whole", 1, 2, 3)
    for count in itertools.count():
        run = Location(tmp_path / f"run-{count}")
        shutil.copytree(tmp_path / "whole", tmp_path / run.name)
        code = removes_until_killed(tmp_path / run.name, count, CHANGES)
        for step in steps_in(tmp_path / run.name):
            check_whole(run / f"step-{step}")
        StepDirectories(run).sweep()
        assert all(name.startswith("step-") for name in names_in_run(tmp_path / run.name))
        if code == 1:  # It has ended before.
            break
        assert code == -signal.SIGKILL
    assert steps_in(tmp_path / run.name) == [3]
    # Renames, those of the announcement, a sync, and for each step its files and itself.
    assert count == 2 + 2 + 1 + 2 * 6


# ---- Steps that cannot be removed ----


def test_retention_goes_on_after_a_step_that_cannot_be_removed_and_warns_once(
    tmp_path: Path, immutable: Callable[[Path], None]
) -> None:
    run = save_steps(tmp_path, 1, 2, 3)
    immutable(tmp_path / "step-2")
    run = Run(tmp_path, keep_last=1)

    messages = warned(lambda: [run.save(step, state_of(step)) for step in (4, 5, 6)])

    assert len(messages) == 1
    assert "step 2 was not removed: cannot rename" in messages[0]
    assert steps_in(tmp_path) == [2, 6]
    assert Run(tmp_path).restore(state_of(-1), step=2) == 2  # Unchanged.


def test_retention_goes_on_after_a_file_that_cannot_be_removed_and_removes_all_others(
    tmp_path: Path, immutable: Callable[[Path], None]
) -> None:
    save_steps(tmp_path, 1, 2)
    data = data_file(tmp_path, 1)
    immutable(data)
    run = Run(tmp_path, keep_last=1)

    messages = warned(lambda: [run.save(step, state_of(step)) for step in (3, 4, 5)])

    [removed] = tmp_path.glob(".removed-*")
    assert [path.name for path in removed.iterdir()] == [data.name]
    assert len(messages) == 1
    assert "step 1 was not removed: cannot remove" in messages[0]
    assert "Operation not permitted" in messages[0]
    assert steps_in(tmp_path) == [5]


def test_a_step_that_cannot_be_renamed_is_removed(
    tmp_path: Path, overlay: Callable[[Path], Path]
) -> None:
    save_steps(tmp_path / "lower", 1, 2, 3)
    merged = overlay(tmp_path / "lower")
    run = Run(merged, keep_last=1)

    assert warned(lambda: run.save(4, state_of(4))) == []

    assert steps_in(merged) == [4]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_half_removed_step_that_cannot_be_renamed_is_no_step_and_is_removed_later(
    tmp_path: Path, overlay: Callable[[Path], Path], count: int
) -> None:
    save_steps(tmp_path / "lower", 2, 3)
    merged = overlay(tmp_path / "lower")

    assert removes_until_killed(merged, count) == -signal.SIGKILL

    assert steps_in(merged) == [2, 3]
    (merged / "step-3").joinpath(".metadata").unlink()
    shutil.rmtree(merged / "step-3")
    assert StepDirectories(Location(merged)).damaged() == []
    assert Run(merged).latest_step() is None
    save_steps(merged, 4, keep_last=1)
    assert steps_in(merged) == [4]


def test_a_lease_protects_a_step_that_cannot_be_renamed(
    tmp_path: Path, overlay: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path / "lower", 1, 2)
    merged = overlay(tmp_path / "lower")
    disk = StepDirectories(Location(merged))
    # It is written after the step was hidden, by a version that does not wait for the removal.
    leases = iter([set(), set(), {1}])
    monkeypatch.setattr(retention, "leased_steps", lambda _: next(leases))
    monkeypatch.setattr(removal, "leased_steps", lambda _: next(leases))

    Retention(keep_last=1).apply(disk, 2)

    assert Run(merged).restore(state_of(-1), step=1) == 1


@pytest.mark.parametrize("where", ["disk", "store"])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_step_that_is_saved_again_during_its_removal_remains_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, is_replaced: bool
) -> None:
    url = f"memory://removal/{tmp_path.name}" if where == "store" else tmp_path / "run"
    step = Location(f"{url}/step-1")
    again = Location(f"{url}/again")
    for number, path in enumerate((step, again), 1):
        save(state_of(number), checkpoint_id=path.checkpoint_id, no_dist=True)
    rename = Location.rename

    def refuse_directories(path: Location, to: Location) -> None:
        if path.name == step.name:
            raise StorageError("cannot rename a directory", errno.EXDEV)
        rename(path, to)

    looks = itertools.count()

    def leased() -> set[Location]:
        if next(looks) == 0:  # Before the step is hidden.
            return set()
        for name in again.names() if is_replaced else ():  # By a save that began before.
            (again / name).copy_to(step / name)
        return {step}

    monkeypatch.setattr(Location, "rename", refuse_directories)
    assert removal.remove_directories([step], leased=leased).leased == [step]
    found = state_of(-1)
    load(found, checkpoint_id=step.checkpoint_id, no_dist=True)
    assert found["step"] == (2 if is_replaced else 1)
    assert torch.equal(found["w"], state_of(found["step"])["w"])
    check_whole(step)


def test_checkpoints_of_single_ranks_are_hidden_too_before_their_files_are_deleted(
    tmp_path: Path, overlay: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = FastWriter(tmp_path / "lower/step-1")
    dcp.save(state_of(1), storage_writer=writer, use_collectives=False, no_dist=True)
    merged = overlay(tmp_path / "lower")
    found: list[list[str]] = []
    remove = Location.remove

    def removed(location: Location) -> None:
        if not location.name.startswith(".pending-"):  # An announcement.
            found.append(metadata_prefixes(Location(merged / "step-1")))
        remove(location)

    monkeypatch.setattr(Location, "remove", removed)
    path = Location(merged / "step-1")
    assert metadata_prefixes(path) == ["__0"]
    for looks in ([[path]], [[], [path]]):  # Before the step is hidden, and after it.
        answers: Iterator[list[Location]] = iter([*looks, []])
        outcome = removal.remove_directories([path], leased=functools.partial(next, answers))
        assert outcome.leased == [path]
    assert metadata_prefixes(path) == ["__0"]
    found.clear()  # The name of the hidden file went once the checkpoint had its own again.
    assert removal.remove_directories([path]).removed == [path]
    assert found
    assert not any(found)
    assert not path.exists()


@pytest.mark.parametrize("has_data", [True, False])
def test_marks_of_a_failed_save_stay_as_long_as_its_data_files(
    tmp_path: Path, has_data: bool
) -> None:
    step = Location(tmp_path / "step-1")
    step.create_directories()
    names = [".agents-0123456789abcdef-1.manifest", *(["__1_0_0123.distcp"] if has_data else [])]
    for name in names:
        (step / name).write(b"", sync=False)
    removal.remove_unfinished(step)
    assert (tmp_path / "step-1").exists() == has_data
    if has_data:
        assert not what_is_missing(step)  # So retention removes it.


# ---- Directories without metadata ----


def copy_without_dotfiles(source: Path, target: Path) -> str:
    """As ``cp source/* target`` does; returns the name of the index."""
    target.mkdir(parents=True)
    subprocess.run(f"cp -r '{source}'/* '{target}'", shell=True, check=True)
    [index] = source.glob(".index.*")
    return index.name


def test_a_step_copied_without_dotfiles_is_named_by_a_restore(tmp_path: Path) -> None:
    save_steps(tmp_path / "run", 300)
    index = copy_without_dotfiles(tmp_path / "run/step-300", tmp_path / "copy/step-300")

    for found in (
        lambda: Run(tmp_path / "copy").restore(state_of(-1)),
        lambda: Run(tmp_path / "copy").latest_step(),
    ):
        [message] = warned(found)
        begin = f"step 300 is passed over in {tmp_path}/copy: {tmp_path}/copy/step-300 has __0_0_"
        assert message.startswith(begin)
        assert f"but lacks .metadata and {index}" in message

    save_steps(tmp_path / "copy", 200)
    state = state_of(-1)
    [message] = warned(lambda: Run(tmp_path / "copy").restore(state))
    assert message.startswith("step 300 is passed over")
    assert state["step"] == 200


def test_a_copied_step_of_several_ranks_lacks_the_index_of_the_first(tmp_path: Path) -> None:
    for rank, save_id in enumerate("ab"):
        (tmp_path / f"__{rank}_0_{save_id * 16}.distcp").touch()
    missing = what_is_missing(Location(tmp_path))
    assert f"lacks .metadata and .index.{'a' * 16}. Its" in missing


def test_a_step_that_is_committed_meanwhile_lacks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1)
    metadata = tmp_path / "step-1/.metadata"
    [index] = (tmp_path / "step-1").glob(".index.*")
    pending = metadata.rename(tmp_path / f"step-1/.metadata{index.suffix}.tmp")
    names, listings = Location.names, []

    def listed(location: Location) -> list[str]:
        found = names(location)
        if not listings:  # The save commits right after the first listing.
            pending.rename(metadata)
        listings.append(found)
        return found

    monkeypatch.setattr(Location, "names", listed)
    assert what_is_missing(Location(tmp_path / "step-1")) == ""


def test_retention_leaves_what_it_does_not_understand(tmp_path: Path) -> None:
    save_steps(tmp_path / "run", 300)
    copy_without_dotfiles(tmp_path / "run/step-300", tmp_path / "copy/step-300")
    notes = tmp_path / "copy/step-200/notes.txt"
    notes.parent.mkdir()
    notes.write_text("the learning rate was too high")
    (tmp_path / "copy/step-100").mkdir()  # Empty.
    run = Run(tmp_path / "copy", keep_last=1)

    messages = warned(lambda: [run.save(step, state_of(step)) for step in (400, 500, 600)])

    assert steps_in(tmp_path / "copy") == [200, 300, 600]
    assert notes.exists()
    assert [message.split(":")[0] for message in messages] == [
        "step 300 was not removed",
        "step 200 was not removed",
    ]


def test_a_multiple_that_has_lost_its_metadata_is_retained(tmp_path: Path) -> None:
    run = save_steps(tmp_path, 10, keep_last=1, keep_every=10)
    (tmp_path / "step-10/.metadata").unlink()
    run.save(11, state_of(11))
    run.save(12, state_of(12))
    assert steps_in(tmp_path) == [10, 12]
