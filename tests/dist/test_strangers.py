"""Strangers at the ports of ranks disturb no call, and run no code even with the group's secret."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import re
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from failing_ranks import AMPLE_S, LIMIT_S, own_state
from ranks import Worlds
from support.exchanging import Exchanging
from support.logs import logged
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

import torch_ckpt
from torch_ckpt.coordination.addresses import own_addresses
from torch_ckpt.coordination.connect import Deadline, connect
from torch_ckpt.coordination.connections import store_of
from torch_ckpt.coordination.contributions import (
    Contribution,
    packed_answer,
    packed_contributions,
)
from torch_ckpt.coordination.group import group_of
from torch_ckpt.coordination.peer import Kind, Peer
from torch_ckpt.errors import CheckpointError
from torch_ckpt.storage import exchange

pytestmark = pytest.mark.timeout(120)

LATE_S = 1.5  # By how much the last rank is late, so that strangers are ahead of its connection.
QUICK_S = 10.0  # From the arrival of the last rank to the end of a small save, if busy.


def listening() -> dict[str, tuple[str, int]]:
    """Returns inode -> address of the TCP sockets at which this process listens."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            inodes |= set(re.findall(r"^socket:\[(\d+)\]", target))
    found = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, _, port = fields[1].partition(":")
                words = [host[at : at + 8] for at in range(0, len(host), 8)]
                packed = b"".join(bytes.fromhex(word)[::-1] for word in words)
                found[fields[9]] = socket.inet_ntop(family, packed), int(port, 16)
    return found


class Watch:
    """Finds the sockets at which this process begins to listen, and calls a function with each."""

    def __init__(self, visit: Callable[[tuple[str, int]], None] = lambda _: None) -> None:
        self.found: dict[str, tuple[str, int]] = {}
        self._visit = visit
        self._before = listening()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ends.wait(0.02):
            for inode, address in listening().items():
                if inode not in self._before and inode not in self.found:
                    self.found[inode] = address
                    self._visit(address)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


class Strangers:
    """Connections of other programs to each address of a rank."""

    def __init__(self, silent: int, noisy: int) -> None:
        self.silent, self.noisy = silent, noisy
        self.connections: list[socket.socket] = []

    def __call__(self, address: tuple[str, int]) -> None:
        host = address[0].replace("0.0.0.0", "127.0.0.1")
        with contextlib.suppress(OSError):  # The rank has finished connecting.
            for number in range(self.silent + self.noisy):
                connection = socket.create_connection((host, address[1]), 5)
                self.connections.append(connection)
                if number < self.noisy:
                    connection.sendall([b"GET / HTTP/1.0\r\n\r\n", b"\0" * 4096, b"!"][number % 3])


def first_save(path: Path, silent: int, noisy: int) -> list[str]:
    """The first call of a group, whose last rank is late. Returns what the rank logged."""
    group = dist.new_group(backend="gloo")
    strangers = Strangers(silent, noisy)
    with logged() as lines, Watch(strangers) as watch:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(LATE_S)
        begin = time.monotonic()
        torch_ckpt.save(
            own_state(dist.get_rank(), "new"),
            checkpoint_id=path,
            process_group=group,
            timeout_s=AMPLE_S,
        )
        assert time.monotonic() - begin < LATE_S + QUICK_S
    if dist.get_rank() == 0:
        assert watch.found
        assert len(strangers.connections) >= silent + noisy
    for connection in strangers.connections:
        connection.close()
    return [line for line in lines if "saved" not in line]


@pytest.mark.thin("30-10-2", "0-0-3")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("silent", "noisy"), [(4, 0), (30, 10), (300, 30), (0, 0)])
def test_a_first_save_beside_strangers_changes_nothing_but_a_log_line(
    worlds: Worlds, tmp_path: Path, silent: int, noisy: int, ranks: int
) -> None:
    lines = worlds.run(ranks, first_save, tmp_path / "step", silent, noisy, timeout_s=LIMIT_S)[0]
    if not silent + noisy:
        assert lines == []
        return
    (line,) = lines
    count = int(re.search(r"refused (\d+) connections of other programs", line)[1])  # type: ignore[index]
    assert count >= silent + noisy


