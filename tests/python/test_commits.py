"""One contract for all transactions: files appear together, or not at all.

The tests run over every place of ``tests/support/commit_places.py``. They stop each save at each of
its calls that change files, or at each request to the store, and read, kill, fail or save there.
"""

from __future__ import annotations

import errno
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.commit_places import PLACES, Model, Place, Saving, _layout, save
from support.faulty_calls import DEATH, MADE, Answer, FaultyStore, Run, lost, refused, stop_at_calls
from syscalls import can_stop

from torch_ckpt.commits import late_names
from torch_ckpt.commits.probe import check_commit
from torch_ckpt.commits.temporary import remove_abandoned
from torch_ckpt.errors import AlreadyExistsError, CheckpointError
from torch_ckpt.filesystems.location import Location, register
from torch_ckpt.process_state import PROCESS

pytestmark = pytest.mark.skipif(not can_stop(), reason="no system calls can be stopped here")

OLD, NEW, OTHER, THIRD, NEXT = 1, 2, 3, 4, 5
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)
FOREIGN = (
    *(".tmp", "model-notes.txt", "mine.distcp", ".metadata.bak", ".index.mine"),
    *("model-00001-of-00002.safetensors.bak", ".partial.notes"),
)


class Scene:
    """A target with what was there before, and files of the user in it and beside it."""

    def __init__(self, place: Place, folder: Path, number: int, store: FaultyStore) -> None:
        self.place, self._store = place, store
        self.folder = folder / f"run-{number}"
        self.run = Location(self.folder)
        if place.on_store:
            MemoryFileSystem.store.clear()  # It lists all files of all tests each time.
            self.run = Location(f"faulty://tests/run-{number}")
        self.target = self.run / "target"
        self.before = None if place.before is None else OLD
        self.run.create_directories()
        if place.before is not None:
            save(place.before(self.target, OLD))
        elif not place.owns_folder:
            self.target.create_directories()
        self.foreign = [self.run / name for name in FOREIGN]
        if not place.owns_folder:
            own = place.make(self.target, NEW).foreign
            self.foreign += [self.target / name for name in (*FOREIGN, *own)]
        for path in self.foreign:
            path.write(b"mine", sync=False)
        self.names_before = self.names()

    def stop_at_calls(self, at_call: Callable[[int, str], Answer], version: int = NEW) -> Run:
        PROCESS.probed.clear()
        saving = [self.place.make(self.target, version)]
        if self.place.on_store:
            return self._store.stop_at_calls(at_call, lambda: save(saving.pop()))
        return stop_at_calls(self.folder, at_call, lambda: save(saving.pop()))

    def found(self) -> set[int | None]:
        return self.place.make(self.target, NEW).found(self.target)

    def names(self) -> set[str]:
        """All names below the folder, without those of the user."""
        return set(_names_below(self.run, "")) - {
            str(path.path.relative_to(self.run.path)) for path in self.foreign
        }

    def check_next_save(self, where: object, version: int = NEXT) -> None:
        """Saves again, as another process does; then nothing else is left."""
        PROCESS.temporaries.clear()
        PROCESS.probed.clear()
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as other:  # It has saved there.
            check_commit(Location(other), Location(other), sync=True, directories=True)
        saving = self.place.make(self.target, version)
        save(saving)
        assert self.found() == {version}, where
        expected = {str(Path("target", name)) for name in saving.names()}
        assert self.names() == expected, where
        self.check_foreign(where)

    def check_foreign(self, where: object) -> None:
        for path in self.foreign:
            assert path.exists(), f"{path.name} is gone: {where}"
            assert path.read() == b"mine", f"{path.name}: {where}"


def _names_below(folder: Location, prefix: str) -> Iterator[str]:
    for name in folder.names():
        path = folder / name
        below = list(_names_below(path, f"{prefix}{name}/")) if _is_folder(path) else []
        yield from below or [f"{prefix}{name}"]


def _is_folder(path: Location) -> bool:
    return path.is_directory() or (not path.file_system.has_folders and bool(path.names()))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Place], Scene]]:
    monkeypatch.setattr(late_names, "APPEARS_S", 0.0)
    monkeypatch.setenv("TORCH_CKPT_IO", "threads")  # Nothing stops the calls of io_uring.
    store, numbers = FaultyStore(), itertools.count()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # Nothing is synced there.
        yield lambda place: Scene(place, Path(folder), next(numbers), store)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def each_place(test: Callable[..., None]) -> Callable[..., None]:
    """A check without --full tries a third of the places, in each test another third."""
    return pytest.mark.thin(0.33)(pytest.mark.parametrize("place", PLACES, ids=str)(test))


def answering(number: int, answer: Answer) -> Callable[[int, str], Answer]:
    return lambda at, _: answer if at == number else MADE


