"""Agents of several machines: what they save together, and what each loses, alone or with others.

Each folder of shared memory stands for a machine; so ranks with folders of their own
are on machines of their own, here two of two ranks each.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from machines import RANKS_PER_MACHINE, memory_of, on_machine
from part_saves import stage_on
from ranks import Ranks
from states import assert_same, assert_stored
from support.freezing import freeze
from support.run_steps import names_in_run
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from waits import until, until_committed

from torch_ckpt import CheckpointError, Run
from torch_ckpt.agent import AgentOptions, SnapshotAgent, SnapshotReader, joint_save
from torch_ckpt.agent.memory import run_of
from torch_ckpt.errors import CancelledError

pytestmark = pytest.mark.timeout(300)

SOON_S = 60.0  # For a machine that is busy.
RANKS = 4  # Two of each machine.
LATE_S = 1.5


@pytest.fixture(autouse=True)
def memory(memory: Path) -> Path:
    """Shared memory of this test alone, with a folder for each machine."""
    return memory


def agent_pid(memory: Path, machine: int, run: Path) -> int:
    folder = memory_of(memory, machine) / f"torch_ckpt-{os.getuid()}" / run_of(run).hex()
    return int((folder / "agent.lock").read_text())


@functools.cache
def agent_of(run: Path, memory: Path, peers_timeout_s: float = 600.0) -> SnapshotAgent:
    """That of this rank, which has one for as long as it lives."""
    on_machine(memory)
    return SnapshotAgent(
        run, options=AgentOptions(peers_timeout_s=peers_timeout_s), timeout_s=SOON_S
    )


def state_of(step: int, columns: int = 5, dim: int = 0) -> dict[str, Any]:
    """Shards of uneven sizes, replicas, what one machine alone has, and an object."""
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    rows = torch.arange(7 * columns, dtype=torch.float32).view(7, columns) + 1000 * step
    state = {
        "rows": distribute_tensor(rows.clone(), mesh, [Shard(dim)]),
        "all": distribute_tensor(rows.clone(), mesh, [Replicate()]),
        "step": step,
    }
    if dist.get_rank() < RANKS_PER_MACHINE:
        state["first machine's"] = torch.full((3,), float(step))
    return state


def stage(run: Path, memory: Path, step: int, ranks: list[int], persist: bool) -> None:
    """Stages on some ranks only."""
    agent = agent_of(run, memory)
    stage_on(ranks, agent, state_of(step), run / f"step-{step}", step=step, persist=persist)
    dist.barrier()


def save(run: Path, memory: Path, step: int, columns: int = 5) -> None:
    agent = agent_of(run, memory)
    staged = agent.stage(state_of(step, columns), run / f"step-{step}", step=step)
    assert staged is not None
    agent.persist(staged)


def load_from_disk(run: Path, step: int, columns: int = 5) -> None:
    """By stock DCP, and by this package's reader."""
    assert_stored(run / f"step-{step}", state_of(step, columns))


def load_from_memory(run: Path, memory: Path, step: int) -> None:
    """Finds this step in memory, and nothing else."""
    found = agent_of(run, memory).newest()
    assert found is not None
    assert found.step == step
    assert len(found.slots) == RANKS_PER_MACHINE
    state = state_of(-1)
    dcp.load(state, storage_reader=SnapshotReader(found))
    assert_same(state, state_of(step))


def names_in(path: Path) -> set[str]:
    return set(os.listdir(path)) if path.exists() else set()


def assert_only_whole(run: Path, steps: list[int]) -> None:
    """These steps are committed, and nothing is beside them; all others have left no data."""
    for path in map(run.__truediv__, names_in_run(run)):
        names = names_in(path)
        if int(path.name.removeprefix("step-")) in steps:
            assert ".metadata" in names
            assert any(name.startswith(".index.") for name in names)
            assert not [name for name in names if name.startswith(".agents")], names
        else:
            assert not [n for n in names if n == ".metadata" or n.endswith(".distcp")], names


def test_two_machines_save_what_stock_dcp_loads_and_start_again_from_memory(
    tmp_path: Path, memory: Path
) -> None:
    run = tmp_path / "run"
    left = run / "step-1" / ".agents-0123456789abcdef-1.lists"  # Left by lost machines.
    left.parent.mkdir(parents=True)
    left.write_bytes(b"")
    with Ranks(RANKS) as world:
        for step in (1, 2):
            world.run(save, run, memory, step)
            world.run(load_from_disk, run, step)
        world.run(stage, run, memory, 3, list(range(RANKS)), False)
        assert_only_whole(run, [1, 2])
        pids = {agent_pid(memory, machine, run) for machine in range(2)}
        assert len(pids) == 2
        world.kill()
    with Ranks(RANKS) as world:
        world.run(load_from_memory, run, memory, 3)
        world.run(save, run, memory, 4)
        world.run(load_from_disk, run, 4)