def addresses_of_a_first_save(path: Path, interface: str | None) -> list[tuple[str, int]]:
    group = dist.new_group(backend="gloo")
    variables = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
    with mock.patch.dict(os.environ, variables), Watch() as watch:
        if interface is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        if dist.get_rank():
            time.sleep(LATE_S)
        torch_ckpt.save(own_state(dist.get_rank(), "new"), checkpoint_id=path, process_group=group)
    return list(watch.found.values())


def test_ranks_listen_at_the_addresses_that_they_publish(worlds: Worlds, tmp_path: Path) -> None:
    hosts = {host for host, _ in worlds.run(2, addresses_of_a_first_save, tmp_path, None)[0]}
    assert hosts
    assert hosts <= set(own_addresses(None))
    assert not hosts & {"0.0.0.0", "::"}


def test_ranks_listen_at_the_interface_of_gloo(worlds: Worlds, tmp_path: Path) -> None:
    hosts = {host for host, _ in worlds.run(2, addresses_of_a_first_save, tmp_path, "lo")[0]}
    assert "127.0.0.1" in hosts
    assert hosts <= {"127.0.0.1", "::1"}


# ---- Strangers that have read the secret from the store ----


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def named(module: str, name: str, *arguments: str) -> bytes:
    """Returns a pickle that calls a function of any name with texts."""
    text = b"".join(b"\x8c" + bytes([len(a)]) + a.encode() for a in (module, name))
    texts = b"".join(b"\x8c" + bytes([len(a)]) + a.encode() for a in arguments)
    return b"\x80\x04" + text + b"\x93(" + texts + b"tR."


def payloads(marker: Path) -> dict[str, bytes]:
    """Returns pickles that make a file at ``marker``, by the ways that a pickle has."""
    touch = f"touch {marker}"
    expression = f"__import__('os').system({touch!r})"
    archive = io.BytesIO()
    torch.save(Call(os.system, touch), archive)
    legacy = io.BytesIO()
    torch.save(Call(os.system, touch), legacy, _use_new_zipfile_serialization=False)
    module = marker.parent / "imported_by_a_stranger.py"
    module.write_text(f"open({str(marker)!r}, 'w')\nclass Loss(Exception): pass\n")
    inner = pickle.dumps(Call(os.system, touch))
    return {
        "os.system": inner,
        "builtins.eval": pickle.dumps(Call(eval, expression)),
        "subprocess.Popen": named("subprocess", "Popen", f"/bin/{touch}".split()[0], str(marker)),
        "torch.storage._load_from_bytes": pickle.dumps(
            Call(torch.storage._load_from_bytes, archive.getvalue())
        ),
        "_load_from_bytes of the old format": pickle.dumps(
            Call(torch.storage._load_from_bytes, legacy.getvalue())
        ),
        "pickle._loads": pickle.dumps(Call(pickle._loads, inner)),  # type: ignore[attr-defined]
        "a name with dots": named("torch_ckpt.errors", "contextlib.os.system", touch),
        "import of a module": named("imported_by_a_stranger", "Loss", ""),
        "a class with a constructor": named("logging", "FileHandler", str(marker)),
        "a function within a class": named("pathlib", "Path.touch", str(marker)),
    }


NAMES = [
    "os.system",
    "builtins.eval",
    "subprocess.Popen",
    "torch.storage._load_from_bytes",
    "_load_from_bytes of the old format",
    "pickle._loads",
    "a name with dots",
    "import of a module",
    "a class with a constructor",
    "a function within a class",
]


