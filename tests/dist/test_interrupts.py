"""An interrupt of one rank, at any moment of a method: the others fail at once, and the next works.

A method of a run makes several calls. A rank can leave between any two of them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Worlds

import torch_ckpt
from torch_ckpt import Run
from torch_ckpt.agent import SnapshotAgent
from torch_ckpt.coordination import connections
from torch_ckpt.coordination import group as groups
from torch_ckpt.errors import RankTimeoutError

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("memory"),
]

SOON_S = 10.0  # At once, on a machine that is busy.
TIMEOUT_S = 25.0  # A rank that waits so long was not notified.

MOMENTS = ["before it sends", "after it has sent", "when the answer arrives", "after the exchange"]


class AlarmError(Exception):
    """What the handler of a signal raises."""


class Interruption:
    """Raises an interrupt at a moment of the exchange with a number, in the main thread."""

    def __init__(self, moment: str, number: int, kind: type[BaseException]) -> None:
        self.moment, self.number, self._kind = moment, number, kind
        self._begun = 0
        self.has_come = False

    def __str__(self) -> str:
        return f"{self._kind.__name__} {self.moment}, in exchange {self.number}"

    def _at(self, moment: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if moment == "before it sends":
            self._begun += 1
        is_due = moment == self.moment and self._begun == self.number + 1
        if is_due and not self.has_come:
            self.has_come = True
            raise self._kind("it is interrupted")

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        exchange, result_of = groups.Call._exchange, groups.result_of

        def interrupted_exchange(call: Any, *arguments: Any, **options: Any) -> Any:
            self._at("before it sends")
            answer = exchange(call, *arguments, **options)
            self._at("after the exchange")
            return answer

        def interrupted_result_of(*arguments: Any, **options: Any) -> Any:
            self._at("after it has sent")
            answer = result_of(*arguments, **options)
            self._at("when the answer arrives")
            return answer

        with (
            mock.patch.object(groups.Call, "_exchange", interrupted_exchange),
            mock.patch.object(groups, "result_of", interrupted_result_of),
        ):
            yield


class Rank:
    """What a rank calls: methods of a run, which is new after a method that ends it."""

    def __init__(self, path: Path, stack: contextlib.ExitStack, kind: str) -> None:
        self.path, self.kind, self.step = path, kind, 0
        self.stack = stack
        self.run = self.new_run()
        self.agent: SnapshotAgent | None = None
        self.save()
        self.save()

    def new_run(self) -> Run:
        options: dict[str, Any] = {"timeout_s": TIMEOUT_S, "keep_best": 2, "monitor": "loss"}
        if self.kind == "promoting":
            options["local"] = self.path / "local"
        elif self.kind != "now":
            options |= {"asynchronous": True, "agent": self.kind == "agent"}
        run = Run(self.path / "run", **options)
        self.stack.callback(run.close)
        return run

    def state(self) -> dict[str, Any]:
        return {"w": torch.full((100,), float(self.step)), f"own.{dist.get_rank()}": torch.ones(3)}

    def open(self, **options: Any) -> None:
        """Opens another run. An error ends it, so that it makes no exchange to close."""
        run = Run(self.path / "opened", **{"timeout_s": TIMEOUT_S, **options})
        run.__exit__(LookupError, LookupError("it is not used"), None)

    def save(self) -> None:
        self.step += 1
        self.run.save(self.step, self.state(), metrics={"loss": 1.0})

    def restore(self, **options: Any) -> None:
        state = self.state()
        assert self.run.restore(state, **options) is not None

    def stage(self) -> None:
        if self.agent is None:
            self.agent = SnapshotAgent(self.path / "snapshots", timeout_s=TIMEOUT_S)
            self.stack.callback(self.agent.close)
        self.step += 1
        staged = self.agent.stage(self.state(), self.path / f"staged-{self.step}", step=self.step)
        assert staged is not None
        self.agent.persist(staged)

    def alone(self, call: Callable[..., Any]) -> Any:
        return call(self.state(), checkpoint_id=self.path / "alone", timeout_s=TIMEOUT_S)


AGENT: dict[str, Any] = {"asynchronous": True, "agent": True}

METHODS: dict[str, tuple[str, Callable[[Rank], Any]]] = {
    "Run": ("now", Rank.open),
    "Run with local": ("now", lambda rank: rank.open(local=rank.path / "its-local")),
    "Run with an agent": ("now", lambda rank: rank.open(**AGENT)),
    "SnapshotAgent": ("now", lambda rank: SnapshotAgent(rank.path / "new").close()),
    "save": ("now", Rank.save),
    "save by a thread": ("thread", Rank.save),
    "save by the agent": ("agent", Rank.save),
    "save and promote": ("promoting", Rank.save),
    "restore": ("now", Rank.restore),
    "restore from memory": ("agent", Rank.restore),
    "restore a step": ("now", lambda rank: rank.restore(step=rank.step)),
    "latest_step": ("thread", lambda rank: rank.run.latest_step()),
    "best_step": ("now", lambda rank: rank.run.best_step()),
    "step_at": ("now", lambda rank: rank.run.step_at("9999-01-01")),
    "discard_after": ("now", lambda rank: rank.run.discard_after(rank.step)),
    "wait": ("promoting", lambda rank: rank.run.wait(promoted=True)),
    "close": ("promoting", lambda rank: rank.run.close()),
    "reserve": ("agent", lambda rank: rank.run.reserve(rank.state())),
    "stage": ("now", Rank.stage),
    "torch_ckpt.save": ("now", lambda rank: rank.alone(torch_ckpt.save)),
    "torch_ckpt.async_save": ("now", lambda rank: rank.alone(torch_ckpt.async_save).result()),
    "torch_ckpt.load": ("now", lambda rank: rank.alone(torch_ckpt.load)),
}


def interrupt_everywhere(path: Path, name: str, kind: type[BaseException], full: bool) -> None:
    """Interrupts one rank at each moment of each exchange of a method; all in turn if ``full``."""
    run_kind, method = METHODS[name]
    with contextlib.ExitStack() as stack:
        rank = Rank(path, stack, run_kind)
        rank.alone(torch_ckpt.save)
        size, first = dist.get_world_size(), list(METHODS).index(name)
        for index, moment in enumerate(MOMENTS, first):
            for one in range(size) if full else [index % size]:
                interruption, number = Interruption(moment, 0, kind), 0
                while interrupt_once(rank, method, interruption, one, full):
                    number += 1
                    interruption = Interruption(moment, number, kind)
                assert number, f"{name} has no exchange"


def interrupt_once(
    rank: Rank, method: Callable[[Rank], Any], interruption: Interruption, one: int, full: bool
) -> bool:
    """Calls the method, which is interrupted on one rank; returns whether it had the exchange.

    All calls follow it if ``full``, and else one of them, in turn.
    """
    is_own = dist.get_rank() == one
    with interruption.applied() if is_own else contextlib.nullcontext():
        ended, seconds = outcome(lambda: method(rank))
    found = []
    is_interrupt = isinstance(ended, KeyboardInterrupt | SystemExit | AlarmError)
    if is_interrupt != (is_own and interruption.has_come):
        found.append(f"raised {ended!r}")
    if seconds > SOON_S:
        found.append(f"took {seconds:.1f} s: {ended!r}")
    if method is METHODS["close"][1]:
        rank.run = rank.new_run()
    calls = (rank.save, rank.restore, lambda: rank.alone(torch_ckpt.load))
    first = (interruption.number + MOMENTS.index(interruption.moment)) % len(calls)
    for after in calls if full else calls[first : first + 1]:
        ended, seconds = outcome(after)
        if ended is not None or seconds > SOON_S:
            found.append(f"took {seconds:.1f} s for the next call: {ended!r}")
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (interruption.has_come, found))
    problems = [f"rank {r} {text}" for r, (_, texts) in enumerate(gathered) for text in texts]
    assert not problems, f"{interruption} on rank {one}:\n" + "\n".join(problems)
    return bool(gathered[one][0])


def outcome(call: Callable[[], Any]) -> tuple[BaseException | None, float]:
    """Returns the error of a call, if any, and its seconds."""
    begin = time.monotonic()
    try:
        call()
    except BaseException as error:
        return error, time.monotonic() - begin
    return None, time.monotonic() - begin


@pytest.mark.thin(
    "KeyboardInterrupt-2-Run with an agent",
    "KeyboardInterrupt-2-save by a thread",
    "SystemExit-3-restore",
    "AlarmError-2-torch_ckpt.load",
)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, AlarmError])
def test_the_next_call_works_after_an_interrupt_of_one_rank_at_any_moment(
    worlds: Worlds, tmp_path: Path, name: str, size: int, kind: type[BaseException], full: bool
) -> None:
    worlds.run(size, interrupt_everywhere, tmp_path, name, kind, full, timeout_s=150)


def interrupt_while_connecting(path: Path) -> None:
    group, rank, state = dist.new_group(), dist.get_rank(), {"w": torch.ones(3)}
    here = (
        mock.patch.object(connections, "result_of", side_effect=AlarmError("it is interrupted"))
        if rank == 1
        else contextlib.nullcontext()
    )

    def save() -> object:
        return torch_ckpt.save(
            state, checkpoint_id=path / "saved", process_group=group, timeout_s=TIMEOUT_S
        )

    with here:
        ended, seconds = outcome(save)
    assert isinstance(ended, AlarmError if rank == 1 else RankTimeoutError), repr(ended)
    assert "it is interrupted" in str(ended)
    assert seconds < SOON_S
    assert outcome(save)[0] is None


def test_the_next_call_works_after_an_interrupt_of_one_rank_while_it_connects(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(2, interrupt_while_connecting, tmp_path)
