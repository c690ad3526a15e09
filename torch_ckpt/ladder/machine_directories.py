"""MachineDirectories: the steps of a run on the local disks of several machines.

Each machine stores ``.metadata``, the index and the data files of its ranks. A step is whole if all
data files that the index names exist on some machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_ckpt.commits.small_files import SMALL_FILES
from torch_ckpt.commits.terms import Term, term_of
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

__all__ = ["MachineDirectories", "Part", "part_in", "parts_in", "whole_steps"]


@dataclass(frozen=True)
class Part:
    """The part of a step on one machine: its save and term, and which of its data files exist."""

    save_id: str
    term: int
    files: frozenset[str]
    present: frozenset[str]


class MachineDirectories(StepDirectories):
    """The steps of a run in directories of the same path on several machines.

    :meth:`report` and :meth:`reader_of` are called on all ranks, and every other method on the
    coordinator, or on one rank of a machine for its own directory.
    """

    def __init__(
        self, directory: Location, places: Places, *, reader: dict[str, Any] | None = None
    ) -> None:
        super().__init__(directory, reader=reader)
        self._places = places
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

    def steps(
        self, reports: Sequence[Mapping[int, Part] | None] = (), lineage: Term | None = None
    ) -> Iterator[int]:
        """Yields the steps that are whole on all machines together, the newest first."""
        yield from whole_steps(reports)

    def check_by(self, reports: Sequence[Any]) -> Callable[[Location], None]:
        """Returns a function that raises if a step is not whole on all machines together."""
        whole = {self.path(step) for step in whole_steps(reports)}

        def check(path: Location) -> None:
            self.check(path)
            if path not in whole:
                raise CorruptionError(f"the machines do not have all files of {path}")

        return check

    def damaged(self, reports: Sequence[Any] = ()) -> list[int]:
        """Returns the steps that a machine has committed and that are not whole on all together."""
        committed = set(super().damaged()).union(*filter(None, reports))
        return sorted(committed.difference(whole_steps(reports)), reverse=True)

    def term_of(self, step: int, reports: Sequence[Mapping[int, Part] | None] = ()) -> int:
        """Returns the term in which a step was saved; 0 if it has none."""
        terms = [each[step].term for each in reports if each and step in each]
        return max(terms) if terms else super().term_of(step)  # Equal on all machines.

    def reader_of(self, step: int, group: Group, timeout_s: float) -> FastReader:
        """Returns a reader through which machines exchange missing files. Called on all ranks."""
        self._spread(step, group, timeout_s)
        return MachineReader(self.path(step).checkpoint_id, **self._reader)

    def _spread(self, step: int, group: Group, timeout_s: float) -> None:
        """Writes metadata, index and small files to machines that lack them, such as new ones."""
        path = self.path(step)

        def has_step() -> bool:
            return not self._places.is_first or (path / ".metadata").is_file()

        def find_source(answers: list[bool]) -> int | None:
            firsts = set(self._places.of_ranks)
            return None if all(answers) else min(r for r in firsts if answers[r])

        what = "spreading the metadata of a step"
        source = group.decide(what, has_step, find_source, timeout_s=timeout_s)
        if source is None:
            return

        def read() -> list[tuple[str, bytes]]:
            if group.rank != source:
                return []
            small = sorted(SMALL_FILES.intersection(path.names()))
            names = [*small, index_name(part_in(path).save_id), ".metadata"]
            return [(name, (path / name).read()) for name in names]

        files = group.decide(what, read, lambda each: next(filter(None, each)), timeout_s=timeout_s)

        def write() -> None:
            if has_step():
                return
            path.create_directories()
            for name, contents in files:
                (path / name).replace(contents, sync=False)

        group.decide(what, write, lambda _: None, timeout_s=timeout_s)


def parts_in(directory: Location) -> dict[int, Part]:
    """Returns a machine's part of each step in its local directory."""
    found: dict[int, Part] = {}
    for step in committed_steps(directory):
        with contextlib.suppress(CheckpointError):  # Damaged here.
            found[step] = part_in(directory / f"step-{step}")
    return found


def whole_steps(reports: Sequence[Mapping[int, Part] | None]) -> list[int]:
    """Returns the steps that are whole on all machines together, the newest first."""
    machines, whole = [report for report in reports if report is not None], []
    for step in sorted(set().union(*machines), reverse=True):
        parts = [machine[step] for machine in machines if step in machine]
        present = frozenset().union(*(part.present for part in parts))
        if len({part.save_id for part in parts}) == 1 and parts[0].files == present:
            whole.append(step)
    return whole


def part_in(path: Location) -> Part:
    """Returns a machine's part of a step.

    Raises CheckpointError if its metadata is damaged, and StorageError if it cannot be read.
    """
    _, index = open_committed(path, "")
    if index is None:
        raise NotFoundError(f"the checkpoint in {path} has no index")
    files = frozenset(name for name, _ in index.files)
    return Part(index.save_id, term_of(path), files, files_in(path, index.files))
