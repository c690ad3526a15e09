"""Kills ranks while they save and asks each time: is it exactly the old checkpoint, or the new one?

``PYTHONPATH=tests python tests/dist/kills.py --kills 200 --seed 7`` prints how often each moment
was hit and what was found then, and ends with 1 if a single answer was neither. Half the moments
are drawn at random and killed from outside; half are system calls of the engine, before which a
rank is stopped (`syscalls`).

Ranks are forked from a server that has imported torch, so that a kill costs well under a second.
"""

from __future__ import annotations

import argparse
import itertools
import pickle
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from forks import Forks
from killed_saves import (
    BASED_MOMENTS,
    MOMENTS,
    WRITERS,
    Case,
    KilledSave,
    draw_case,
    draw_frozen_case,
)
from states import READERS, assert_same
from support.commit_files import index_file
from syscalls import can_stop
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt import FastWriter


class Campaign:
    """Kills saves in one directory after another. Owned by one thread; prints nothing.

    Every directory sees several saves, so that most of them replace a checkpoint, and some find
    what one or more killed ones have left behind.
    """

    moments = MOMENTS

    def __init__(
        self, directory: Path, seed: int, *, writer: str = "fast", victims: str = "any"
    ) -> None:
        self.directory = directory
        self.seed = seed
        self.writer = writer
        self.victims = victims
        self.tally: Counter[tuple[str, str]] = Counter()
        self.breaches: list[str] = []
        self._forks = Forks()
        self._usual_s = 0.1  # What a save takes.
        self._path = directory / "first"
        self._held: tuple[int, Case] | None = None  # What is committed there.

    def run(self, kills: int, moments: Sequence[str] | None = None) -> None:
        """Kills so often, at the given moments or at all kinds of them."""
        rng = random.Random(self.seed)
        deck = self._deck(rng) if moments is None else itertools.cycle(moments)
        for number in range(kills):
            case = draw_case(rng, next(deck), self.victims)
            if rng.random() < 0.15 or case.moment == "create folder":
                self._path, self._held = self.directory / f"{number}", None
            save_after, by_ranks = rng.random() < 0.7, rng.random() < 0.3
            try:
                self._prepare(case)
                self._kill_once(case)
                if save_after:
                    self._save(case, by_ranks=by_ranks)
            except AssertionError as error:
                self.breaches.append(f"kill {number} of seed {self.seed}, {case}: {error}")
                self._path, self._held = self.directory / f"{number}-anew", None

    def report(self) -> str:
        """The tally as a table, and the breaches."""
        outcomes = ["nothing", "old", "new"]
        rows = [f"{'killed before':<26}" + "".join(f"{name:>9}" for name in outcomes)]
        others = (where for where, _ in sorted(self.tally) if where not in BASED_MOMENTS)
        order = [*BASED_MOMENTS, *others]
        for where in dict.fromkeys(order):
            counts = [self.tally[where, outcome] for outcome in outcomes]
            if any(counts):
                rows.append(f"{where:<26}" + "".join(f"{count:>9}" for count in counts))
        rows.append(f"{self.tally.total()} kills, seed {self.seed}, {len(self.breaches)} breaches")
        return "\n".join(rows + self.breaches)

    def _deck(self, rng: random.Random) -> Iterator[str | None]:
        """Each moment as often as any other, in random order, and as many kills at random."""
        moments = self.moments if can_stop() else []
        while True:
            cards = [*moments, *[None] * max(len(moments), 1)]
            rng.shuffle(cards)
            yield from cards

    def _base_path(self) -> Path | None:
        """The directory of the checkpoint from which saves take what has not changed."""
        return None

    def _prepare(self, case: Case) -> None:
        """Sees to it that there is something to replace or remove, where that is the moment."""
        if case.moment is None or not case.moment.startswith(("remove", "rename")):
            return
        if self._held is None:
            self._save(case, by_ranks=False)
        (self._path / ".metadata.0123456789abcdef.tmp").write_bytes(b"of a save that was killed")
        (self._path / ".index.0123456789abcdef").write_bytes(b"of a save that was killed")

    def _kill_once(self, case: Case) -> None:
        version = self._forks.next_number()
        base = self._base_path()
        with KilledSave(self._forks, case, self._path, version, self.writer, base) as save:
            seen = save.run(kill=True, usual_s=self._usual_s)
        candidates = dict(filter(None, [self._held, (version, case)]))
        found = self._forks.call(_find, self._path, candidates)
        old = None if self._held is None else self._held[0]
        allowed = {old, version}
        if seen.commit_done or "returned" in seen.outcome.values():
            allowed = {version}
        elif seen.commit_begun is False:
            allowed = {old}
        if None in found.values():
            assert not self._path.exists(), f"{seen} left a directory without a checkpoint"
        what = f"{seen} found {found}, not one of {allowed} (old: {old}, new: {version})"
        assert len(set(found.values())) == 1, what
        assert set(found.values()) <= allowed, what
        assert "ready" not in seen.outcome.values(), f"a survivor hangs: {seen}"
        if version in found.values():
            self._held = (version, case)
            outcome = "new"
        else:
            outcome = "nothing" if old is None else "old"
        self.tally[seen.where, outcome] += 1

    def _save(self, case: Case, *, by_ranks: bool) -> None:
        """Saves without a kill, and asserts that nothing is left of whatever was there."""
        version = self._forks.next_number()
        if by_ranks:
            calm, base = replace(case, moment=None), self._base_path()
            with KilledSave(self._forks, calm, self._path, version, "fast", base) as save:
                seen = save.run(kill=False, usual_s=self._usual_s)
            assert seen.seconds is not None, f"the save after the kill failed: {seen}"
            self._usual_s += 0.3 * (seen.seconds - self._usual_s)
        found = self._forks.call(_find, self._path, {version: case}, version, not by_ranks)
        assert set(found.values()) == {version}, f"the save after the kill left {found}"
        self._held = (version, case)


