"""Forked children, as the workers of a ``DataLoader`` are, keep no descriptor of their parent."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.agents import agent_pid
from waits import SOON_S, until

import torch_ckpt
from torch_ckpt.agent import AgentOptions, SnapshotAgent
from torch_ckpt.agent.memory import agent_lock, has_agent, open_folder, run_of, short_path
from torch_ckpt.agent.process import Agent
from torch_ckpt.agent.rank_process import RankProcess
from torch_ckpt.agent.replica_receiver import ReplicaReceiver
from torch_ckpt.agent.replica_wire import dial
from torch_ckpt.coordination.listeners import Listeners
from torch_ckpt.coordination.loop import Loop

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory")]

PACKAGE = Path(torch_ckpt.__file__).parent
OPENING = {
    *("socket.socket", "socket.create_connection", "socket.create_server", "socket.socketpair"),
    *("os.open", "os.pipe", "os.pipe2", "os.pidfd_open", "os.eventfd", "os.memfd_create"),
    *("selectors.DefaultSelector", "tempfile.TemporaryFile", "context.Pipe"),
}
"""Calls that open a descriptor."""

OWNING = {"PROCESS.own", "Descriptor"}
WRAPPED = {"coordination/loop.py:os.pipe2"}
"""Calls whose result the next lines pass to ``PROCESS.own``."""


@contextlib.contextmanager
def forked() -> Iterator[int]:
    """A child that does nothing until the block ends."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            signal.pause()
        os._exit(0)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def descriptors(pid: int) -> dict[int, str]:
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


class _Loop(Loop):
    def due(self) -> None:
        return None

    def receive(self, peer: Any, message: Any) -> None:
        pass

    def disconnect(self, peer: Any) -> None:
        pass


def client(run: Path, stack: ExitStack) -> int:
    stack.callback(SnapshotAgent(run).close, drop=True)
    return 1


def agent(run: Path, stack: ExitStack) -> int:
    folder = open_folder(run_of(run))
    served = Agent(run_of(run), folder, AgentOptions(linger_s=SOON_S))
    stack.enter_context(agent_lock(folder))
    thread = threading.Thread(target=served.serve)
    thread.start()
    stack.callback(thread.join, SOON_S)
    until((folder / "agent.socket").exists)
    stack.callback(SnapshotAgent(run).close, drop=True)
    return 5  # Its lock, its listener, both ends of the connection, and the pidfd.


def replicas(run: Path, stack: ExitStack) -> int:
    listeners = Listeners([("127.0.0.1", 0)], 0)
    receiver = ReplicaReceiver(open_folder(run_of(run)), b"r" * 16, b"s" * 16, 1, listeners)
    stack.callback(receiver._accepting.join, SOON_S)
    stack.callback(receiver.close)
    stack.callback(dial(listeners.addresses, listeners.secret, 1).close)
    until(lambda: receiver._connection is not None)
    return 4  # The listener, its selector, and both ends of the connection.


def loop(run: Path, stack: ExitStack) -> int:
    stack.callback(_Loop().close)
    return 3


def folder_name(run: Path, stack: ExitStack) -> int:
    deep = run / ("x" * 100)
    deep.mkdir(parents=True)
    stack.enter_context(short_path(deep))
    return 1


def rank_process(run: Path, stack: ExitStack) -> int:
    stack.callback(getattr, RankProcess(0, b"", os.getpid()), "is_alive")
    return 1


OPENED: list[Callable[[Path, ExitStack], int]] = [
    *(client, agent, replicas, loop, folder_name, rank_process),
]


@pytest.mark.parametrize("opened", OPENED)
def test_a_forked_child_has_no_copy_of_a_descriptor(
    run: Path, opened: Callable[[Path, ExitStack], int]
) -> None:
    before = descriptors(os.getpid())
    with ExitStack() as stack, forked() as earlier:
        count = opened(run, stack)
        own = descriptors(os.getpid()).items() - before.items()
        assert len(own) >= count
        with forked() as later:
            until(lambda: not own & descriptors(later).items())
        assert not own & descriptors(earlier).items()


def test_a_forked_child_holds_no_lock_of_its_parent(run: Path) -> None:
    folder = open_folder(run_of(run))
    with ExitStack() as stack:
        with agent_lock(folder):
            stack.enter_context(forked())
            assert has_agent(folder)
        until(lambda: not has_agent(folder))


def test_a_forked_child_keeps_no_memory_of_a_slot_that_the_agent_has_freed(run: Path) -> None:
    agent = SnapshotAgent(run)
    agent.reserve({"w": torch.ones(1000)})
    with forked() as child:
        maps = Path(f"/proc/{child}/maps").read_text()
        assert os.fspath(agent.folder) not in maps
        agent.close(drop=True)


