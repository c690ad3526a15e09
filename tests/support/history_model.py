"""The model of :mod:`support.histories`: which saves are of a lineage, and which may be removed."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import torch_ckpt
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import index_name, open_committed
from torch_ckpt.ladder.promotion import Promotion

Seen = dict["Place", dict[int, "Save"]]


@dataclass(eq=False)
class Term:
    """A term: the number, and the term and the newest step of it from which it goes on."""

    number: int
    former: Term | None = None
    at: int = 0
    saved: int = 0  # The newest step that has returned.
    path: Path | None = None  # Of the run when it began.


@dataclass(eq=False)
class Save:
    """An attempt of a job to save a step. ``files`` are known once it was seen."""

    number: int
    step: int
    job: int
    loss: float
    world: World
    term: Term | None = None
    has_returned: bool = False  # And was in the first place of its job then.
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int]:
        return self.step, self.number

    def __repr__(self) -> str:
        term = "" if self.term is None else f" of term {self.term.number}"
        return f"<step {self.step}, save {self.number} of job {self.job}{term}>"


@dataclass(eq=False)
class Place:
    """A directory: that of a run, or a local one."""

    path: Path
    name: str
    world: World | None = None
    damaged: set[int] = field(default_factory=set)
    had: set[Save] = field(default_factory=set)  # Whole saves, at any time.
    without_metadata: set[int] = field(default_factory=set)
    aged: set[Save] = field(default_factory=set)  # Older than each ``keep_for``.

    def __repr__(self) -> str:
        return self.name


@dataclass(eq=False)
class World:
    """A run: its directory and its terms, the oldest first."""

    place: Place
    terms: list[Term] = field(default_factory=list)

    def __repr__(self) -> str:
        return self.place.name

    def has(self, save: Save) -> bool:
        """Whether a save is of the lineage of the newest term."""
        return bool(self.terms) and save.term is not None and goes_on_from(self.terms[-1], save)

    def newest(self, seen: Seen, places: Sequence[Place]) -> Save | None:
        """The newest whole save of the lineage in some places."""
        found = [save for place in places for save in seen[place].values() if self.has(save)]
        return max(found, key=lambda save: save.key, default=None)


def replaced_by_older(seen: Seen, workers: Sequence[Job]) -> str | None:
    """Which save that has returned a job of an older term has replaced."""
    for job in workers:
        for save in (each for each in job.saves if each.has_returned):
            now = seen[job.places[0]].get(save.step)
            if now is not None and _number(now.term) < _number(save.term):
                return f"{save} has returned, and {job.places[0]} has {now}"
    return None


IS_LOOKED_AT = False
"""Whether a run looks whether a step that it has promoted is still whole there."""


def is_known(run: Place, save: Save) -> bool:
    """Whether a save counts in the directory of a run, since it was there."""
    return not IS_LOOKED_AT and save in run.had


def _number(term: Term | None) -> int:
    return 0 if term is None else term.number


def goes_on_from(term: Term | None, save: Save) -> bool:
    """Whether a term goes on from a save, or has it."""
    limit = float("inf")
    while term is not None:
        if save.term is term:
            return save.step <= limit
        limit, term = min(limit, term.at), term.former
    return False


class Job:
    """A job, and what it must know."""

    def __init__(
        self,
        number: int,
        machine: str,
        world: World,
        local: Place | None,
        kind: str,
        options: dict[str, Any],
    ) -> None:
        self.number, self.machine, self.world = number, machine, world
        self.local, self.kind, self.options = local, kind, options
        self.run: Any = None
        self.at: int | None = None
        self.term: Term | None = None
        self.taken: list[Term] = []  # Those with a file, also if it has failed thereafter.
        self.restores: dict[int, Save] = {}
        self.seen: int | None = None  # How many terms there were when it restored.
        self.saves: list[Save] = []  # Within the operation.
        self.discarded: list[int] = []
        self.former: tuple[Term | None, int] | None = None  # Of the term that it is about to take.
        self.detail = ""
        self.is_excused = False  # Whether it may report an earlier failure.
        self.was_superseded = self.was_disturbed = self.lacks_steps = False

    def __repr__(self) -> str:
        local = "" if self.local is None else f", local {self.local}"
        return f"job {self.number} ({self.kind} on {self.machine}{local}, {self.world})"

    @property
    def places(self) -> list[Place]:
        return [*([] if self.local is None else [self.local]), self.world.place]

    @property
    def promotion(self) -> Any:
        found = None if self.run is None else self.run._promotion
        return found if isinstance(found, Promotion) else None

    @property
    def is_superseded(self) -> bool:
        if self.term is None:  # It was, if another one has begun since it restored.
            return self.seen is not None and self.seen < len(self.world.terms)
        return self.world.terms[-1] not in (self.term, *self.taken)

    def begin_operation(self) -> None:
        self.detail, self.saves, self.discarded = "", [], []
        self.was_superseded = self.is_superseded
        self.was_disturbed = self.lacks_steps = False

    def restored(self, save: Save) -> None:
        self.at, self.seen = save.step, len(self.world.terms)
        # Another job may have begun its term after the step was chosen.
        self.is_excused |= self.was_disturbed
        self.restores[save.step] = save

    def discards(self, step: int) -> None:
        self.discarded.append(step)
        if self.term is not None:
            self.term.saved = min(self.term.saved, step)

    def saving(self, save: Save) -> None:
        """Begins to save, perhaps in a new term."""
        self.saves.append(save)
        at = max((step for step in self.restores if step <= save.step), default=None)
        if at is not None:
            self.former = self.restores[at].term, at
        else:  # It goes on from its own term, or else from the newest job.
            self.former = self.term, save.step - 1

    def saved(self, save: Save) -> str | None:
        """Ends to save; returns what is wrong."""
        term = self.term
        if term is None:
            return f"{self} has saved {save}, and taken no term"
        if save.step < term.saved:
            return f"{save} is older than step {term.saved} of the same term"
        term.saved = save.step
        return None

    def took(self, number: int) -> None:
        """Has written the file of a term; that is its own unless it has failed thereafter."""
        former, at = self.former or (None, 0)
        if former is None:
            older = [term for term in self.world.terms if term.number < number]
            former = older[-1] if older else None
        term = Term(number, former, at, path=self.world.place.path)
        self.taken.append(term)
        self.world.terms.append(term)
        self.world.terms.sort(key=lambda term: term.number)
        for save in self.saves:
            save.term = term

    def adopt_term(self) -> None:
        """Learns the term in which the job is. It may have failed to take one that has a file."""
        number = 0 if self.run is None else self.run._saves.lineage.term.number
        if number != _number(self.term):
            self.term = next(term for term in self.world.terms if term.number == number)
            self.restores.clear()
        for save in self.saves:
            save.term = save.term or self.term

    def requires(self, saves: Sequence[Save]) -> set[Save]:
        """Which saves of a lineage the options of the job retain."""
        keep, best = self.options.get("keep_last"), self.options.get("keep_best")
        ordered = sorted(saves, key=lambda save: save.key, reverse=True)
        has_age = "keep_for" in self.options
        if keep is None and best is None and not has_age:
            return set(ordered)
        every = self.options.get("keep_every")
        required = set(ordered[: keep or 1])
        required |= {save for save in ordered if every is not None and save.step % every == 0}
        if has_age:
            required |= set(ordered) - self.world.place.aged
        if best is not None:
            required |= set(sorted(ordered, key=lambda s: (s.loss, s.step))[:best])
        return required


class Disks:
    """What is in all directories. ``saves`` has each attempt to save by its number."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.saves: dict[int, Save] = {}
        self._known: dict[bytes, Save] = {}  # By metadata.

    def place(self, path: Path, name: str, world: World | None = None) -> Place:
        found = [place for place in self.places if place.path == path]
        if not found:
            self.places.append(Place(path, name, world))
        return (found or self.places[-1:])[0]

    def forget(self, place: Place) -> None:
        self.places.remove(place)

    def copy_world(self, world: World, path: Path) -> World:
        """A copy of a run, as ``cp -r`` makes it: its saves are those of the copied one."""
        copied = World(self.place(path, "copy"), list(world.terms))
        copied.place.without_metadata |= world.place.without_metadata
        copied.place.aged |= world.place.aged
        return copied

    def damaged(self, place: Place, step: int, *, lost_metadata: bool) -> None:
        place.damaged.add(step)
        if lost_metadata:
            place.without_metadata.add(step)

    def observe_terms(self, job: Job) -> None:
        """Notices a term that a job has taken since the last look."""
        try:
            names = os.listdir(job.world.place.path)
        except FileNotFoundError:
            return
        known = job.world.terms[-1].number if job.world.terms else 0
        for number in sorted(int(name[5:]) for name in names if re.fullmatch(r"term-\d+", name)):
            if number > known:
                job.took(number)
        job.adopt_term()

    def seen(self) -> Seen:
        """The whole saves in each place."""
        return {place: self._seen_in(place) for place in self.places}

    def _seen_in(self, place: Place) -> dict[int, Save]:
        found = {}
        if place.path.is_dir():
            for folder in place.path.glob("step-*"):
                if (save := self._save_in(folder)) is not None:
                    found[int(folder.name[5:])] = save
        place.had.update(found.values())
        return found

    def _save_in(self, folder: Path) -> Save | None:
        """The save that is whole in the directory of a step."""
        try:
            metadata = (folder / ".metadata").read_bytes()
        except OSError:
            return None
        key = hashlib.sha256(metadata).digest()
        save = self._known.get(key)
        if save is None:
            save = self._known[key] = self._learned(folder)
        for name, digest in save.files.items():
            try:
                if hashlib.sha256((folder / name).read_bytes()).digest() != digest:
                    return None
            except OSError:
                return None
        return save

    def _learned(self, folder: Path) -> Save:
        """A save that appears for the first time, and must be whole."""
        state = {"w": torch.zeros(40, dtype=torch.float64), "number": -1}
        torch_ckpt.load(state, checkpoint_id=folder)
        save = self.saves[int(state["number"])]
        _, index = open_committed(Location(folder), "")
        assert index is not None
        names = [index_name(index.save_id), *(name for name, _ in index.files)]
        save.files = {n: hashlib.sha256((folder / n).read_bytes()).digest() for n in names}
        assert f"step-{save.step}" == folder.name, f"{folder} has {save}"
        return save

    def lost(self, before: Seen, after: Seen, workers: Sequence[Job]) -> str | None:
        """What is not in its place any more, against the rules."""
        for place, steps in before.items():
            for step, save in steps.items():
                if place not in after or after[place].get(step) is save:
                    continue
                may = (self._may_remove(j, place, save, before, after, workers) for j in workers)
                if not any(may):
                    now = after[place].get(step)
                    return f"{save} is not in {place} any more, which has {now}"
        return None

    def _may_remove(
        self,
        job: Job,
        place: Place,
        save: Save,
        before: Seen,
        after: Seen,
        workers: Sequence[Job],
    ) -> bool:
        if job.detail.endswith(("data", "metadata")) and f" {place} {save.step} " in job.detail:
            return True
        if place not in job.places:
            return False
        now = after[place].get(save.step)
        if now is not None and job.world.has(now) and not job.world.has(save):
            return True  # A step of the lineage replaces one that the run has left.
        run = job.world.place
        if place is not run and (after[run].get(save.step) is save or is_known(run, save)):
            return True
        other = before[run].get(save.step)
        if place is not run and other is not None and other is not save:
            return True  # The run has another save of the step, which a promotion does not replace.
        if job.was_superseded:  # It may remove what is of no later job.
            return place is not run and _number(save.term) <= _number(job.term)
        if any(save.step > step for step in job.discarded):
            return True
        if now is not None:
            return _number(now.term) >= _number(save.term)
        if not job.world.has(save):
            return True
        places = [run] if place is run else job.places
        found = {s for seen in (before, after) for p in places for s in seen[p].values()}
        found.update(each for worker in workers for each in worker.saves)
        # A later job may have begun while it was removed.
        for term in {job.term, job.world.terms[-1]}:
            lineage = [each for each in found if goes_on_from(term, each)]
            if save not in job.requires(lineage):
                return True
        return False


def allowed_names(place: Place, step: int) -> list[str]:
    """The names in a place that should not be there, after a save with ``keep_last=1``."""
    expected = re.compile(rf"step-{step}|run-id|local-of|term-\d+|events.*")
    kept = {f"step-{each}" for each in place.without_metadata}
    names = [name for name in os.listdir(place.path) if not expected.fullmatch(name)]
    inner = re.compile(r"\.metadata|__0_\d+_\w+\.distcp|.*index.*|branch\.json|metrics\.json")
    for name in os.listdir(place.path / f"step-{step}"):
        if not inner.fullmatch(name):
            names.append(f"step-{step}/{name}")
    return [name for name in names if name not in kept]
