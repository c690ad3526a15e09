"""Runs whose agents save to local directories, which the machines do not share.

Each folder of shared memory stands for a machine, and has a local directory of its own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from local_machines import restore, run_on, state_of, steps_in
from machines import memory_of, on_machine
from ranks import RankError, Ranks
from support.freezing import freeze
from support.logs import logged
from waits import until, until_committed

from torch_ckpt import CheckpointError, FastReader, Run
from torch_ckpt.agent import AgentOptions, client
from torch_ckpt.agent.memory import run_of
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import committed_id
from torch_ckpt.runs.background.agent import AgentBackend

pytestmark = pytest.mark.timeout(300)

RANKS = 4  # Two of each machine.
MACHINES = [0, 0, 1, 1]
LOST_S = 120.0  # For agents that are replaced on a machine that is busy.


@pytest.fixture(autouse=True)
def memory(memory: Path) -> Path:
    """Shared memory of this test alone, with a folder for each machine."""
    return memory


@functools.cache
def agents_run(folder: Path, memory: Path, **options: Any) -> Run:
    """That of this rank, which has one for as long as it lives."""
    on_machine(memory)
    options = {"agent": True, "keep_last": 2, **options}
    run = run_on(folder, MACHINES[: dist.get_world_size()], asynchronous=True, **options)
    assert isinstance(run._saves._backend, AgentBackend)
    return run


def is_of_agents(run: Run) -> bool:
    """Whether a run has not fallen back to saves in a thread."""
    return run._saves._backend is not None and run._saves._backend.can_stay_in_memory


def agent_pid(folder: Path, memory: Path, machine: int) -> int:
    here = memory_of(memory, machine) / f"torch_ckpt-{os.getuid()}"
    return int((here / run_of(folder / "run").hex() / "agent.lock").read_text())


def data_files(directory: Path) -> set[str]:
    return {name for name in os.listdir(directory) if name.endswith(".distcp")}


def exchanged_files(folder: Path) -> list[Path]:
    """What agents have left in the directory of the run."""
    return list((folder / "run" / ".agents").rglob("*"))


def check_whole(folder: Path, step: int) -> None:
    """The machines have one save of a step, together."""
    here = [folder / f"machine-{machine}" / f"step-{step}" for machine in (0, 1)]
    assert len({committed_id(Location(path)) for path in here}) == 1
    whole = folder / "whole"
    for path in here:
        shutil.copytree(path, whole, dirs_exist_ok=True)
    rows = torch.arange(7 * 50_000, dtype=torch.float32).view(7, -1) + 1000 * step
    state = {name: torch.zeros_like(rows) for name in ("rows", "columns", "all")}
    dcp.load(state, storage_reader=FastReader(whole), no_dist=True)
    for name, value in state.items():
        assert torch.equal(value, rows), name
    shutil.rmtree(whole)


def save_steps(folder: Path, memory: Path, steps: list[int], options: dict[str, Any]) -> None:
    with agents_run(folder, memory, **options) as run:
        for step in steps:
            run.save(step, state_of(step))
            run.wait()
        assert run.saved == len(steps)
        assert is_of_agents(run)


def restore_by_agents(folder: Path, memory: Path, **options: Any) -> int | None:
    run = agents_run(folder, memory, **options)
    state = state_of(0)
    step = run.restore(state)
    assert step == state["step"] or step is None
    for name, value in state_of(step or 0).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[name].to_local(), value.to_local()), name
    return step


def test_machines_save_their_own_files_and_the_run_gets_all(tmp_path: Path, memory: Path) -> None:
    with Ranks(RANKS) as world:
        world.run(save_steps, tmp_path, memory, [1, 2, 3], {})
        assert steps_in(tmp_path / "machine-0") == steps_in(tmp_path / "machine-1") == [3]
        assert steps_in(tmp_path / "run")[0] == 3
        here, there = (data_files(tmp_path / f"machine-{m}" / "step-3") for m in (0, 1))
        assert here
        assert there
        assert here.isdisjoint(there)
        run = tmp_path / "run" / "step-3"
        assert here | there == data_files(run)
        check_whole(tmp_path, 3)
        assert not exchanged_files(tmp_path)
        for path in (run, tmp_path / "run" / "step-2"):  # Nothing but the local disks can serve.
            shutil.rmtree(path)
        assert world.run(restore, tmp_path, MACHINES) == [3] * RANKS
        assert world.run(restore, tmp_path, [1, 0, 2, 0]) == [3] * RANKS
        assert steps_in(tmp_path / "run") == [3]  # It was promoted again.
        shutil.rmtree(tmp_path / "machine-1")
        assert world.run(restore, tmp_path, MACHINES) == [3] * RANKS
    with Ranks(RANKS // 2) as world:
        assert world.run(restore_by_agents, tmp_path, memory) == [3] * (RANKS // 2)


def save_and_stay(folder: Path, memory: Path, step: int, persist: bool) -> None:
    run = agents_run(folder, memory)
    run.save(step, state_of(step), persist=persist)
    run.wait(promoted=persist)


def go_back(folder: Path, memory: Path, step: int) -> None:
    run = agents_run(folder, memory)
    run.save(5, state_of(5))
    run.wait()
    run.discard_after(step)
    assert run.restore(state_of(0)) == step


def test_what_the_ranks_leave_in_memory_goes_to_the_local_directories(
    tmp_path: Path, memory: Path
) -> None:
    with Ranks(RANKS) as world:
        world.run(save_and_stay, tmp_path, memory, 1, True)
        assert steps_in(tmp_path / "run") == [1]
        world.run(save_and_stay, tmp_path, memory, 2, False)
        assert steps_in(tmp_path / "machine-0") == [1]
        world.kill()
    for machine in (0, 1):
        until_committed(tmp_path / f"machine-{machine}" / "step-2")
    check_whole(tmp_path, 2)
    with Ranks(RANKS) as world:
        assert world.run(restore_by_agents, tmp_path, memory) == [2] * RANKS
        world.run(go_back, tmp_path, memory, 2)
        world.kill()
    with Ranks(RANKS) as world:  # What was discarded is in no agent's memory.
        assert world.run(restore_by_agents, tmp_path, memory) == [2] * RANKS


@pytest.mark.thin("fewer")
@pytest.mark.parametrize("ranks", [(RANKS // 2, RANKS), (RANKS, RANKS // 2)], ids=["more", "fewer"])
def test_what_is_in_memory_is_found_on_more_or_fewer_machines(
    tmp_path: Path, memory: Path, ranks: tuple[int, int]
) -> None:
    before, after = ranks
    with Ranks(before) as world:
        world.run(save_replicated, tmp_path, memory, [1, 2])
        marks = 2 if before == RANKS else 0  # On each machine, that of the second save.
        until(lambda: len(list(memory.glob("machine-*/*/*/replicated-*-1"))) == marks, LOST_S)
        world.kill()
    for place in (*tmp_path.glob("machine-*"), tmp_path / "run"):  # Nothing but memory can serve.
        for path in place.glob("step-*"):
            shutil.rmtree(path)
    with Ranks(after) as world:
        assert world.run(restore_by_agents, tmp_path, memory) == [2] * after


SILENT = """
import os, sys, time
if "agent" in sys.orig_argv:
    from torch_ckpt.agent import answers
    from torch_ckpt.filesystems.location import Location
    answers.ANSWER_S = 5.0
    read = Location.read
    def late(self):
        while os.path.exists("{folder}/silent") and "{folder}/run" in str(self):
            time.sleep(0.01)
        return read(self)
    Location.read = late