def send(peer: Peer, kind: int, body: list[Any]) -> None:
    peer.queue(kind, 0, 0, tuple(body))
    while peer.has_outgoing:
        peer.write()


def call_beside_a_stranger(folder: Path, way: str, name: str) -> str | None:
    """One rank is a stranger that has read the secret, and sends a pickle in the place of a rank.

    Args:
        folder: Where the pickle would make a file.
        way: ``"value"`` and ``"error"`` to the coordinator, ``"answer"`` of the coordinator.
        name: Which pickle.
    """
    process_group, rank = dist.new_group(backend="gloo"), dist.get_rank()
    marker = folder / "executed"
    sys.path.insert(0, str(folder))
    is_stranger = rank == (0 if way == "answer" else 1)
    if is_stranger:
        evil = payloads(marker)[name]
        deadline = Deadline("planning")
        deadline.begin(AMPLE_S, "planning")
        store = dist.PrefixStore("0", store_of(process_group)())
        joined = connect(store, rank, [0, 1], deadline, lambda: False)
        if way == "answer":
            peer = Peer(1, joined.children[1])
            while peer.read() is None:  # The contribution of the other rank.
                time.sleep(0.01)
            send(peer, Kind.ANSWER, packed_answer([memoryview(evil)], array("Q", [0])))
        else:
            peer = Peer(0, joined.parent[1])  # type: ignore[index]
            has_raised = way == "error"
            own = {1: Contribution(AMPLE_S, 0.0, evil, has_raised)}
            send(peer, Kind.CONTRIBUTIONS, packed_contributions("planning", own, 0.0))
    text = None
    if not is_stranger:
        group = group_of(process_group)
        with pytest.raises(CheckpointException) as caught, group.call(AMPLE_S) as call:
            call.all_reduce("plan", lambda: "value", list)
        ((sender, (cause, _)),) = caught.value.failures.items()
        assert isinstance(cause, CheckpointError)
        text = f"{sender}: {cause}"
    dist.barrier()
    time.sleep(0.2)  # A command that was started.
    assert not marker.exists()
    return text


@pytest.mark.thin(1)
@pytest.mark.parametrize("way", ["value", "error", "answer"])
@pytest.mark.parametrize("name", NAMES)
def test_a_stranger_with_the_secret_executes_nothing(
    worlds: Worlds, tmp_path: Path, way: str, name: str
) -> None:
    found = worlds.run(2, call_beside_a_stranger, tmp_path, way, name, timeout_s=LIMIT_S)
    (text,) = [text for text in found if text is not None]
    sender = 0 if way == "answer" else 1
    assert text.startswith(f"{sender}: ")
    assert f"rank {sender}" in text
    if "." in name:
        assert "torch.serialization.add_safe_globals" in text or "_load_from_bytes" in name


# ---- Plans of custom planners ----


class Note:
    """A class that messages do not allow: pickle could build it with any attributes."""


@dataclasses.dataclass(frozen=True)
class NotedPlan(SavePlan):
    note: Any = None