def found_at_each_call(here: Scene) -> list[set[int | None]]:
    """Saves; returns what readers find before each of its calls, and in the end."""
    found: list[set[int | None]] = []

    def read(at: int, call: str) -> Answer:
        found.append(here.found())
        return MADE

    run = here.stop_at_calls(read)
    assert run.error is None
    return [*found, here.found()]


def commit_of(here: Scene) -> int:
    """The number of the call with which the new content appears."""
    return next(at for at, found in enumerate(found_at_each_call(here)) if NEW in found) - 1


def go_on(saving: Saving, *steps: str) -> None:
    for step in steps:
        getattr(saving, step)()


@each_place
def test_a_reader_finds_the_old_content_or_the_new_one_at_every_call(
    place: Place, scene: Callable[[Place], Scene]
) -> None:
    here = scene(place)
    *meanwhile, last = found_at_each_call(here)
    assert last == {NEW}
    for number, found in enumerate(meanwhile):
        assert found <= {here.before, NEW}, number
    here.check_next_save("")


@each_place
def test_a_death_at_any_call_leaves_old_or_new_and_the_next_save_removes_the_rest(
    place: Place, scene: Callable[[Place], Scene]
) -> None:
    for number in itertools.count():
        here = scene(place)
        run = here.stop_at_calls(answering(number, DEATH))
        if number >= len(run.calls):
            break
        where = f"at call {number}: {run.calls[number]}"
        assert here.found() <= {here.before, NEW}, where
        here.check_next_save(where)


@pytest.mark.parametrize("place", [place for place in PLACES if place.keeps], ids=str)
def test_a_copy_that_died_at_any_call_goes_on_with_its_own_files(
    place: Place, scene: Callable[[Place], Scene]
) -> None:
    for number in itertools.count():
        here = scene(place)
        run = here.stop_at_calls(answering(number, DEATH))
        if number >= len(run.calls):
            break
        here.check_next_save(f"at call {number} of {run.calls}", NEW)


@each_place
def test_a_call_that_fails_leaves_the_old_content_and_an_abandoned_save_nothing(
    place: Place, scene: Callable[[Place], Scene], full: bool
) -> None:
    commit = commit_of(scene(place))
    for number in itertools.count():
        for error in ERRORS if full else ERRORS[number % 3 : number % 3 + 1]:
            here = scene(place)
            run = here.stop_at_calls(answering(number, refused(error)))
            if number >= len(run.calls):
                return
            where = f"{errno.errorcode[error]} at call {number}: {run.calls[number]}"
            assert run.error is None or isinstance(run.error, CheckpointError), where
            found = here.found()
            if run.error is None:
                assert found == {NEW}, where
            elif number <= commit:
                assert found == {here.before}, where
                # A store that fails a conditional write may have written it. A new directory whose
                # parent may not be synced remains: the next save needs no permission for it.
                is_unsynced = error == errno.EACCES and run.calls[number] == "fsync ."
                may_remain = is_unsynced or (place.on_store and number == commit)
                if not place.keeps and not may_remain:
                    assert here.names() == here.names_before, where
            else:
                assert found <= {here.before, NEW}, where
            here.check_foreign(where)
            here.check_next_save(where)


@each_place
def test_a_call_whose_reply_is_lost_never_leaves_torn_content(
    place: Place, scene: Callable[[Place], Scene], full: bool
) -> None:
    commit = commit_of(scene(place))
    for number in itertools.count():
        errors = (errno.EIO, errno.ENOENT)
        for error in errors if full else errors[number % 2 : number % 2 + 1]:
            here = scene(place)
            run = here.stop_at_calls(answering(number, lost(error)))
            if number >= len(run.calls):
                return
            where = f"{errno.errorcode[error]} after call {number}: {run.calls[number]}"
            assert run.error is None or isinstance(run.error, CheckpointError), where
            found = here.found()
            if run.error is None:
                assert found == {NEW}, where
            elif number < commit:
                assert found == {here.before}, where
            else:
                assert found <= {here.before, NEW}, where
            here.check_foreign(where)
            here.check_next_save(where)