"""
"""Makes agents wait for the directory of the run as long as there is a file ``silent``."""


def save_without_the_run(folder: Path, memory: Path, how: str) -> list[str]:
    """The directory of the run is away, or does not answer, for two steps."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    run = agents_run(folder, memory, on_failure="warn", max_failures=9)
    run.save(1, state_of(1))
    run.wait(promoted=True)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "run").rename(folder / "away") if how == "away" else (folder / "silent").touch()
    dist.barrier()
    with logged(logging.WARNING) as lines:
        for step in (2, 3):  # The outcome of a save is known at the next one.
            run.save(step, state_of(step))
        with contextlib.suppress(CheckpointError):
            run.wait()
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "away").rename(folder / "run") if how == "away" else (folder / "silent").unlink()
    dist.barrier()
    with contextlib.suppress(StorageError):  # A call of the agent may not have returned yet.
        run.save(4, state_of(4))
        run.wait()
    run.save(5, state_of(5))
    run.wait(promoted=True)
    assert run.failures >= 1
    assert is_of_agents(run)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("how", ["away", "silent"])
def test_training_goes_on_while_the_directory_of_the_run_is_not_there(
    tmp_path: Path, memory: Path, how: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SILENT.format(folder=str(tmp_path)))
    with Ranks(RANKS) as world:
        said = world.run(save_without_the_run, tmp_path, memory, how, timeout_s=LOST_S)
        assert any(str(tmp_path / "run") in line for line in said[0]), said
        check_whole(tmp_path, 5)
        assert steps_in(tmp_path / "run")[0] == 5