class NotingPlanner(DefaultSavePlanner):
    """Adds an object of its own to the plans of all ranks."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.note = note

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return NotedPlan(plan.items, planner_data=plan.planner_data, note=self.note)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        notes = [cast(NotedPlan, plan).note for plan in all_plans]
        plans, metadata = super().create_global_plan(all_plans)
        assert [type(note) for note in notes] == [type(self.note)] * len(plans)
        return plans, metadata


def save_with_notes(path: Path, kind: str, is_allowed: bool) -> str | None:
    note = {"ordinary": Note(), "scalar": np.int64(dist.get_rank()), "text": "note"}[kind]
    state = own_state(dist.get_rank(), "new")
    with torch.serialization.safe_globals([Note] if is_allowed else []):
        try:
            torch_ckpt.save(
                state, checkpoint_id=path, planner=NotingPlanner(note), timeout_s=AMPLE_S
            )
        except CheckpointException as error:
            return " ".join(str(cause) for _, (cause, _) in sorted(error.failures.items()))
    return None


@pytest.mark.parametrize("kind", ["ordinary", "scalar", "text"])
@pytest.mark.parametrize("is_allowed", [False, True])
def test_an_object_in_a_plan_arrives_or_the_save_fails_on_all(
    worlds: Worlds, tmp_path: Path, kind: str, is_allowed: bool
) -> None:
    text = worlds.agree(3, save_with_notes, tmp_path, kind, is_allowed, timeout_s=LIMIT_S)
    if is_allowed or kind != "ordinary":
        assert text is None
        return
    for rank in range(3):
        assert f"rank {rank} sent an object of test_strangers.Note." in text
    assert "torch.serialization.add_safe_globals" in text
    assert list(tmp_path.iterdir()) == []


def save_a_step_of_numpy(path: Path) -> int | None:
    run = torch_ckpt.Run(path, timeout_s=AMPLE_S)
    run.save(np.int64(3), own_state(dist.get_rank(), "new"))  # type: ignore[arg-type]
    step = run.latest_step()
    run.close()
    return step


def test_a_step_may_be_a_number_of_numpy(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.agree(2, save_a_step_of_numpy, tmp_path) == 3


# ---- Strangers in an exchange of reads ----


class WithoutFiles(Exchanging):
    """Receives all bytes from other ranks."""

    def _reachable_files(self) -> frozenset[str]:
        return frozenset()


def load_beside_a_stranger(path: Path, stranger: int, how: str) -> str:
    """A rank has the connections of an exchange, and not its secret; it believes the others.

    Only other ranks can read the data files.
    """
    rank = dist.get_rank()
    reader = (WithoutFiles if rank == stranger else Exchanging)(path)
    state = {"w": torch.full((1 << 16,), -1.0)}
    unproven, swapped = exchange._unproven, exchange._swapped

    def believe(group: Any, assigned: exchange.Assigned, timeout: Any) -> str:
        if how == "stalls":
            time.sleep(2 * STALLED_S)
        else:
            unproven(group, dataclasses.replace(assigned, secret=b"guess"), timeout)
        return ""

    def reflect(group: Any, own: dict[int, bytes], nbytes: int, tag: int, ends_at: float) -> Any:
        other, data = 1 - stranger, torch.empty(nbytes, dtype=torch.uint8)
        group.recv([data], other, tag).wait()
        group.send([data], other, tag).wait()
        return {other: bytes(data.tolist())}

    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(torch_ckpt.storage.reader, "these_processes", return_value=""))
        if rank == stranger:
            stack.enter_context(patch(exchange, "_unproven", believe))
            lies = reflect if how == "reflects" else swapped
            stack.enter_context(patch(exchange, "_swapped", lies))
        with pytest.raises(CheckpointException) as caught:
            torch_ckpt.load(state, storage_reader=reader, timeout_s=STALLED_S)
    assert time.monotonic() - began < STALLED_S + QUICK_S
    if rank == stranger:
        assert state["w"].eq(-1.0).all()  # It has received no weight.
    return " ".join(str(cause) for cause, _ in caught.value.failures.values())


STALLED_S = 4.0


@pytest.mark.parametrize("how", ["guesses", "reflects", "stalls"])
@pytest.mark.parametrize("stranger", [0, 1])
def test_a_stranger_in_an_exchange_of_reads_receives_no_weights(
    worlds: Worlds, tmp_path: Path, stranger: int, how: str
) -> None:
    torch_ckpt.save({"w": torch.arange(float(1 << 16))}, checkpoint_id=tmp_path)
    for text in worlds.run(2, load_beside_a_stranger, tmp_path, stranger, how, timeout_s=LIMIT_S):
        if how != "stalls":
            assert f"another program has the connections of rank {stranger}" in text
            assert "set GLOO_SOCKET_IFNAME" in text