class BasedCampaign(Campaign):
    """Kills saves that link files of an older checkpoint, which has to stay as it is.

    The last save that was not killed is the base of the next ones. They go to new directories, or
    replace the checkpoint that was the base before, with which the base shares files.
    """

    moments = BASED_MOMENTS
    _base: tuple[Path, int, Case] | None = None  # It, and what it holds.

    def run(self, kills: int, moments: Sequence[str] | None = None) -> None:
        """Kills so often, at the given moments or at all kinds of them."""
        rng = random.Random(self.seed)
        deck = self._deck(rng) if moments is None else itertools.cycle(moments)
        for number in range(kills):
            is_new = self._base is None or rng.random() < 0.2
            like = None if self._base is None or is_new else self._base[2]
            case = draw_frozen_case(rng, next(deck), self.victims, like)
            save_after = rng.random() < 0.7
            try:
                if is_new:
                    self._begin(case, number)
                if rng.random() < 0.5 or case.moment == "create folder":
                    self._path, self._held = self.directory / f"{number}", None
                self._prepare(case)
                self._kill_once(case)
                self._check_base()
                if save_after:
                    self._save(case, by_ranks=True)
                    self._check_base()
                    self._swap()
            except AssertionError as error:
                self.breaches.append(f"kill {number} of seed {self.seed}, {case}: {error}")
                self._base = None

    def _begin(self, case: Case, number: int) -> None:
        """Saves twice: the first save has what is frozen in files with other tensors."""
        self._base = None
        for name in "ab":
            self._path, self._held = self.directory / f"{number}-{name}", None
            super()._save(case, by_ranks=True)
            self._swap()
        self._path, self._held = self.directory / f"{number}", None

    def _swap(self) -> None:
        """Makes the last save the base, and has the next one replace the base before."""
        assert self._held is not None
        former, self._base = self._base, (self._path, *self._held)
        if former is not None:
            self._path, self._held = former[0], former[1:]

    def _base_path(self) -> Path:
        return self.directory / "none" if self._base is None else self._base[0]

    def _check_base(self) -> None:
        if self._base is None:
            return
        path, version, case = self._base
        found = self._forks.call(_find, path, {version: case})
        assert set(found.values()) == {version}, f"the base is {found}, and was {version}"

    def _save(self, case: Case, *, by_ranks: bool) -> None:
        """Saves by ranks, as the base was saved: other boxes are not found in it."""
        super()._save(case, by_ranks=True)
        files = self._path.glob("*.distcp")
        assert any(file.stat().st_nlink > 1 for file in files), "nothing was linked"


def _find(
    path: Path, candidates: dict[int, Case], save: int | None = None, alone: bool = False
) -> dict[str, int | None]:
    """The version that each reader finds, which is exactly that version.

    Args:
        path: Of the checkpoint.
        candidates: Versions that may be there.
        save: One that has been saved without harm, so that nothing else may be in the directory.
        alone: Whether it is for this process to save it.
    """
    if save is not None and alone:
        dcp.save(candidates[save].whole(save), storage_writer=FastWriter(path), no_dist=True)
    found: dict[str, int | None] = {}
    for name, reader in READERS.items():
        state: dict[str, Any] = {"version": -1}
        try:
            dcp.load(state, storage_reader=reader(path), no_dist=True)
        except CheckpointException:
            if (path / ".metadata").exists():
                raise
            found[name] = None
            continue
        version = found[name] = state["version"]
        assert version in candidates, f"{name} found {version}, not one of {[*candidates]}"
        case = candidates[version]
        loaded = dict.fromkeys(case.whole(version))
        loaded |= {key: torch.zeros_like(case.value(key, version)) for key in case.tensors}
        loaded["notes"] = {"of": [""] * 100, "more": b""}
        dcp.load(loaded, storage_reader=reader(path), no_dist=True)
        assert_same(loaded, case.whole(version))
    if save is not None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        referred = {info.relative_path for info in metadata.storage_data.values()}
        there = {file.name for file in path.iterdir()}
        assert there == referred | {".metadata", index_file(path).name}, there - referred
    return found


def main() -> int:
    """Runs a campaign and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--dir", help="where checkpoints go; a temporary folder by default")
    parser.add_argument("--writer", choices=WRITERS, default="fast")
    parser.add_argument("--base", action="store_true", help="save what has not changed by links")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torch_ckpt-kills-", dir=options.dir) as folder:
        kind = BasedCampaign if options.base else Campaign
        campaign = kind(Path(folder), options.seed, writer=options.writer)
        campaign.run(options.kills)
    print(campaign.report())
    print(f"{time.monotonic() - begin:.0f} s")
    if not can_stop():
        print("kills at random moments only: no system calls can be stopped here")
    return 1 if campaign.breaches else 0


if __name__ == "__main__":
    # So that ranks find its functions under the name that the server has imported.
    import kills

    sys.exit(kills.main())
