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
from torch_ckpt import FastReader, FastWriter, SafetensorsWriter
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.process_state import PROCESS

__all__ = [
    "Campaign",
    "Writer",
    "assert_only_one",
    "cause_of",
    "draw_faults",
    "loaded",
    "save",
    "state_of",
]

Writer = type[FastWriter]
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
    ((), r"\.metadata$|\.index\.json$"),
    ((), r"\.index"),
    ((), r"\.distcp$|\.safetensors$"),
    (("put",), ""),
    (("create", "part", "complete"), ""),
    (("get", "head", "list"), ""),
)


def state_of(version: int, rows: int = SMALL, writer: Writer = FastWriter) -> dict[str, Any]:
    """The values of a version, of which every one differs from those of another."""
    tensors = {
        "w": torch.arange(rows * 7, dtype=torch.int32).reshape(rows, 7) * 8 + version,
        "b": torch.arange(5.0) + version,
    }
    if writer is SafetensorsWriter:
        return {**tensors, "version": torch.tensor(version)}
    return {**tensors, "notes": {"of": [str(version)] * 10}, "version": version}


def save(
    url: str, version: int, rows: int = SMALL, writer: Writer = FastWriter, **options: Any
) -> None:
    """Saves a version as a job of one rank does."""
    state = state_of(version, rows, writer)
    torch_ckpt.save(state, storage_writer=writer(url, **options), no_dist=True)


def loaded(url: str, rows: int = SMALL, writer: Writer = FastWriter) -> int:
    """The version that is there, whole."""
    state = state_of(-1, rows, writer)
    torch_ckpt.load(state, storage_reader=FastReader(url), no_dist=True)
    version = int(state["version"])
    for name, value in state_of(version, rows, writer).items():
        is_equal = torch.equal(state[name], value) if name in "wb" else state[name] == value
        assert is_equal, f"{name} of {url} is not that of version {version}"
    return version


def cause_of(error: BaseException) -> BaseException:
    """The error of a rank."""
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


def assert_only_one(url: str, files: int = 1, writer: Writer = FastWriter) -> None:
    """There is one checkpoint, and no file of another save."""
    place = Location(url)
    names = [name for name in place.names() if (place / name).is_file() or (place / name).names()]
    if writer is SafetensorsWriter:
        data = [name for name in names if name.endswith(".safetensors")]
        index = [] if data == ["model.safetensors"] else ["model.safetensors.index.json"]
        assert sorted(names) == sorted(data + index), names
        assert len(data) == files, names
        return
    kinds = [".distcp" if name.endswith(".distcp") else name[:7] for name in names]
    assert sorted(kinds) == sorted([".distcp"] * files + [".index.", ".metada"]), names


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
        writer: What saves. Files of safetensors have no checksums, so no faults meet a load.
        breaches: What a case has found that must not be.
        outcomes: How often each outcome came.
    """

    proxy: StoreProxy
    folder: str
    rng: random.Random
    writer: Writer = FastWriter
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
                save(url, 1, rows, self.writer)
            self.case(url, draw_faults(self.rng), rows, former=1 if has_former else None)

    def case(self, url: str, faults: list[Fault], rows: int, former: int | None) -> None:
        """Saves version 2 with faults, and loads with the same."""
        said = [(f.kind, f.requests, f.path, round(f.share, 2), f.status) for f in faults]
        what = f"{url} {rows} {said} seed {self.proxy._seed}"
        error = self._try("save", what, faults, lambda: save(url, 2, rows, self.writer))
        self._fresh()
        try:
            found: int | None = loaded(url, rows, self.writer)
        except BaseException as failed:
            found = None
            if former is not None or error is None:
                self.breaches.append(f"{what}: after {error!r}, nothing loads: {cause_of(failed)}")
                return
        if found != (2 if error is None else former):
            self.breaches.append(f"{what}: after {error!r}, version {found} is there")
        if found is None:
            save(url, 2, rows, self.writer)
        values = [0]
        faults = [] if self.writer is SafetensorsWriter else faults
        error = self._try(
            "load", what, faults, lambda: values.append(loaded(url, rows, self.writer))
        )
        if isinstance(error, AssertionError) or (error is None and values[-1] != (found or 2)):
            self.breaches.append(f"{what}: a load gives wrong values: {error} {values}")
        self._fresh()
        save(url, 3, rows, self.writer)
        try:
            assert_only_one(url, writer=self.writer)
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