@pytest.mark.slow
@pytest.mark.parametrize("persist", [True, False])
def test_what_one_machine_alone_has_completed_does_not_count(
    tmp_path: Path, memory: Path, persist: bool
) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        world.run(stage, run, memory, 1, list(range(RANKS)), False)
        world.run(stage, run, memory, 2, [0, 1, 2], persist)
        world.kill()
    until_committed(run / "step-1")  # As the newest that both have.
    with Ranks(RANKS) as world:
        world.run(load_from_memory, run, memory, 1)
        world.run(load_from_disk, run, 1)
        # Not kept waiting by what will never be.
        world.run(save, run, memory, 3, timeout_s=joint_save.SHUTDOWN_WAIT_S / 2)
        world.run(load_from_disk, run, 3)
    assert_only_whole(run, [1, 3])


def find_nothing(run: Path, memory: Path) -> None:
    assert agent_of(run, memory).newest() is None


@pytest.mark.slow
def test_machines_that_have_nothing_in_common_restore_nothing(tmp_path: Path, memory: Path) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        world.run(stage, run, memory, 1, [2, 3], True)
        world.run(stage, run, memory, 2, [0, 1], True)
        world.kill()
    with Ranks(RANKS) as world:
        world.run(find_nothing, run, memory)
    assert_only_whole(run, [])


def save_step(run: Path, memory: Path, step: int, persist: bool) -> None:
    on_machine(memory)
    made = Run(run, asynchronous=True, agent=True, timeout_s=SOON_S)
    assert made.restore(state_of(0)) is None
    made.save(step, state_of(step), persist=True)
    made.wait()
    made.save(step + 1, state_of(step + 1), persist=persist)
    made.wait()


def wanted(how: str) -> dict[str, Any]:
    """Other shards, or what another machine alone has had."""
    state = state_of(-1, dim=1 if how == "shards" else 0)
    if how == "names":
        state["first machine's"] = torch.zeros(3)
    return state


def load_elsewhere(run: Path, memory: Path, how: str) -> None:
    on_machine(memory)
    expected = state_of(2, dim=1 if how == "shards" else 0)
    expected["first machine's"] = torch.full((3,), 2.0)
    found = agent_of(run, memory).newest()
    assert found is not None
    state = wanted(how)
    dcp.load(state, storage_reader=SnapshotReader(found))
    assert_same(state, {name: expected[name] for name in state})
    agent_of(run, memory).leave()
    made = Run(run, asynchronous=True, agent=True, timeout_s=SOON_S)
    state = wanted(how)
    assert made.restore(state) == 2
    assert_same(state, {name: expected[name] for name in state})
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["shards", "names"])
@pytest.mark.parametrize("ranks", [RANKS, RANKS + RANKS_PER_MACHINE])
def test_who_wants_what_another_machine_has_gets_it_from_there(
    tmp_path: Path, memory: Path, how: str, ranks: int
) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        world.run(save_step, run, memory, 1, False)
        world.kill()
    with Ranks(ranks) as world:
        world.run(load_elsewhere, run, memory, how)


def restore_with_run(run: Path, memory: Path) -> None:
    on_machine(memory)
    made = Run(run, asynchronous=True, agent=True, timeout_s=SOON_S)
    assert made.latest_step() == 2
    state = state_of(-1)
    assert made.restore(state) == 2
    assert_same(state, state_of(2))
    made.close()


def test_a_run_goes_on_from_what_is_in_memory_alone(tmp_path: Path, memory: Path) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        world.run(save_step, run, memory, 1, False)
        assert not (run / "step-2").exists()
        world.kill()
    with Ranks(RANKS) as world:
        world.run(restore_with_run, run, memory)


def restore_from_disk(run: Path, memory: Path) -> None:
    on_machine(memory)
    made = Run(run, asynchronous=True, agent=True, timeout_s=SOON_S)
    state = state_of(-1)
    assert made.restore(state) == 1
    assert_same(state, state_of(1))
    made.close()


@pytest.mark.slow
def test_where_a_machine_is_lost_all_ranks_go_back_to_the_disk(
    tmp_path: Path, memory: Path
) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        world.run(save_step, run, memory, 1, False)
        agent = agent_pid(memory, 1, run)
        freeze(agent)  # Else its ranks would start another, or it save for them.
        world.kill()
    os.kill(agent, signal.SIGKILL)
    shutil.rmtree(memory_of(memory, 1))
    with Ranks(RANKS) as world:
        world.run(restore_from_disk, run, memory)