CUT_OFF = """
import os, sys, time
HERE = os.environ.get("TORCH_CKPT_MEMORY", "")
if "agent" in sys.orig_argv:
    from torch_ckpt.agent import answers, joint_save
    from torch_ckpt.agent.manifests import Manifests
    from torch_ckpt.filesystems.location import Location
    answers.ANSWER_S = joint_save.SHUTDOWN_WAIT_S = 1.0
    is_cut = False
    def late(name):
        real = getattr(Location, name)
        def call(self, *args, **options):
            while is_cut and os.path.exists("{folder}/cut") and "{folder}/run" in str(self):
                time.sleep(0.1)
            return real(self, *args, **options)
        setattr(Location, name, call)
    put = Manifests.put
    def put_and_cut(self, kind, *args):
        global is_cut
        put(self, kind, *args)
        is_cut = kind == "lists" and HERE.endswith("machine-{machine}")
    if "{when}" == "within":
        Manifests.put = put_and_cut
    else:
        is_cut = HERE.endswith("machine-{machine}")
    for name in ("read", "names", "write", "rename", "remove", "create_directories"):
        late(name)
"""
"""Cuts one machine off from the directory of the run while there is a file ``cut``."""


def save_on_machines_of_which_one_is_cut_off(folder: Path, memory: Path, machine: int) -> str:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    client._POLLS = round(client._ANSWER_S / 0.2)
    run = agents_run(folder, memory, on_failure="warn", max_failures=9)
    run.save(1, state_of(1))
    run.wait(promoted=True)
    dist.barrier()
    (folder / "cut").touch()
    dist.barrier()
    run.save(2, state_of(2))
    with pytest.raises(StorageError) as raised:  # While the machine is still cut off.
        run.wait()
    dist.barrier()
    (folder / "cut").unlink(missing_ok=True)
    dist.barrier()
    for step in range(3, 9):  # A call of the agent may not have returned yet.
        run.save(step, state_of(step))
        with contextlib.suppress(StorageError):
            run.wait(promoted=True)
            break
    assert is_of_agents(run)
    run.close()
    return str(raised.value)


@pytest.mark.thin(1)
@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("machine", [0, 1])
def test_a_machine_that_alone_does_not_reach_the_run_fails_the_save_on_all_soon(
    tmp_path: Path, memory: Path, machine: int, when: str
) -> None:
    hook = CUT_OFF.format(folder=str(tmp_path), machine=machine, when=when)
    (tmp_path / "sitecustomize.py").write_text(hook)
    with Ranks(RANKS) as world:
        errors = world.run(save_on_machines_of_which_one_is_cut_off, tmp_path, memory, machine)
        for error in errors:
            assert f"machine {machine} (" in error
            assert f"{tmp_path / 'run'}" in error
            assert "does not answer" in error
        saved = steps_in(tmp_path / "run")[0]
        assert saved > 2
        check_whole(tmp_path, saved)