@each_place
def test_other_saves_within_a_save_at_every_call_leave_one_of_them_whole(
    place: Place, scene: Callable[[Place], Scene], full: bool, seed: int
) -> None:
    commit, former = commit_of(scene(place)), place.before or place.make
    for number in itertools.count() if full else itertools.count(seed % 2, 2):
        here = scene(place)
        others = [((THIRD, former), (OTHER, place.make)), ((OTHER, former),)][number // 2 % 2]

        def save_another(
            at: int, call: str, here: Scene = here, number: int = number, others: Any = others
        ) -> Answer:
            # Nothing removes a file on the condition that it is still the one that was found.
            if at == number and call not in REMOVALS:
                for version, make in others:
                    save(make(here.target, version))
                    assert here.found() == {version}
            return MADE

        run = here.stop_at_calls(save_another)
        if number >= len(run.calls):
            return
        where = f"at call {number} of {run.calls}"
        if run.calls[number] in REMOVALS:
            continue
        if run.error is None:
            assert here.found() == ({NEW} if number <= commit else {OTHER}), where
        else:
            assert isinstance(run.error, CheckpointError), where
            assert here.found() == {OTHER}, f"{where}: {run.error}"
        here.check_next_save(where)


@each_place
def test_a_save_that_began_earlier_ends_at_every_call_of_another_one(
    place: Place, scene: Callable[[Place], Scene], full: bool, seed: int
) -> None:
    for number in itertools.count() if full else itertools.count(seed % 2, 2):
        here = scene(place)
        earlier = [place.make(here.target, OTHER)]
        go_on(earlier[0], "begin", "write")
        failed: list[CheckpointError] = []

        def commit_earlier(
            at: int,
            call: str,
            here: Scene = here,
            number: int = number,
            earlier: Any = earlier,
            failed: Any = failed,
        ) -> Answer:
            if at == number and call not in REMOVALS:
                saving = earlier.pop()
                try:
                    saving.commit()
                except CheckpointError as error:
                    failed.append(error)
                    saving.abandon()
            if number < at <= number + 3:
                assert here.found() <= {here.before, NEW, OTHER}, call
            return MADE

        run = here.stop_at_calls(commit_earlier)
        if number >= len(run.calls):
            return
        where = f"at call {number} of {run.calls}"
        assert run.error is None or isinstance(run.error, CheckpointError), where
        assert run.error is None or not failed, f"{where}: both have failed"
        assert here.found() <= {NEW, OTHER}, where
        assert run.error is not None or not failed or here.found() == {NEW}, where
        earlier.clear()
        here.check_next_save(where)


STEPS = ("begin", "write", "commit")
REMOVALS = {
    f"unlink target/{name}" for name in ("model.safetensors", "model.safetensors.index.json")
}
REMOVALS |= {call.replace("unlink target/", "remove ") for call in REMOVALS}


def orders(*ends: str) -> list[tuple[tuple[int, str], ...]]:
    """All orders of the steps of two saves, which end so."""
    own = [[(at, step) for step in ("begin", "write", end)] for at, end in enumerate(ends)]
    places = itertools.combinations(range(6), 3)
    return [
        tuple(own[0][chosen.index(n)] if n in chosen else own[1][rest.index(n)] for n in range(6))
        for chosen in places
        for rest in [[n for n in range(6) if n not in chosen]]
    ]


@each_place
@pytest.mark.parametrize("ends", [("commit", "commit"), ("commit", "abandon")], ids="-".join)
def test_two_saves_in_any_order_leave_the_content_of_one_of_them(
    place: Place, ends: tuple[str, str], scene: Callable[[Place], Scene], full: bool
) -> None:
    for order in orders(*ends)[:: 1 if full else 2]:
        here = scene(place)
        savings = [place.make(here.target, version) for version in (NEW, OTHER)]
        committed: set[int | None] = {here.before}
        failed: set[int] = set()
        for at, step in order:
            if at in failed:
                continue
            try:
                go_on(savings[at], step)
            except CheckpointError:
                failed.add(at)
                savings[at].abandon()
            else:
                committed = {(NEW, OTHER)[at]} if step == place.appears_when else committed
            if place.appears_when == "commit":
                assert here.found() == committed, f"{order} at {step} of {at}"
            assert here.found() <= {here.before, NEW, OTHER}
        assert here.found() != {here.before} or len(failed) == 2, order
        del savings
        here.check_next_save(order)


@each_place
def test_a_save_that_is_abandoned_leaves_nothing(
    place: Place, scene: Callable[[Place], Scene]
) -> None:
    for count in range(1, 3):
        here = scene(place)
        saving = place.make(here.target, NEW)
        go_on(saving, *STEPS[:count])
        saving.abandon()
        if place.appears_when not in STEPS[:count]:
            assert here.found() == {here.before}
            assert place.keeps or here.names() == here.names_before
        here.check_next_save(count)


@each_place
def test_what_has_the_name_of_the_target_is_not_replaced_by_something_of_another_kind(
    place: Place, scene: Callable[[Place], Scene]
) -> None:
    here = scene(place)
    target = here.run / "taken"
    is_file = bool(place.make(here.target, NEW).names() - {""})
    if place.on_store:
        pytest.skip("a store has files and folders of one name")
    mine = target if is_file else target / "mine"
    mine.parent.create_directories()
    mine.write(b"mine", sync=False)
    names = here.names()
    with pytest.raises(CheckpointError):
        save(place.make(target, NEW))
    assert mine.read() == b"mine"
    assert here.names() == names


@pytest.mark.parametrize(
    "place", [place for place in PLACES if "may_replace" in place.options], ids=str
)
def test_a_save_that_must_not_replace_leaves_what_was_committed_before_it_began_or_since(
    place: Place, scene: Callable[[Place], Scene]
) -> None:
    here = scene(place)
    if place.before is not None:
        with pytest.raises(AlreadyExistsError):
            save(place.make(here.target, NEW, may_replace=False))
        assert here.found() == {OLD}
        assert here.names() == here.names_before
        return
    for at, step in enumerate(STEPS):
        here = scene(place)
        saving = place.make(here.target, NEW, may_replace=False)
        go_on(saving, *STEPS[:at])
        save(place.make(here.target, OTHER))
        names = here.names()
        with pytest.raises(CheckpointError):
            go_on(saving, *STEPS[at:])
        saving.abandon()
        assert here.found() == {OTHER}, step
        assert here.names() <= names, step
        here.check_next_save(step)
    check_earlier_save_stays(scene(place), AlreadyExistsError, may_replace=False)


def check_earlier_save_stays(here: Scene, error: type[CheckpointError], **options: bool) -> None:
    """A save that began earlier, and so does not end the other one, is not replaced by it."""
    earlier = here.place.make(here.target, OTHER)
    saving = here.place.make(here.target, NEW, **options)
    go_on(earlier, "begin")
    go_on(saving, "begin", "write")
    go_on(earlier, "write", "commit")
    with pytest.raises(error):
        saving.commit()
    saving.abandon()
    assert here.found() == {OTHER}
    here.check_next_save("after both")


def test_a_first_model_yields_to_one_that_appears_between_its_check_and_its_commit(
    scene: Callable[[Place], Scene],
) -> None:
    place = next(place for place in PLACES if place.name == "first model on a store")
    for begins_earlier in (True, False):
        here = scene(place)
        other = place.make(here.target, OTHER)
        if begins_earlier:
            go_on(other, "begin")
        saving = place.make(here.target, NEW, may_replace=False)
        go_on(saving, "begin", "write")
        assert isinstance(saving, Model)
        saving.transaction.check(saving.transaction.files)
        go_on(other, *(() if begins_earlier else ("begin",)), "write", "commit")
        with pytest.raises(AlreadyExistsError):
            saving.transaction.commit(_layout(1))
        saving.abandon()
        assert here.found() == {OTHER}
        here.check_next_save("after both")


@pytest.mark.parametrize(
    "place", [place for place in PLACES if "supersedes" in place.options], ids=str
)
def test_a_save_that_must_not_supersede_leaves_what_was_committed_since_it_began(
    place: Place, scene: Callable[[Place], Scene]
) -> None:
    here = scene(place)
    save(place.make(here.target, NEW, supersedes=False))
    assert here.found() == {NEW}
    for count in (1, 2):
        here = scene(place)
        saving = place.make(here.target, NEW, supersedes=False)
        go_on(saving, *STEPS[:count])
        save(place.make(here.target, OTHER))
        with pytest.raises(CheckpointError):
            go_on(saving, *STEPS[count:])
        saving.abandon()
        assert here.found() == {OTHER}, count
        here.check_next_save(count)
    check_earlier_save_stays(scene(place), CheckpointError, supersedes=False)


@pytest.mark.parametrize("place", [place for place in PLACES if not place.on_store], ids=str)
def test_a_power_cut_at_any_instant_leaves_the_old_content_or_the_new_one(
    place: Place, scene: Callable[[Place], Scene], recorder: Any
) -> None:
    here = scene(place)
    initial = files_below(here.folder)
    recording = recorder.RecordingFileSystem(initial, str(here.folder))
    register("recorded", recording)
    save(place.make(Location(f"recorded://{here.target}"), NEW))
    cuts = recorder.PowerCuts(recording, 60, 20, 7)
    seen: set[frozenset[tuple[str, bytes]]] = set()
    for instant in range(cuts.last_instant + 1):
        for tree in cuts.trees_after(instant):
            is_end = instant == cuts.last_instant
            if is_end or frozenset(tree.items()) not in seen:
                seen.add(frozenset(tree.items()))
                shutil.rmtree(here.folder)
                here.run.create_directories()
                for path, contents in tree.items():
                    Path(path).parent.mkdir(parents=True, exist_ok=True)
                    Path(path).write_bytes(contents)
                where = f"{cuts.change_before(instant)}: {sorted(tree)}"
                PROCESS.temporaries.clear()
                remove_abandoned(here.run, "target")  # The first thing that the next save does.
                assert here.found() <= ({NEW} if is_end else {here.before, NEW}), where


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
