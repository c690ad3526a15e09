"""MachineDirectories: the steps of a run on the local disks of several machines.

Each machine stores ``.metadata``, the index and the data files of its ranks. A save of a step is
whole if all data files that its index names exist on some machine that has a part of this save.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from traceback import StackSummary
from typing import Any, NamedTuple

from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.commits.small_files import SMALL_FILES, write_small_files
from torch_ckpt.commits.terms import Term, newest_term, term_of
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import CheckpointError, CorruptionError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import files_in, index_name, open_committed
from torch_ckpt.ladder.places import Places
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.ladder.step_files import committed_steps
from torch_ckpt.storage.machine_reader import MachineReader
from torch_ckpt.storage.machine_writer import MachineWriter
from torch_ckpt.storage.reader import FastReader
from torch_ckpt.storage.verify import check_here
from torch_ckpt.storage.writer import FastWriter

__all__ = ["MachineDirectories", "Part", "WholeSave", "part_in", "parts_in", "whole_saves"]

_SPREADING = "spreading the metadata of a step"

_Files = tuple[dict[str, bytes], bytes, bytes, float | None]
"""Contents of the small files of a step, its index and metadata, and the time of the latter."""


@dataclass(frozen=True)
class Part:
    """The part of a step on one machine: its save and term, and which of its data files exist."""

    save_id: str
    term: int
    files: frozenset[str]
    present: frozenset[str]


class WholeSave(NamedTuple):
    """A save of a step that is whole on all machines together.

    ``ranks`` are the first ranks of the machines that have a part of it.
    """

    save_id: str
    term: int
    ranks: tuple[int, ...]


class MachineDirectories(StepDirectories):
    """The steps of a run in directories of the same path on several machines.

    A machine that was away may have the part of an older save. Of several whole saves of a step,
    those on the lineage of the newest term of ``run`` count, and then that of the latest term.

    :meth:`report`, :meth:`spread` and :meth:`reader_of` are called on all ranks, and every other
    method on the coordinator, or on one rank of a machine for its own directory.
    """

    def __init__(
        self,
        directory: Location,
        places: Places,
        run: Location,
        *,
        reader: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(directory, reader=reader)
        self._places, self._run = places, run
        self.check = self.check_whole = check_here

    def writer(self, options: Mapping[str, Any]) -> FastWriter:
        is_first = self._places.is_first
        return MachineWriter(self.directory.checkpoint_id, is_first=is_first, **options)

    def has_whole(self, step: int) -> bool:
        """Returns ``False``: this machine has only the files of its ranks."""
        return False

    def report(self) -> Any:
        """Returns this machine's part of each step on its first rank; ``None`` on other ranks."""
        return parts_in(self.directory) if self._places.is_first else None

    def whole(
        self, reports: Sequence[Mapping[int, Part] | None], lineage: Term | None = None
    ) -> dict[int, WholeSave]:
        """Returns the steps that are whole on all machines together, the newest first."""
        return whole_saves(reports, lambda: lineage or newest_term(self._run))

    def steps(
        self, reports: Sequence[Mapping[int, Part] | None] = (), lineage: Term | None = None
    ) -> Iterator[int]:
        """Yields the steps that are whole on all machines together, the newest first."""
        yield from self.whole(reports, lineage)

    def check_by(self, reports: Sequence[Any]) -> Callable[[Location], None]:
        """Returns a function that raises if a step is not whole on all machines together.

        It also raises if the coordinator has no part of the whole save: its directory then has
        other metrics and another time of the step.
        """
        whole = {self.path(step) for step, save in self.whole(reports).items() if 0 in save.ranks}

        def check(path: Location) -> None:
            self.check(path)
            if path not in whole:
                raise CorruptionError(_not_whole(path))

        return check

    def damaged(self, reports: Sequence[Any] = ()) -> list[int]:
        """Returns the steps that a machine has committed and that are not whole on all together."""
        committed = set(super().damaged()).union(*filter(None, reports))
        return sorted(committed.difference(self.whole(reports)), reverse=True)

    def term_of(self, step: int, reports: Sequence[Mapping[int, Part] | None] = ()) -> int:
        """Returns the term in which a step was saved; 0 if it has none."""
        of_step = [{step: each[step]} if each and step in each else None for each in reports]
        whole = self.whole(of_step).get(step)
        return super().term_of(step) if whole is None else whole.term

    def reader_of(self, step: int, group: Group, timeout_s: float) -> FastReader:
        """Returns a reader through which machines exchange missing files. Called on all ranks.

        Raises CheckpointException if the step is no longer whole.
        """
        path, own = self.path(step), dict[int, Part]()

        def report() -> dict[int, Part] | None:
            with contextlib.suppress(CorruptionError, NotFoundError):
                own.update({step: part_in(path)} if self._places.is_first else {})
            return own if self._places.is_first else None

        def choose(reports: list[Mapping[int, Part] | None]) -> WholeSave | None:
            save = self.whole(reports).get(step)
            if save is None:
                raise CorruptionError(_not_whole(path))
            return None if len(save.ranks) > self._places.others else save

        try:
            save = group.decide(_SPREADING, report, choose, timeout_s=timeout_s)
            if save is not None:
                self.spread(step, save, own, group, timeout_s)
        except (CorruptionError, NotFoundError) as error:  # On all ranks.
            failures: dict[int, tuple[BaseException, StackSummary]] = {0: (error, StackSummary())}
            raise CheckpointException(str(error), failures) from error
        return MachineReader(path.checkpoint_id, **self._reader)

    def incomplete(
        self, reports: Sequence[Mapping[int, Part] | None], whole: Mapping[int, WholeSave]
    ) -> list[int]:
        """Returns the whole steps to :meth:`spread` when a run begins.

        The coordinator, which chooses steps from its own directory, has no part of them, or a
        machine has that of an older save. Parts of later saves remain, and so do those of steps
        that the run has left.
        """
        found = []
        for step, save in whole.items():
            parts = (each[step] for each in reports if each and step in each)
            others = [part for part in parts if part.save_id != save.save_id]
            if (others or 0 not in save.ranks) and all(p.term <= save.term for p in others):
                found.append(step)
        newest = newest_term(self._run) if found else Term()
        return [step for step in found if newest.has(step, whole[step].term)]

    def spread(
        self, step: int, save: WholeSave, own: Mapping[int, Part], group: Group, timeout_s: float
    ) -> None:
        """Writes the small files, the index and the metadata of a whole save on all machines.

        Machines that have a part of the save keep it. ``own`` are the parts of this machine. Called
        on all ranks. Raises CheckpointError on all ranks if a machine cannot read or write them.
        """
        path, source = self.path(step), save.ranks[0]

        def read() -> _Files | None:
            if group.rank != source:
                return None
            metadata, index = path / ".metadata", path / index_name(save.save_id)
            names = SMALL_FILES.intersection(path.names())
            small = {name: (path / name).read() for name in names}
            return small, index.read(), metadata.read(), metadata.modified_s()

        def write() -> None:
            if self._places.is_first and group.rank not in save.ranks:
                assert files is not None
                self._write_part(step, save.save_id, own.get(step), files)

        files = group.decide(_SPREADING, read, lambda each: each[source], timeout_s=timeout_s)
        group.decide(_SPREADING, write, lambda _: None, timeout_s=timeout_s)

    def _write_part(self, step: int, save_id: str, seen: Part | None, files: _Files) -> None:
        """Replaces the part of this machine, which was ``seen``, by one without data files."""
        (small, index, metadata, saved_s), path, found = files, self.path(step), None
        path.create_directories()
        (path / index_name(save_id)).replace(index, sync=False)
        with contextlib.suppress(CorruptionError, NotFoundError):
            found = part_in(path)
        if found is not None and found.save_id == save_id:
            return
        if found is not None and (seen is None or found.save_id != seen.save_id):
            raise NotFoundError(f"another save has replaced {path}")
        write_small_files(path, small, sync=False)
        (path / ".metadata").replace(metadata, sync=False)
        if saved_s is not None and path.local_path is not None:  # The time of the step.
            with contextlib.suppress(OSError):
                os.utime(path.local_path / ".metadata", (saved_s, saved_s))