FULL = """
import os, sys
if "agent" in sys.orig_argv:
    from torch_ckpt.commits.checkpoint import CheckpointTransaction
    from torch_ckpt.errors import StorageError
    commit = CheckpointTransaction.commit
    def full(self, *args):
        if str(self.target).endswith("machine-1/step-2"):
            raise StorageError("cannot write: the disk is full", 28)
        commit(self, *args)
    CheckpointTransaction.commit = full
"""
"""Makes the commit of one step on the second machine fail."""


def save_half(folder: Path, memory: Path) -> None:
    """A step is committed on the first machine only, and training goes on."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    run = agents_run(folder, memory, on_failure="warn", keep_local=3, keep_last=3)
    run.save(1, state_of(1))
    run.wait(promoted=True)
    run.save(2, state_of(2))
    with pytest.raises(CheckpointError, match=r"machine 1 .*the disk is full"):
        run.wait()
    run.save(3, state_of(3))
    run.wait(promoted=True)
    run.close()


def test_a_step_that_one_machine_has_not_committed_does_not_count(
    tmp_path: Path, memory: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FULL)
    with Ranks(RANKS) as world:
        world.run(save_half, tmp_path, memory, timeout_s=LOST_S)
        assert steps_in(tmp_path / "machine-0") == [3, 2, 1]
        assert steps_in(tmp_path / "machine-1") == [3, 1]
        assert steps_in(tmp_path / "run") == [3, 1]
        for directory in ("machine-0", "machine-1", "run"):
            shutil.rmtree(tmp_path / directory / "step-3")
        assert world.run(restore, tmp_path, MACHINES) == [1] * RANKS


UNPUBLISHED = """
import os, sys
if "agent" in sys.orig_argv:
    from torch_ckpt.agent import joint_save
    from torch_ckpt.agent.manifests import Manifests
    from torch_ckpt.errors import StorageError
    joint_save.SHUTDOWN_WAIT_S = 0.5
    put = Manifests.put
    def put_unless_cut(self, kind, *args):
        if kind == "commit" and os.path.exists("{folder}/cut"):
            raise StorageError("the store does not answer", 110)
        put(self, kind, *args)
    Manifests.put = put_unless_cut
"""
"""Cuts machine 0 off between its commit and its message to the others, while ``cut`` exists."""


def save_half_unpublished(folder: Path, memory: Path, goes_on: bool) -> None:
    """Step 2 is committed on the first machine only, which cannot publish that."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    run = agents_run(folder, memory, on_failure="warn", keep_last=2)
    run.save(1, state_of(1))
    run.wait(promoted=True)
    (folder / "cut").touch()
    dist.barrier()
    run.save(2, state_of(2))
    with pytest.raises(StorageError, match=r"machine 0 .*the store does not answer"):
        run.wait()
    assert steps_in(folder / "machine-0")[0] == 2
    assert steps_in(folder / "machine-1") == [1]
    dist.barrier()
    (folder / "cut").unlink(missing_ok=True)
    if goes_on:
        dist.barrier()
        run.save(3, state_of(3))
        run.close()


