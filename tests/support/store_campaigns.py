"""Saves and loads on a store through a proxy that makes faults, all drawn from a seed."""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from support.store_proxy import Fault, StoreProxy
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from torch_ckpt import FastReader, FastWriter
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.process_state import PROCESS

__all__ = ["Campaign", "assert_only_one", "cause_of", "draw_faults", "loaded", "save", "state_of"]

SMALL, LARGE = 300, 600_000  # Rows: one request, and two parts.
CASE_S = 120.0
KINDS = (
    "status",
    "status",
    "reset",
    "lose",
    "stall",
    "cut",
    "truncate",
    "shorten",
    "flip",
    "delay",
)
STATUSES = (429, 500, 503)
TARGETS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((), ""),
    ((), ""),
    ((), r"\.metadata$"),
    ((), r"\.index"),
    ((), r"\.distcp$"),
    (("put",), ""),
    (("create", "part", "complete"), ""),
    (("get", "head", "list"), ""),
)


def state_of(version: int, rows: int = SMALL) -> dict[str, Any]:
    """The values of a version, of which every one differs from those of another."""
    return {
        "w": torch.arange(rows * 7, dtype=torch.int32).reshape(rows, 7) * 8 + version,
        "b": torch.arange(5.0) + version,
        "notes": {"of": [str(version)] * 10},
        "version": version,
    }


def save(url: str, version: int, rows: int = SMALL, **options: Any) -> None:
    """Saves a version as a job of one rank does."""
    torch_ckpt.save(
        state_of(version, rows), storage_writer=FastWriter(url, **options), no_dist=True
    )


def loaded(url: str, rows: int = SMALL) -> int:
    """The version that is there, whole."""
    state = state_of(-1, rows)
    torch_ckpt.load(state, storage_reader=FastReader(url), no_dist=True)
    expected = state_of(state["version"], rows)
    for name, value in expected.items():
        is_equal = torch.equal(state[name], value) if name in "wb" else state[name] == value
        assert is_equal, f"{name} of {url} is not that of version {state['version']}"
    return int(state["version"])


def cause_of(error: BaseException) -> BaseException:
    """The error of a rank."""
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


def assert_only_one(url: str, files: int = 1) -> None:
    """There is one checkpoint, and no file of another save."""
    names = Location(url).names()
    kinds = sorted(".distcp" if name.endswith(".distcp") else name[:9] for name in names)
    expected = [".distcp"] * files + [names[files][:9] if len(names) > files else "", ".metadata"]
    assert len(names) == files + 2, names
    assert kinds.count(".distcp") == files, names
    assert ".metadata" in names, expected
    assert sum(name.startswith(".index.") for name in names) == 1, names


def draw_faults(rng: random.Random) -> list[Fault]:
    """A few rules, of shares of 1 to 30 %."""
    faults = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        requests, path = rng.choice(TARGETS)
        fault = Fault(
            rng.choice(KINDS),  # type: ignore[arg-type]
            requests=requests,
            path=path,
            share=rng.uniform(0.01, 0.3),
            status=rng.choice(STATUSES),
            seconds=rng.uniform(0.05, 0.5),
            at=rng.random(),
        )
        faults.append(fault)
    return faults


@dataclass
class Campaign:
    """Cases, one after another: a save with faults, then a load with others.

    After every save, a load without faults finds its values, or those of the former one.

    Attributes:
        breaches: What a case has found that must not be.
        outcomes: How often each outcome came.
    """

    proxy: StoreProxy
    folder: str
    rng: random.Random
    breaches: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def run(self, cases: int) -> None:
        """Runs cases, a tenth of them with a file of several parts."""
        for number in range(cases):
            rows = LARGE if number % 8 == 1 else SMALL
            self.proxy.forget()
            url = f"{self.folder}/{number}"
            has_former = self.rng.random() < 0.7
            if has_former:
                self._fresh()
                save(url, 1, rows)
            self.case(url, draw_faults(self.rng), rows, former=1 if has_former else None)

    def case(self, url: str, faults: list[Fault], rows: int, former: int | None) -> None:
        """Saves version 2 with faults, and loads with the same."""
        said = [(f.kind, f.requests, f.path, round(f.share, 2), f.status) for f in faults]
        what = f"{url} {rows} {said} seed {self.proxy._seed}"
        error = self._try("save", what, faults, lambda: save(url, 2, rows))
        self._fresh()
        try:
            found: int | None = loaded(url, rows)
        except BaseException as failed:
            found = None
            if former is not None or error is None:
                self.breaches.append(f"{what}: after {error!r}, nothing loads: {cause_of(failed)}")
                return
        if found != (2 if error is None else former):
            self.breaches.append(f"{what}: after {error!r}, version {found} is there")
        if found is None:
            save(url, 2, rows)
        values = [0]
        error = self._try("load", what, faults, lambda: values.append(loaded(url, rows)))
        if isinstance(error, AssertionError) or (error is None and values[-1] != (found or 2)):
            self.breaches.append(f"{what}: a load gives wrong values: {error} {values}")
        self._fresh()
        save(url, 3, rows)
        try:
            assert_only_one(url)
        except AssertionError as left:
            self.breaches.append(f"{what}: files are left: {left}")

    def _fresh(self) -> None:
        """What follows happens without faults, in a process that knows nothing of the store."""
        self.proxy.forget()
        PROCESS.file_systems.clear()

    def _try(self, verb: str, what: str, faults: list[Fault], call: Any) -> BaseException | None:
        self._fresh()
        for fault in faults:
            fault.met = 0
        self.proxy.add(*faults)
        began = time.monotonic()
        error: BaseException | None = None
        try:
            call()
        except BaseException as raised:
            error = cause_of(raised)
        seconds = time.monotonic() - began
        met = sum(fault.met for fault in faults)
        requests = sum(self.proxy.counts().values())
        outcome = f"{verb}: {type(error).__name__ if error else 'done'}"
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if seconds > CASE_S:
            self.breaches.append(f"{what}: {verb} took {seconds:.0f} s")
        if requests > 60 + 10 * met:
            self.breaches.append(f"{what}: {verb} made {requests} requests with {met} faults")
        if error is not None and not isinstance(error, AssertionError):
            text = f"{verb} raised {type(error).__name__}: {error}"
            self.errors.append(text)
            place = self.folder if verb == "save" else r"\.distcp|\.index|\.metadata"
            if not isinstance(error, CheckpointError) or not re.search(place, text):
                self.breaches.append(f"{what}: {text}")
        return error
