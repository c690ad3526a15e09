"""A call that fails on one rank fails on all ranks at once, and the next call works.

Every call is followed by every other one, so each must leave as many exchanges on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds
from torch.distributed.checkpoint import load as imported_load
from torch.distributed.checkpoint import save as imported_save

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, FastSavePlanner, FastWriter, Run
from torch_ckpt.agent import SnapshotAgent
from torch_ckpt.agent.client import AgentClient
from torch_ckpt.errors import CancelledError, StorageError
from torch_ckpt.ladder.retention import Retention

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("memory"),
]

SOON_S = 10.0  # At once, on a machine that is busy.
TIMEOUT_S = 25.0  # A rank that waits so long was not notified.
EVERY = "every call"
ERRORS: list[type[BaseException]] = [LookupError, SystemExit, KeyboardInterrupt]


class Model:
    """Has a state dict, whose methods tests replace to let them fail."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1000)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.weight.copy_(state_dict["weight"])


class Fault(NamedTuple):
    """A method that raises on one rank."""

    owner: type
    method: str
    error: type[BaseException]
    rank: int

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        if dist.get_rank() != self.rank:
            yield
            return
        with mock.patch.object(self.owner, self.method, side_effect=self.error("it fails")):
            yield

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.method} {self.error.__name__} on rank {self.rank}"


SAVE_FAULTS = [
    (Model, "state_dict"),
    (FastSavePlanner, "create_local_plan"),
    (FastWriter, "write_data"),
    (FastWriter, "finish"),
]
LOAD_FAULTS = [
    (Model, "state_dict"),
    (Model, "load_state_dict"),
    (FastLoadPlanner, "create_local_plan"),
    (FastLoadPlanner, "create_global_plan"),
    (FastReader, "read_data"),
]
OF_FIRST_RANK = ["finish", "create_global_plan"]
AGENT_FAULTS = [(Model, "state_dict"), (AgentClient, "acquire")]


class Stored:
    """Stores functions of DCP where a search of the modules does not find them."""

    save = staticmethod(dcp.save)
    async_save = staticmethod(dcp.async_save)
    load = staticmethod(functools.partial(dcp.load, planner=None))


