"""Runs functions on gloo ranks, each a process of its own, and leaves no process behind.

Processes are forked from one that has imported torch, and a world outlives a call: `Worlds` has one
of each size for the tests of a file and replaces one in which a call went wrong. Linux only:
ranks ask the kernel to die with the process that started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import inspect
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from forks import fork_context, rank_environment

START_TIMEOUT_S = 90  # Importing torch, on a machine that is busy.
TIMEOUT_S = 60
COLLECTIVE_TIMEOUT_S = 120  # Longer than any call may take: a hang is found by the call's deadline.
GRACE_S = 5  # For the other ranks to fail on their own after the first one has.
EXIT_TIMEOUT_S = 10
PR_SET_PDEATHSIG = 1


class RankError(AssertionError):
    """A rank raised, ended or did not return in time. The message has each one's traceback."""


class Ranks:
    """A world of processes that run one call at a time. Owned by one thread.

    After a call that raised, its ranks are killed: they may have been left within a collective. The
    next call starts the world anew.

    Args:
        world_size: How many.
        over_tcp: Whether they find each other at a TCPStore, and not in a file.
    """

    def __init__(self, world_size: int, *, over_tcp: bool = False) -> None:
        self.world_size = world_size
        self._over_tcp = over_tcp
        self._start()

    def _start(self) -> None:
        self.alive = True
        self._stack = contextlib.ExitStack()
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="torch_ckpt-ranks-"))
        where = f"file://{folder}/store"
        if self._over_tcp:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            where = f"tcp://127.0.0.1:{self._store.port}"
        self._dumps = [Path(folder, f"stacks-{rank}") for rank in range(self.world_size)]
        context = fork_context()
        try:
            with mock.patch.dict(os.environ, rank_environment()):
                for rank, dump in enumerate(self._dumps):
                    dump.touch()  # The rank may die before it opens the file.
                    ours, theirs = context.Pipe()
                    self._pipes.append(ours)
                    process = context.Process(
                        target=_serve,
                        args=(rank, self.world_size, where, dict(os.environ), theirs, dump),
                    )
                    process.start()
                    theirs.close()
                    self._processes.append(process)
        except BaseException:
            self.kill()
            raise
        self.run(dist.get_rank, timeout_s=START_TIMEOUT_S)  # Until all have met.

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks."""
        return [process.pid for process in self._processes]

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = TIMEOUT_S,
        grace_s: float = GRACE_S,
    ) -> list[Any]:
        """Calls ``function(*args)`` on every rank and returns what each returned, in rank order.

        ``function`` is one of a module, and it, the arguments and the results pickle. When a rank
        has failed, the others have ``grace_s`` to come to their own end.

        Raises:
            RankError: A rank raised, ended or was not done within ``timeout_s``. All are killed.
        """
        if not self.alive:
            self._start()
        try:
            memory = os.environ.get("TORCH_CKPT_MEMORY")  # The present test sets it.
            call = pickle.dumps((function, args, memory))
            for pipe in self._pipes:
                with contextlib.suppress(BrokenPipeError):  # It has ended: the reply will say so.
                    pipe.send_bytes(call)
            replies = self._replies(timeout_s, grace_s)
            bad = [
                f"rank {rank} {reply}" for rank, (ok, reply) in sorted(replies.items()) if not ok
            ]
            late = sorted(set(range(self.world_size)) - set(replies))
            if late:
                bad.append(f"ranks {late} were not done when they were killed")
                bad.extend(self._stacks(late))
            if bad:
                raise RankError(f"{function.__name__} on {self.world_size}:\n" + "\n".join(bad))
        except BaseException:
            self.kill()
            raise
        return [replies[rank][1] for rank in range(self.world_size)]

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the ranks, unless they were killed."""
        if self.alive:
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def close(self) -> None:
        """Ends the ranks, and kills what has not ended by itself soon."""
        self.dismiss()
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0))
        self.kill()

    def dismiss(self) -> None:
        """Tells the ranks to end, and returns at once."""
        self.alive = False
        for pipe in self._pipes:
            pipe.close()

    def kill(self) -> None:
        """Kills the ranks and the processes that they started, and waits for their end."""
        self.dismiss()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # Where it has not come to make a group of its own.
        for process in self._processes:
            process.join()
        self._stack.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stacks(self, ranks: list[int]) -> list[str]:
        """What the threads of these ranks do now."""
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR2)
        time.sleep(0.5)  # They may be stopped, or within a call that does not end.
        return [f"rank {rank} is here:\n{self._dumps[rank].read_text()}" for rank in ranks]

    def _replies(self, timeout_s: float, grace_s: float) -> dict[int, tuple[bool, Any]]:
        """Collects (whether it returned, what it returned or why not) of the ranks done in time."""
        replies: dict[int, tuple[bool, Any]] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = connection.wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    replies[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(GRACE_S)
                    died = f"ended, exit code {self._processes[rank].exitcode}"
                    replies[rank] = False, f"{died}\n{self._dumps[rank].read_text()}"
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + grace_s)
        return replies