def save_twice(run: Path, memory: Path, steps: list[int]) -> None:
    for step in steps:
        save(run, memory, step)


def request_on(run: Path, memory: Path, step: int, ranks: list[int]) -> None:
    """Stages on some ranks only, and has their agent wait for the others."""
    agent = agent_of(run, memory)
    path = run / f"step-{step}"
    staged = stage_on(ranks, agent, state_of(step), path, step=step, persist=False)
    if staged is not None:
        threading.Thread(target=agent.persist, args=(staged,), daemon=True).start()
        until(lambda: any(name.endswith(".lists") for name in names_in(path)))
    dist.barrier()


@pytest.mark.thin("0")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_save_that_a_lost_machine_leaves_behind_holds_up_no_later_save(
    tmp_path: Path, memory: Path, lost: int
) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        world.run(save, run, memory, 1)
        world.run(request_on, run, memory, 2, [2, 3] if lost == 0 else [0, 1])
        agent = agent_pid(memory, lost, run)
        freeze(agent)  # Else its ranks would start another.
        world.kill()
    os.kill(agent, signal.SIGKILL)
    shutil.rmtree(memory_of(memory, lost))
    with Ranks(RANKS) as world:
        soon_s = joint_save.SHUTDOWN_WAIT_S - 8.0
        world.run(save_twice, run, memory, [3, 4, 5], timeout_s=soon_s)
        world.run(load_from_disk, run, 5)
    assert_only_whole(run, [1, 3, 4, 5])


def save_without_room(run: Path, memory: Path, persist: bool) -> None:
    """There is none on the second machine."""
    on_machine(memory)
    is_told = dist.get_rank() == 0
    made = Run(run, asynchronous=True, agent=True, timeout_s=SOON_S)
    began = time.monotonic()
    with pytest.warns(UserWarning, match="without") if is_told else contextlib.nullcontext():
        made.save(1, state_of(1, COLUMNS), persist=persist)
    made.wait()
    assert time.monotonic() - began < SOON_S  # And not as long as machines wait for each other.
    assert made.saved == 1
    state = state_of(-1, COLUMNS)
    assert made.restore(state) == 1
    assert_same(state, state_of(1, COLUMNS))
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("persist", [True, False])
def test_where_one_machine_has_no_memory_all_save_without_agents(
    tmp_path: Path, memory: Path, mount_tmpfs: Callable[[str], Path], persist: bool
) -> None:
    run = tmp_path / "run"
    memory_of(memory, 1).symlink_to(mount_tmpfs("size=4m"))
    with Ranks(RANKS) as world:
        world.run(save_without_room, run, memory, persist)
        end = time.monotonic() + SOON_S
        while list(memory_of(memory, 0).glob("*/*")):
            assert time.monotonic() < end
            time.sleep(0.05)
    assert not list((run / "step-1").glob(".agents*"))


def save_on_a_full_disk(run: Path, memory: Path) -> None:
    """A step fails on both machines, and the next one does not."""
    on_machine(memory)
    with Run(run, asynchronous=True, agent=True, timeout_s=SOON_S) as made:
        made.save(1, state_of(1, COLUMNS), metrics={"loss": 1.0} if dist.get_rank() == 0 else None)
        with pytest.raises(CheckpointError, match="step 1 was not saved"):
            made.wait()
        made.save(2, state_of(2))


@pytest.mark.slow
def test_a_step_that_fails_on_several_machines_leaves_no_directory(
    tmp_path: Path, memory: Path, mount_tmpfs: Callable[[str], Path]
) -> None:
    run = mount_tmpfs("size=8m") / "run"
    with Ranks(RANKS) as world:
        world.run(save_on_a_full_disk, run, memory)
        world.run(load_from_disk, run, 2)
    assert names_in_run(run) == ["run-id", "step-2"]


COLUMNS = 1 << 18  # 7 MiB of shards, and of replicas: writing takes a while.


def save_while_killed(run: Path, memory: Path, step: int, machine: int, delay_s: float) -> None:
    agent = agent_of(run, memory)
    staged = agent.stage(state_of(step, COLUMNS), run / f"step-{step}", step=step)
    assert staged is not None
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(delay_s)
        os.kill(agent_pid(memory, machine, run), signal.SIGKILL)
    agent.persist(staged)