class Calls:
    """The calls of one rank, each of which saves or loads the model."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self.path, self.model = path, Model()
        self.numbers = itertools.count(1)
        options: dict[str, Any] = {"timeout_s": TIMEOUT_S, "keep_last": 2}
        self.runs = {
            "now": Run(path / "now", **options),
            "thread": Run(path / "thread", asynchronous=True, **options),
            "agent": Run(path / "agent", asynchronous=True, agent=True, **options),
        }
        for run in self.runs.values():
            stack.callback(run.close)
        self.agent = SnapshotAgent(path / "snapshots", timeout_s=TIMEOUT_S)
        stack.callback(self.agent.close)
        torch_ckpt.save(self.filled(0), checkpoint_id=path / "saved", timeout_s=TIMEOUT_S)
        for run in self.runs.values():
            run.save(next(self.numbers), self.filled(0))

    def filled(self, value: float) -> dict[str, Any]:
        self.model.weight.fill_(value)
        return {"model": self.model, f"own.{dist.get_rank()}": torch.full((100,), float(value))}

    def at(self) -> dict[str, Any]:
        return {"checkpoint_id": self.path / f"{next(self.numbers)}"}

    def loads(self, load: Callable[..., Any]) -> None:
        state = self.filled(7)
        load(state)
        assert state[f"own.{dist.get_rank()}"].eq(0).all()
        assert self.model.weight.eq(0).all()

    # ---- The calls ----

    def save(self) -> None:
        torch_ckpt.save(self.filled(0), **self.at(), timeout_s=TIMEOUT_S)

    def async_save(self) -> None:
        torch_ckpt.async_save(self.filled(0), **self.at(), timeout_s=TIMEOUT_S).result(TIMEOUT_S)

    def load(self) -> None:
        at = {"checkpoint_id": self.path / "saved", "timeout_s": TIMEOUT_S}
        self.loads(lambda state: torch_ckpt.load(state, **at))

    def dcp_save(self) -> None:
        with torch_ckpt.installed(timeout_s=TIMEOUT_S):
            dcp.save(self.filled(0), **self.at())

    def dcp_async_save(self) -> None:
        with torch_ckpt.installed(timeout_s=TIMEOUT_S):
            dcp.async_save(self.filled(0), **self.at()).result(TIMEOUT_S)

    def dcp_load(self) -> None:
        with torch_ckpt.installed(timeout_s=TIMEOUT_S):
            self.loads(lambda state: dcp.load(state, checkpoint_id=self.path / "saved"))

    def imported_save(self) -> None:
        with torch_ckpt.installed(timeout_s=TIMEOUT_S):
            imported_save(self.filled(0), **self.at())

    def imported_load(self) -> None:
        with torch_ckpt.installed(timeout_s=TIMEOUT_S):
            self.loads(lambda state: imported_load(state, checkpoint_id=self.path / "saved"))

    def stored_save(self) -> None:
        with torch_ckpt.installed(timeout_s=TIMEOUT_S):
            Stored.save(self.filled(0), **self.at())

    def stored_async_save(self) -> None:
        with torch_ckpt.installed(timeout_s=TIMEOUT_S):
            future: Any = Stored.async_save(self.filled(0), **self.at())
        future.result(TIMEOUT_S)

    def stored_load(self) -> None:
        with torch_ckpt.installed(timeout_s=TIMEOUT_S):
            self.loads(lambda state: Stored.load(state, checkpoint_id=self.path / "saved"))

    def stage(self) -> None:
        number = next(self.numbers)
        staged = self.agent.stage(self.filled(0), self.path / f"staged-{number}", step=number)
        assert staged is not None
        self.agent.persist(staged)

    def run_save(self, kind: str) -> None:
        run = self.runs[kind]
        try:
            assert run.save(next(self.numbers), self.filled(0))
        finally:
            run.wait()

    def run_restore(self, kind: str) -> None:
        self.loads(self.runs[kind].restore)


CALLS: dict[str, tuple[Callable[[Calls], None], list[tuple[type, str]]]] = {
    "save": (Calls.save, SAVE_FAULTS),
    "async_save": (Calls.async_save, SAVE_FAULTS),
    "load": (Calls.load, LOAD_FAULTS),
    "dcp.save": (Calls.dcp_save, SAVE_FAULTS),
    "dcp.async_save": (Calls.dcp_async_save, SAVE_FAULTS),
    "dcp.load": (Calls.dcp_load, LOAD_FAULTS),
    "dcp.save, imported by name": (Calls.imported_save, SAVE_FAULTS),
    "dcp.load, imported by name": (Calls.imported_load, LOAD_FAULTS),
    "dcp.save, stored in a class": (Calls.stored_save, SAVE_FAULTS),
    "dcp.async_save, stored in a class": (Calls.stored_async_save, SAVE_FAULTS),
    "dcp.load, stored in a partial": (Calls.stored_load, LOAD_FAULTS),
    "stage": (Calls.stage, AGENT_FAULTS),
    "Run.save": (lambda calls: calls.run_save("now"), SAVE_FAULTS),
    "Run.save by a thread": (lambda calls: calls.run_save("thread"), SAVE_FAULTS),
    "Run.save by the agent": (lambda calls: calls.run_save("agent"), AGENT_FAULTS),
    "Run.restore": (lambda calls: calls.run_restore("now"), LOAD_FAULTS),
    "Run.restore from memory": (lambda calls: calls.run_restore("agent"), LOAD_FAULTS),
}


def fail_and_go_on(path: Path, failing: str, full: bool) -> None:
    """Lets a call, or each in turn, fail in every way, each time followed by another call."""
    with contextlib.ExitStack() as stack:
        calls = Calls(path, stack)
        for name in CALLS if failing == EVERY else [failing]:
            fail_in_every_way(calls, name, full)


def fail_in_every_way(calls: Calls, failing: str, full: bool) -> None:
    """Lets each method raise each error on each rank, and calls each call after it.

    Unless ``full``, every second method raises one error on one rank, and the next one another on
    another; the next call has the others.
    """
    found: list[str] = []
    size, first = dist.get_world_size(), list(CALLS).index(failing)
    next_error = itertools.islice(itertools.cycle(ERRORS), first, None)
    next_call = itertools.islice(itertools.cycle(CALLS), first, None)
    call, faults = CALLS[failing]
    for number, (owner, method) in enumerate(faults, first):
        if not full and number % 2:
            continue
        ranks = [0] if method in OF_FIRST_RANK else range(size) if full else [number // 2 % size]
        for rank in ranks:
            pairs = (
                itertools.product(ERRORS, CALLS) if full else [(next(next_error), next(next_call))]
            )
            for error, name in pairs:
                fault = Fault(owner, method, error, rank)
                begin = time.monotonic()
                ended = outcome(call, calls, fault)
                in_background = failing == "Run.save by a thread"
                if problem := wrong(ended, fault, begin, in_background=in_background):
                    found.append(f"{fault}: {failing} {problem}")
                begin = time.monotonic()
                after = outcome(CALLS[name][0], calls)
                if after is not None:
                    found.append(f"{fault}: {name} after {failing} raised {after!r}")
                elif time.monotonic() - begin > SOON_S:
                    found.append(f"{fault}: {name} after {failing} was late")
            gathered: list[Any] = [None] * size
            dist.all_gather_object(gathered, found)
            assert not any(gathered), "\n".join(itertools.chain(*gathered))  # Ends the ranks.


def outcome(
    call: Callable[[Calls], None], calls: Calls, fault: Fault | None = None
) -> BaseException | None:
    with contextlib.nullcontext() if fault is None else fault.applied():
        try:
            call(calls)
        except BaseException as error:
            return error
    return None


def wrong(ended: BaseException | None, fault: Fault, begin: float, *, in_background: bool) -> str:
    """What is wrong with the end of a call that has failed on a rank; empty if nothing is."""
    is_own = dist.get_rank() == fault.rank
    if ended is None:
        return f"returned on rank {dist.get_rank()}"
    if time.monotonic() - begin > SOON_S:
        return f"took {time.monotonic() - begin:.1f} s on rank {dist.get_rank()}: {ended!r}"
    is_interrupt = isinstance(ended, SystemExit | KeyboardInterrupt)
    if not is_own and is_interrupt:
        return f"raised {ended!r} of another rank on rank {dist.get_rank()}"
    if is_own and not is_interrupt and fault.error is not LookupError and not in_background:
        return f"hid an interrupt of its own rank {dist.get_rank()} in {ended!r}"
    is_of_agent = isinstance(ended, CancelledError) and "before it filled a slot" in str(ended)
    if not is_of_agent and "it fails" not in f"{ended} {getattr(ended, 'failures', '')}":
        return f"does not report the cause on rank {dist.get_rank()}: {ended!r}"
    return ""


def save_in_a_run(path: Path, fault: Fault, asynchronous: bool) -> list[str]:
    """Saves three times in a run in which training goes on after errors of storage."""
    ended = []
    options: dict[str, Any] = {"on_failure": "warn", "asynchronous": asynchronous}
    with Run(path, timeout_s=TIMEOUT_S, **options) as run:
        for step in range(3):
            with fault.applied() if step == 1 else contextlib.nullcontext():
                try:
                    ended.append("saved" if run.save(step, {"model": Model()}) else "went on")
                except BaseException:
                    ended.append("raised")
    return ended


AFTER = {
    "StorageError of a state_dict": (Model, "state_dict", StorageError),
    "a warning after the commit": (Retention, "apply", UserWarning),
    "StorageError after the commit": (Retention, "apply", StorageError),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", AFTER)
def test_training_goes_on_or_ends_on_all_ranks(
    worlds: Worlds, tmp_path: Path, fault: str, rank: int, asynchronous: bool
) -> None:
    ended = worlds.agree(2, save_in_a_run, tmp_path, Fault(*AFTER[fault], rank), asynchronous)
    assert ended[0] == "saved"
    if fault == "StorageError after the commit":
        assert "raised" not in ended


# One test of every call starts the agents once.
@pytest.mark.thin(f"{EVERY}-2")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("failing", [EVERY, *CALLS])
def test_after_a_call_that_failed_on_one_rank_the_next_call_works_on_all(
    worlds: Worlds, tmp_path: Path, failing: str, size: int, full: bool
) -> None:
    worlds.run(size, fail_and_go_on, tmp_path, failing, full, timeout_s=150)
