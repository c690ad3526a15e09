"""Saves to a store by processes of their own: killed at a request, and against each other."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch.distributed as dist
from forks import Forks
from support.store_campaigns import (
    LARGE,
    SMALL,
    Writer,
    assert_only_one,
    cause_of,
    loaded,
    save,
    state_of,
)
from support.store_proxy import Fault, Request, StoreProxy
from support.store_server import StoreServer

import torch_ckpt
from torch_ckpt import FastWriter
from torch_ckpt.filesystems.location import Location
from torch_ckpt.process_state import PROCESS

__all__ = ["KillCampaign", "RaceCampaign", "save_on_a_rank"]

START_S = 60.0
COMMITS = r"/\.metadata$|/model\.safetensors\.index\.json$"
SAVE_S = 60.0
TIMEOUT_S = 10.0  # For one save.


def save_on_a_rank(
    pipe: connection.Connection,
    rank: int,
    world_size: int,
    store: tuple[int, str],
    variables: dict[str, str],
    url: str,
    rows: int,
    writer: Writer = FastWriter,
) -> None:
    """A rank: says ``ready``, waits, saves version 2, says how that went."""
    os.environ.update(variables)
    port, number = store
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(number, dist.TCPStore("127.0.0.1", port, is_master=False)),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    state = state_of(2, rows, writer)
    state["own"] = {str(rank): state["b"] + rank}
    pipe.send("ready")
    pipe.recv()
    try:
        torch_ckpt.save(state, storage_writer=writer(url), timeout_s=TIMEOUT_S)
    except BaseException as error:
        pipe.send(f"raised {type(cause_of(error)).__name__}: {cause_of(error)}"[:500])
        os._exit(1)
    pipe.send("returned")
    with contextlib.suppress(EOFError):
        pipe.recv()
    os._exit(0)


_NEVER = 1 << 30


@dataclass
class KillCampaign:
    """Two ranks save; some of them, or the server, are killed at one of the requests.

    Attributes:
        kills: How many have died at a request.
        breaches: What must not be.
        found: How often which version was there afterwards.
    """

    server: StoreServer
    proxy: StoreProxy
    folder: str
    rng: random.Random
    writer: Writer = FastWriter
    forks: Forks = field(default_factory=Forks)
    kills: int = 0
    breaches: list[str] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)
    _requests: dict[int, int] = field(default_factory=dict)  # Rows -> those of a whole save.

    def run(self, kills: int, *, kills_server: bool = False) -> None:
        """Runs cases until so many have met their request."""
        number = 0
        while self.kills < kills:
            rows = LARGE if number % 6 == 5 else SMALL
            former = 1 if number % 3 else None
            victims = self.rng.choice([(0,), (1,), (0, 1)])
            if rows not in self._requests:
                self._fresh()
                save(f"{self.folder}/whole", 1, rows, self.writer)
                self._fresh()
                self._save(f"{self.folder}/whole", rows, (), _NEVER)
                self._requests[rows] = len(self.proxy.requests)
            at = self.rng.randrange(self._requests[rows])
            self.case(f"{self.folder}/{number}", rows, former, () if kills_server else victims, at)
            number += 1

    def case(
        self, url: str, rows: int, former: int | None, victims: tuple[int, ...], at: int
    ) -> None:
        """Kills the victims, or the server if there are none, at a request of a save."""
        what = f"{url}: {rows} rows, former {former}, {victims or 'server'} killed at {at}"
        self._fresh()
        if former:
            save(url, former, rows, self.writer)
        self._fresh()
        outcomes, was_killed = self._save(url, rows, victims, at)
        self.kills += was_killed
        what = f"{what}, {outcomes}"
        self._fresh()
        try:
            version: int | None = loaded(url, rows, self.writer)
        except AssertionError as error:
            self.breaches.append(f"{what}: {error}")
            return
        except BaseException as error:
            version = None
            if "no checkpoint" not in str(cause_of(error)):
                self.breaches.append(f"{what}: {cause_of(error)}")
        self.found[str(version)] = self.found.get(str(version), 0) + 1
        if version not in (former, 2) or ("returned" in outcomes and version != 2):
            self.breaches.append(f"{what}: version {version} is there")
        if "hangs" in outcomes:
            self.breaches.append(f"{what}: a rank hangs")
        try:
            save(url, 3, rows, self.writer)
            assert loaded(url, rows, self.writer) == 3
            assert_only_one(url, writer=self.writer)
        except BaseException as error:
            self.breaches.append(f"{what}: the next save: {cause_of(error)!r}")

    def _fresh(self) -> None:
        self.proxy.forget()
        PROCESS.file_systems.clear()

    def _save(
        self, url: str, rows: int, victims: tuple[int, ...], at: int
    ) -> tuple[list[str], bool]:
        variables = self.server.environment(self.proxy.endpoint)
        store = self.forks.store.port, str(self.forks.next_number())
        ranks = [
            self.forks.start(save_on_a_rank, rank, 2, store, variables, url, rows, self.writer)
            for rank in range(2)
        ]
        restarted: list[threading.Thread] = []
        killed = threading.Event()

        def restart() -> None:
            self.server.kill()
            self.server.start()

        def kill(request: Request) -> bool:
            if killed.is_set() or len(self.proxy.requests) <= at:
                return False
            killed.set()
            for rank in victims:
                os.kill(ranks[rank][0].pid, signal.SIGKILL)
            if not victims:
                restarted.append(threading.Thread(target=restart))
                restarted[0].start()
            return True

        # Half of the requests arrive, though their sender is dead.
        kind = self.rng.choice(["reset", "delay"])
        try:
            for _, pipe in ranks:
                assert pipe.poll(START_S), "a rank does not start"
                assert pipe.recv() == "ready"
            self._fresh()
            self.proxy.add(Fault(kind, when=kill))  # type: ignore[arg-type]
            for _, pipe in ranks:
                pipe.send("go")
            deadline = time.monotonic() + SAVE_S
            outcomes = [self._outcome(pipe, deadline) for _, pipe in ranks]
        finally:
            for process, pipe in ranks:
                process.kill()
                process.join()
                pipe.close()
            for thread in restarted:
                thread.join()
        return outcomes, killed.is_set()

    @staticmethod
    def _outcome(pipe: connection.Connection, deadline: float) -> str:
        try:
            if not pipe.poll(max(deadline - time.monotonic(), 0)):
                return "hangs"
            return str(pipe.recv())
        except (EOFError, ConnectionResetError):
            return "killed"


def _job(pipe: connection.Connection, variables: dict[str, str]) -> None:
    """A job: saves what it is sent, and sends what became of it."""
    os.environ.update(variables)
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            url, version, delay, options = pipe.recv()
            time.sleep(delay)
            try:
                save(url, version, **options)
            except BaseException as error:
                pipe.send(f"{type(cause_of(error)).__name__}: {cause_of(error)}")
            else:
                pipe.send("")


@dataclass
class RaceCampaign:
    """Jobs save one checkpoint at the same time, each through a proxy of its own.

    In half of the races, no job commits before all want to: then exactly one may. ``options`` are
    those of every save.
    """

    server: StoreServer
    folder: str
    rng: random.Random
    options: dict[str, Any] = field(default_factory=dict)
    breaches: list[str] = field(default_factory=list)
    winners: list[int] = field(default_factory=list)

    def run(self, races: int) -> None:
        """Runs races of two jobs, and of three."""
        forks = Forks()
        with contextlib.ExitStack() as stack:
            proxies = [stack.enter_context(StoreProxy(self.server.endpoint)) for _ in range(3)]
            jobs = []
            for proxy in proxies:
                process, pipe = forks.start(_job, self.server.environment(proxy.endpoint))
                stack.callback(process.join)
                stack.callback(process.kill)
                jobs.append(pipe)
            for pipe in jobs:
                assert pipe.poll(START_S)
                assert pipe.recv() == "ready"
            for number in range(races):
                count = 3 if number % 5 == 4 else 2
                self._race(f"{self.folder}/{number}", number, proxies[:count], jobs[:count])

    def _race(
        self,
        url: str,
        number: int,
        proxies: list[StoreProxy],
        jobs: list[connection.Connection],
    ) -> None:
        is_first = number % 3 == 2
        overlaps = number % 2 == 0
        if not is_first:
            PROCESS.file_systems.clear()
            save(url, 1, **self.options)
        gate = threading.Barrier(len(jobs))
        for proxy in proxies:
            proxy.forget()
            if overlaps:
                proxy.add(Fault("delay", requests=("put",), path=COMMITS, when=_wait(gate)))
        keeps = number % 4 == 0 and is_first  # The last job may not replace a checkpoint.
        options = [dict(self.options) for _ in jobs]
        if keeps:
            options[-1]["overwrite"] = False
        for version, pipe in enumerate(jobs, 2):
            delay = 0.0 if overlaps else self.rng.uniform(0, 0.1)
            pipe.send((url, version, delay, options[version - 2]))
        outcomes = []
        for pipe in jobs:
            assert pipe.poll(SAVE_S), f"{url}: a job hangs"
            outcomes.append(pipe.recv())
        what = f"{url}: first {is_first}, overlap {overlaps}, keeps {keeps}, {outcomes}"
        winners = [version for version, error in enumerate(outcomes, 2) if not error]
        self.winners += winners if len(winners) == 1 else []
        if not winners or (overlaps and len(winners) != 1):
            self.breaches.append(f"{what}: {winners} have committed")
        for error in filter(None, outcomes):
            is_told = "another save" in error or "already exists" in error
            if not is_told or url not in error:
                self.breaches.append(f"{what}: the error of a loser says nothing of the winner")
        PROCESS.file_systems.clear()
        try:
            writer = self.options.get("writer", FastWriter)
            version = loaded(url, writer=writer)
            if version not in winners:
                self.breaches.append(f"{what}: version {version} is there")
            assert_only_one(url, 1 if writer is FastWriter else 3, writer)
        except BaseException as error:
            self.breaches.append(f"{what}: {cause_of(error)!r}, {Location(url).names()}")


def _wait(gate: threading.Barrier) -> Any:
    """Holds the first request until all jobs have one."""
    has_waited = threading.Event()

    def wait(request: Request) -> bool:
        if not has_waited.is_set():
            has_waited.set()
            with contextlib.suppress(threading.BrokenBarrierError):
                gate.wait(30)
        return False

    return wait