@pytest.mark.slow
def test_an_agent_that_is_killed_at_any_moment_is_replaced_and_the_save_completed(
    tmp_path: Path, memory: Path, seed: int
) -> None:
    run = tmp_path / "run"
    rng = random.Random(seed)
    with Ranks(RANKS) as world:
        world.run(save, run, memory, 0, COLUMNS)
        for step in range(1, 5):
            world.run(save_while_killed, run, memory, step, step % 2, rng.uniform(0, 0.3))
            world.run(load_from_disk, run, step, COLUMNS)
        assert_only_whole(run, list(range(5)))


KILLED_AT = """
import os, signal, sys

def killed(owner, name):
    function = getattr(owner, name)
    def wrapped(*args, **kwargs):
        what = args[1] if name == "put" else name
        die("before " + what)
        result = function(*args, **kwargs)
        die("after " + what)
        return result
    setattr(owner, name, wrapped)

def killed_within_publish():
    real = machine_part.publish
    def publish(transaction, files, written):
        if is_at("within publish"):  # As the commit, just before its rename.
            directory, save_id = transaction.target.local_path, transaction.save_id
            for name, content in zip((f".metadata.{save_id}.tmp", f".index.{save_id}"), files):
                (directory / name).write_bytes(content)
        die("within publish")
        return real(transaction, files, written)
    machine_part.publish = publish

KILL = os.path.join(os.environ["TORCH_CKPT_MEMORY"], "kill")

def is_at(moment):
    return os.path.exists(KILL) and open(KILL).read() == moment

def die(moment):
    if is_at(moment):
        os.unlink(KILL)
        os.kill(os.getpid(), signal.SIGKILL)

if "agent" in sys.orig_argv:
    from torch_ckpt.agent import machine_part, manifests, saves
    from torch_ckpt.commits import checkpoint
    killed(manifests.Manifests, "put")
    killed(manifests.Manifests, "clear")
    killed(manifests.Manifests, "remove")
    killed(machine_part, "write_shares")
    killed(machine_part, "publish")
    killed(checkpoint, "collect_garbage")
    killed_within_publish()
    killed(saves.Saves, "_mark_done")
"""

OF_BOTH = ["lists", "write_shares", "manifest", "_mark_done"]
OF_ONE = [["epoch", "publish", "collect_garbage", "clear"], ["remove"]]


def save_until_killed(run: Path, memory: Path, hooks: Path, step: int) -> None:
    if str(hooks) not in os.environ.get("PYTHONPATH", ""):
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(hooks), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    save(run, memory, step)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [0, 1])
def test_an_agent_that_is_killed_at_each_step_is_replaced_and_the_save_completed(
    tmp_path: Path, memory: Path, machine: int
) -> None:
    run = tmp_path / "run"
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(KILLED_AT)
    steps = [f"{when} {what}" for what in OF_BOTH + OF_ONE[machine] for when in ("before", "after")]
    steps += ["within publish"] if machine == 0 else []
    with Ranks(RANKS) as world:
        for number, moment in enumerate(steps):
            memory_of(memory, machine).mkdir(exist_ok=True)
            kill = memory_of(memory, machine) / "kill"
            kill.write_text(moment)
            world.run(save_until_killed, run, memory, hooks, number, timeout_s=SOON_S)
            world.run(load_from_disk, run, number)
            assert not kill.exists(), moment
        assert_only_whole(run, list(range(len(steps))))


GOES_ON_ALONE = """
import sys, torch
from torch_ckpt.agent import SnapshotAgent
agent = SnapshotAgent(sys.argv[1], timeout_s=20)
assert agent.stage({"a": torch.ones(3)}, sys.argv[1] + "/step-9", step=9, persist=False)
agent.close(drop=True)
"""


def leave_on_machine_0(run: Path, memory: Path) -> None:
    if dist.get_rank() < RANKS_PER_MACHINE:
        agent_of(run, memory).close()


@pytest.mark.slow
def test_an_agent_that_brings_the_last_step_to_disk_answers_whoever_starts_again(
    tmp_path: Path, memory: Path
) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        world.run(stage, run, memory, 1, list(range(RANKS)), False)
        os.kill(agent_pid(memory, 1, run), signal.SIGKILL)  # That machine is lost,
        world.run(leave_on_machine_0, run, memory)
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *sys.path])
    subprocess.run(
        [sys.executable, "-c", GOES_ON_ALONE, str(run)],
        env={**os.environ, "PYTHONPATH": path, "TORCH_CKPT_MEMORY": str(memory_of(memory, 0))},
        check=True,
        timeout=SOON_S,
    )