def test_a_commit_that_machine_0_cannot_publish_is_replaced_by_the_next_step(
    tmp_path: Path, memory: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(UNPUBLISHED.format(folder=tmp_path))
    with Ranks(RANKS) as world:
        world.run(save_half_unpublished, tmp_path, memory, True, timeout_s=LOST_S)
        for place, steps in (("machine-0", [3]), ("machine-1", [3]), ("run", [3, 1])):
            assert steps_in(tmp_path / place) == steps
            assert len(list((tmp_path / place).glob("step-*"))) == len(steps)


def test_a_commit_that_machine_0_cannot_publish_is_completed_if_the_ranks_die(
    tmp_path: Path, memory: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(UNPUBLISHED.format(folder=tmp_path))
    with Ranks(RANKS) as world:
        world.run(save_half_unpublished, tmp_path, memory, False, timeout_s=LOST_S)
        world.kill()
    until_committed(tmp_path / "machine-1" / "step-2")
    check_whole(tmp_path, 2)


def save_at_other_places(folder: Path, memory: Path) -> str:
    """Ranks of one machine have local directories of their own."""
    on_machine(memory)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with run_on(folder, [0, 1, 2, 3], asynchronous=True, agent=True) as run:
            run.save(1, state_of(1))
    return "".join(str(each.message) for each in warned)


@pytest.mark.slow
def test_machines_that_share_no_single_local_directory_save_without_agents(
    tmp_path: Path, memory: Path
) -> None:
    with Ranks(RANKS) as world:
        said = world.run(save_at_other_places, tmp_path, memory)
        assert "the agent requires one local directory per machine" in said[0]
        assert world.run(restore, tmp_path, [0, 1, 2, 3]) == [1] * RANKS


def save_replicated(folder: Path, memory: Path, steps: list[int]) -> None:
    options = AgentOptions(
        replicas=1, failure_domain=str(dist.get_rank() // 2), persist_on_failure=False
    )
    run = agents_run(folder, memory, agent=options, keep_local=3)
    for step in steps:
        state = {"frozen": torch.arange(1 << 18), **state_of(step)}
        run.save(step, state)
        run.wait()
    assert is_of_agents(run)


def restore_replicated(folder: Path, memory: Path) -> int | None:
    return restore_by_agents(folder, memory, agent=AgentOptions(replicas=1, failure_domain="x"))


@pytest.mark.slow
def test_steps_are_replicated_and_unchanged_files_are_linked(tmp_path: Path, memory: Path) -> None:
    with Ranks(RANKS) as world:
        world.run(save_replicated, tmp_path, memory, [1, 2, 3])
        links = [
            path.stat().st_nlink
            for path in tmp_path.glob("machine-*/step-3/*.distcp")
            if path.stat().st_nlink > 1
        ]
        assert links  # The frozen tensor is that of step 2.
        check_whole(tmp_path, 3)
        until(lambda: len(list(memory.glob("machine-*/*/*/replicated-*"))) >= 2, LOST_S)
        agent = agent_pid(tmp_path, memory, 1)
        freeze(agent)  # Else its ranks would start another.
        world.kill()
    os.kill(agent, signal.SIGKILL)
    shutil.rmtree(memory_of(memory, 1))
    for lost in ("machine-0", "machine-1", "run"):  # Nothing but the replicas can serve.
        for path in (tmp_path / lost).glob("step-*"):
            shutil.rmtree(path)
    with Ranks(RANKS) as world:
        assert world.run(restore_by_agents, tmp_path, memory) == [3] * RANKS


def save_while_killed(
    folder: Path, memory: Path, step: int, victims: list[int], delay_s: float, dies: bool
) -> None:
    """Saves a step, while agents are killed, and perhaps the ranks."""
    run = agents_run(folder, memory)
    run.save(step, state_of(step))
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(delay_s)
        for machine in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent_pid(folder, memory, machine), signal.SIGKILL)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
    run.wait()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_kills_of_agents_and_ranks_lose_no_step_that_was_whole(
    tmp_path: Path, memory: Path, seed: int, full: bool
) -> None:
    rng = random.Random(seed)
    kills = ["0", "1", "both", "all"]
    cases = [rng.choice(kills) for _ in range(100)] if full else ["0", "1", "all"]
    whole, step = 0, 0
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(Ranks(RANKS))
        for number, case in enumerate(cases):
            step += 1
            what = f"kill {number} of seed {seed}, {case}"
            victims = [0, 1] if case in ("both", "all") else [int(case)]
            dies = case == "all"
            arguments = (tmp_path, memory, step, victims, rng.uniform(0, 1.5), dies)
            if not dies:
                world.run(save_while_killed, *arguments, timeout_s=LOST_S)
                check_whole(tmp_path, step)
                until(lambda: not exchanged_files(tmp_path))
                whole = step
                continue
            with contextlib.suppress(RankError):
                world.run(save_while_killed, *arguments, timeout_s=LOST_S)
            world = stack.enter_context(Ranks(RANKS))
            restored = world.run(restore_by_agents, tmp_path, memory, timeout_s=LOST_S)
            assert len(set(restored)) == 1, what
            assert (restored[0] or 0) in (whole, step), (what, restored)
            whole = restored[0] or 0