def parts_in(directory: Location) -> dict[int, Part]:
    """Returns a machine's part of each step in its local directory."""
    found: dict[int, Part] = {}
    for step in committed_steps(directory):
        with contextlib.suppress(CheckpointError):  # Damaged here.
            found[step] = part_in(directory / f"step-{step}")
    return found


def whole_saves(
    reports: Sequence[Mapping[int, Part] | None], lineage: Callable[[], Term]
) -> dict[int, WholeSave]:
    """Returns the save that counts of each step that is whole on all machines together.

    The newest step is the first. ``reports`` are those of all ranks. ``lineage`` returns the newest
    term. It is called only if several saves of a step are whole.
    """
    parts: dict[int, dict[str, dict[int, Part]]] = {}
    for rank, report in enumerate(reports):
        for step, part in (report or {}).items():
            parts.setdefault(step, {}).setdefault(part.save_id, {})[rank] = part
    found = {}
    for step in sorted(parts, reverse=True):
        whole = []
        for save_id, by_rank in parts[step].items():
            part = next(iter(by_rank.values()))
            if part.files == frozenset().union(*(each.present for each in by_rank.values())):
                whole.append(WholeSave(save_id, part.term, tuple(by_rank)))
        if len(whole) > 1:  # With equal terms, that of the lowest rank: it commits first.
            newest = lineage()
            whole.sort(key=lambda save: (not newest.has(step, save.term), -save.term))
        if whole:
            found[step] = whole[0]
    return found


def _not_whole(path: Location) -> str:
    return f"the machines do not have all files of {path}"


def part_in(path: Location) -> Part:
    """Returns a machine's part of a step.

    Raises CheckpointError if its metadata is damaged, and StorageError if it cannot be read.
    """
    _, index = open_committed(path, "")
    if index is None:
        raise NotFoundError(f"the checkpoint in {path} has no index")
    files = frozenset(name for name, _ in index.files)
    return Part(index.save_id, term_of(path), files, files_in(path, index.files))