def save_alone(run: Path, memory: Path, ranks: list[int], silent: int) -> None:
    agent = agent_of(run, memory, LATE_S)
    staged = stage_on(ranks, agent, state_of(1), run / "step-1", step=1)
    if staged is not None:
        with pytest.raises(CheckpointError, match=rf"no response from machine {silent} of 2"):
            agent.persist(staged)
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 1])
def test_a_machine_that_never_comes_is_named_in_time(
    tmp_path: Path, memory: Path, silent: int
) -> None:
    run = tmp_path / "run"
    ranks = [0, 1] if silent else [2, 3]
    with Ranks(RANKS) as world:
        world.run(save_alone, run, memory, ranks, silent)
    assert_only_whole(run, [])


def fail_on_one_rank(run: Path, memory: Path) -> str:
    agent = agent_of(run, memory)
    staged = stage_on(range(3), agent, state_of(1), run / "step-1", step=1, silently=False)
    if staged is None:
        return ""
    with pytest.raises(CheckpointError) as raised:
        agent.persist(staged)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_rank_that_fails_holds_up_no_other_machine(tmp_path: Path, memory: Path) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        said = world.run(fail_on_one_rank, run, memory)
        assert re.search(
            r"machine 1 \(.*\): cannot save .*: rank 3 failed or skipped before", said[0]
        )
        assert said[1] == said[0]
        assert said[2].startswith(CancelledError.__name__)
        assert_only_whole(run, [])
        world.run(save, run, memory, 2)
        world.run(load_from_disk, run, 2)


def decline_and_end(run: Path, memory: Path) -> str:
    """The ranks of the second machine, of which one fails, end before anybody else hears of it."""
    agent = agent_of(run, memory)
    staged = stage_on(range(3), agent, state_of(1), run / "step-1", step=1, silently=False)
    if staged is None or dist.get_rank() >= RANKS_PER_MACHINE:
        agent.close()
        return ""
    with pytest.raises(CheckpointError) as raised:
        agent.persist(staged)
    return str(raised.value)


@pytest.mark.slow
def test_an_agent_that_ends_tells_others_what_it_has_declined(tmp_path: Path, memory: Path) -> None:
    with Ranks(RANKS) as world:
        said = world.run(decline_and_end, tmp_path / "run", memory)
    assert all("rank 3 failed or skipped before" in one for one in said[:RANKS_PER_MACHINE])


def fail_to_save(run: Path, memory: Path, step: int) -> str:
    with pytest.raises(CheckpointError) as raised:
        save(run, memory, step, COLUMNS)
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [0, 1])
def test_storage_that_fails_one_machine_fails_the_save_on_all_for_that_reason(
    tmp_path: Path, memory: Path, machine: int
) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        for step in (0, 1):  # After that there are both slots.
            world.run(save, run, memory, step, COLUMNS)
        pid = agent_pid(memory, machine, run)
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        said = world.run(fail_to_save, run, memory, 2)
        assert len(set(said)) == 1, said
        assert re.search(rf"machine {machine} \(.*\): .*\(EFBIG\)", said[0]), said
        assert_only_whole(run, [0, 1])
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        world.run(save, run, memory, 3, COLUMNS)
        world.run(load_from_disk, run, 3, COLUMNS)


SHORTER = """
import sys
from torch_ckpt.cli import main as cli
from torch_ckpt.agent import joint_save
joint_save.SHUTDOWN_WAIT_S = 1.0
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_an_agent_that_waits_for_others_ends_when_it_is_told_to(
    tmp_path: Path, memory: Path
) -> None:
    run = tmp_path / "run"
    memory_of(memory, 0).mkdir()
    agent = subprocess.Popen(
        [sys.executable, "-c", SHORTER, "agent", str(run)],
        env={**os.environ, "TORCH_CKPT_MEMORY": str(memory_of(memory, 0))},
    )
    until(lambda: any(memory.rglob("agent.socket")))
    with Ranks(RANKS) as world:
        world.run(stage, run, memory, 1, [0, 1], True)
        assert agent_pid(memory, 0, run) == agent.pid
        agent.terminate()
        assert agent.wait(SOON_S) == -signal.SIGTERM
        world.kill()
    assert_only_whole(run, [])


def test_a_run_whose_directory_was_moved_begins_anew(tmp_path: Path, memory: Path) -> None:
    for life in ("first", "second"):  # Either finds nothing to restore.
        with Ranks(RANKS) as world:
            world.run(save_step, tmp_path / "run", memory, 1, False)
            world.kill()
        (tmp_path / "run").rename(tmp_path / life)