class Worlds:
    """Worlds by their size, started when first asked for.

    All but the one that was called last are stopped: gloo's threads poll, 100 times a second each.
    """

    def __init__(self) -> None:
        self._worlds: dict[int, Ranks] = {}
        self._last: Ranks | None = None

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = TIMEOUT_S,
    ) -> list[Any]:
        """Calls ``function(*args)`` on ``world_size`` ranks, as :meth:`Ranks.run` does."""
        world = self._worlds.get(world_size)
        if world is not self._last and self._last is not None:
            self._last.send(signal.SIGSTOP)
        if world is None or not world.alive:
            world = self._worlds[world_size] = Ranks(world_size)
        world.send(signal.SIGCONT)
        self._last = world
        return world.run(function, *args, timeout_s=timeout_s)

    def agree(self, *args: Any, **options: Any) -> Any:
        """Calls a function as :meth:`run` does; returns what each rank did, which is the same."""
        first, *others = self.run(*args, **options)
        assert others == [first] * len(others)
        return first

    def close(self) -> None:
        """Ends every world."""
        with contextlib.ExitStack() as stack:
            for world in self._worlds.values():
                stack.callback(world.close)
                world.send(signal.SIGCONT)
                world.dismiss()  # So that they all end at the same time.


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    grace_s: float = GRACE_S,
) -> list[Any]:
    """Calls ``function(*args)`` on every rank of a new world, which is gone when this returns."""
    with Ranks(world_size) as ranks:
        return ranks.run(function, *args, timeout_s=timeout_s, grace_s=grace_s)


def on_ranks(
    count: int | None = None, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes of a function the test that it returns on each of so many ranks, or on a ``pair``.

    Its arguments are the parameters and fixtures of the test; ``path`` is ``tmp_path``.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        names = [
            {"path": "tmp_path"}.get(name, name) for name in inspect.signature(body).parameters
        ]

        @functools.wraps(body)
        def test(**given: Any) -> None:
            call = _call, body.__module__, body.__name__, *(given[name] for name in names)
            if count is None:
                given["pair"].run(*call, **options)
            else:
                given["worlds"].run(count, *call, **options)

        kind = inspect.Parameter.KEYWORD_ONLY
        fixtures = ["pair" if count is None else "worlds", *names]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind) for name in fixtures]
        )
        return test

    return decorate


def _call(module: str, test: str, *arguments: Any) -> None:
    getattr(importlib.import_module(module), test).__wrapped__(*arguments)


def _serve(
    rank: int,
    world_size: int,
    where: str,
    environment: dict[str, str],
    calls: connection.Connection,
    dump: Path,
) -> None:
    """A rank: answers calls until the pipe is closed.

    SIGUSR2 and a signal that ends it, as SIGSEGV does, write its stacks to ``dump``.
    """
    os.setsid()
    stacks = dump.open("w")
    faulthandler.register(signal.SIGUSR2, stacks)
    faulthandler.enable(stacks)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.pop("TORCH_CKPT_MEMORY", None)  # The fork server has that of its first test.
    os.environ.update(environment)
    torch.set_num_threads(1)
    scheme, _, place = where.partition("://")
    if scheme == "tcp":
        host, _, port = place.partition(":")
        at: dict[str, Any] = {"store": dist.TCPStore(host, int(port), is_master=False)}
    else:
        at = {"init_method": where}
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        **at,
    )
    known = environment.get("TORCH_CKPT_MEMORY")
    for call in _received(calls):
        try:
            function, args, memory = pickle.loads(call)
            if memory is not None and memory != known:  # A rank may have set its own since.
                os.environ["TORCH_CKPT_MEMORY"] = known = memory
            reply = pickle.dumps((True, function(*args)))
        except BaseException:  # CheckpointException is no Exception.
            reply = pickle.dumps((False, f"raised\n{traceback.format_exc()}"))
        calls.send_bytes(reply)
    dist.destroy_process_group()


def _received(calls: connection.Connection) -> Iterator[bytes]:
    with contextlib.suppress(EOFError):
        while True:
            yield calls.recv_bytes()