def test_a_forked_child_that_drops_a_slot_unmaps_no_memory_of_its_own(run: Path) -> None:
    agent = SnapshotAgent(run)
    assert agent.stage({"w": torch.ones(1000)}, run / "1", step=1) is not None
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            own = [torch.ones(1 << 20) for _ in range(64)]  # Perhaps where the slot is.
            agent.withdraw()
            agent._slots.unmap()
            os._exit(0 if all(bool((each == 1).all()) for each in own) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    agent.close(drop=True)


def test_whatever_opens_a_descriptor_has_forked_children_close_it() -> None:
    missed, seen = [], set()
    for path in (
        path for name in ("agent", "coordination") for path in (PACKAGE / name).rglob("*.py")
    ):
        where = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        owned = {
            id(inner)
            for node in calls
            if ast.unparse(node.func) in OWNING or ast.unparse(node).startswith("map(PROCESS.own,")
            for argument in node.args
            for inner in ast.walk(argument)
        }
        for node in calls:
            name = ast.unparse(node.func)
            is_opening = name in OPENING or name.endswith(".accept")
            if is_opening and id(node) not in owned:
                seen.add(f"{where}:{name}")
                if f"{where}:{name}" not in WRAPPED:
                    missed.append(f"{where}:{node.lineno}: {name}")
    assert not missed
    assert seen >= WRAPPED


def test_a_run_with_workers_that_raises_is_followed_by_another_with_the_agent(run: Path) -> None:
    state = {"w": torch.ones(1000)}
    with ExitStack() as stack:
        with (
            contextlib.suppress(ZeroDivisionError),
            torch_ckpt.Run(run, asynchronous=True, agent=True) as first,
        ):
            first.save(1, state, persist=False)
            stack.enter_context(forked())
            raise ZeroDivisionError
        pid = agent_pid(run)
        with torch_ckpt.Run(run, asynchronous=True, agent=True) as second:
            assert second.restore(state) == 1  # From memory alone.
            second.save(2, state)
            second.wait()
            assert agent_pid(run) == pid


class Forking:
    """A ``Stateful`` whose ``state_dict()`` forks: the child returns as well."""

    def __init__(self) -> None:
        self.child: int | None = None
        self.w = torch.ones(1000)

    def state_dict(self) -> dict[str, torch.Tensor]:
        if self.child is None:
            self.child = os.fork()
            if self.child:  # The child fails before this process goes on.
                assert os.waitpid(self.child, 0)[1] == 0
        return {"w": self.w}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.w = state["w"]


def in_run(method: str, **options: Any) -> Callable[[Path, dict[str, Any]], object]:
    def call(run: Path, state: dict[str, Any]) -> None:
        with torch_ckpt.Run(run, **options) as opened:
            if method == "save":
                opened.save(2, state)
                opened.wait()
            else:
                assert opened.restore(state) == 1

    return call


def in_dcp(run: Path, state: dict[str, Any]) -> None:
    with torch_ckpt.installed():
        dcp.save(state, checkpoint_id=run / "step-2", no_dist=True)


WITHIN: dict[str, Callable[[Path, dict[str, Any]], object]] = {
    "save": lambda run, state: torch_ckpt.save(state, checkpoint_id=run / "step-2"),
    "async_save": lambda run, state: torch_ckpt.async_save(
        state, checkpoint_id=run / "step-2"
    ).result(),  # type: ignore[union-attr]
    "load": lambda run, state: torch_ckpt.load(state, checkpoint_id=run / "step-1"),
    "installed": in_dcp,
    "Run.save": in_run("save"),
    "Run.save, asynchronous": in_run("save", asynchronous=True),
    "Run.save, agent": in_run("save", asynchronous=True, agent=True),
    "Run.restore": in_run("restore"),
}


@pytest.mark.parametrize("name", WITHIN)
def test_a_child_that_is_forked_within_a_state_dict_leaves_the_call_to_its_parent(
    run: Path, name: str
) -> None:
    torch_ckpt.save({"s": {"w": torch.ones(1000)}}, checkpoint_id=run / "step-1")
    forking = Forking()
    try:
        WITHIN[name](run, {"s": forking})
    except BaseException as error:
        if forking.child == 0:
            os._exit(0 if "forked" in str(error) else 2)
        raise
    if forking.child == 0:
        os._exit(1)
    loaded = {"s": {"w": torch.zeros(1000)}}
    step = "step-1" if name in ("load", "Run.restore") else "step-2"
    torch_ckpt.load(loaded, checkpoint_id=run / step)
    assert torch.equal(loaded["s"]["w"], torch.ones(1000))
    if step == "step-2":  # Files of one save only.
        assert len(list((run / step).glob("*.distcp"))) == 1
