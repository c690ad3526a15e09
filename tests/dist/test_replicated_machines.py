"""Replicas in peers' memory: what is restored after machines are lost, and what is refused."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from machine_kills import MachineCampaign
from machines import RANKS_PER_MACHINE, memory_of, on_machine
from ranks import Ranks, Worlds
from states import assert_same
from support.flips import flip
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from waits import until

from torch_ckpt import Run
from torch_ckpt._core import _native
from torch_ckpt.agent import AgentOptions, SnapshotAgent
from torch_ckpt.agent.buddies import MAX_LAG, Replication
from torch_ckpt.agent.memory import run_of
from torch_ckpt.agent.messages import Kind
from torch_ckpt.agent.replica_files import used_nbytes, whole_replicas
from torch_ckpt.cli.main import main
from torch_ckpt.filesystems.location import Location
from torch_ckpt.records.reading import missing_replicas, newest_first

pytestmark = pytest.mark.timeout(300)

SOON_S = 60.0  # For a machine that is busy.
MACHINES = 3
RANKS = MACHINES * RANKS_PER_MACHINE


@pytest.fixture(autouse=True)
def memory(memory: Path) -> Path:
    """Shared memory of this test alone, with a folder for each machine."""
    return memory


def options_of(rank: int, **more: Any) -> AgentOptions:
    return AgentOptions(replicas=1, failure_domain=f"{rank // RANKS_PER_MACHINE}", **more)


def folder_on(memory: Path, machine: int, run: Path) -> Path:
    return memory_of(memory, machine) / f"torch_ckpt-{os.getuid()}" / run_of(run).hex()


def state_of(step: int, columns: int = 5, dim: int = 0) -> dict[str, Any]:
    """Shards of uneven sizes, replicas, what one machine alone has, and an object."""
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    rows = torch.arange(13 * columns, dtype=torch.float32).view(13, columns) + 1000 * step
    return {
        "rows": distribute_tensor(rows.clone(), mesh, [Shard(dim)]),
        "all": distribute_tensor(rows.clone(), mesh, [Replicate()]),
        "step": step,
    }


@functools.cache
def run_on(run: Path, memory: Path, more: str) -> Run:
    """That of this rank, which has one for as long as it lives."""
    on_machine(memory)
    options = options_of(dist.get_rank(), **json.loads(more))
    return Run(run, asynchronous=True, agent=options, timeout_s=SOON_S)


def save(run: Path, memory: Path, step: int, persist: bool, more: dict[str, Any]) -> None:
    made = run_on(run, memory, json.dumps(more))
    made.save(step, state_of(step), persist=persist)
    made.wait()


def replicated_steps(memory: Path, run: Path, machine: int) -> list[int]:
    found = whole_replicas(folder_on(memory, machine, run), run_of(run))
    return sorted({slots[0][0].step for slots in found.values()})


def until_replicated(memory: Path, run: Path, step: int) -> None:
    for machine in range(MACHINES):
        until(lambda machine=machine: step in replicated_steps(memory, run, machine))


@pytest.mark.slow  # Others do this before they lose something.
def test_each_save_arrives_in_the_memory_of_the_buddy(tmp_path: Path, memory: Path) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        for step in range(1, 4):
            world.run(save, run, memory, step, False, QUIET)
            until_replicated(memory, run, step)
        world.kill()


def test_the_replicas_are_freed_when_the_run_ends(
    worlds: Worlds, tmp_path: Path, memory: Path
) -> None:
    run = tmp_path / "run"
    worlds.run(RANKS, save, run, memory, 1, True, QUIET)
    until_replicated(memory, run, 1)
    worlds.run(RANKS, end, run, memory)
    for machine in range(MACHINES):
        until(lambda machine=machine: not folder_on(memory, machine, run).exists())


def lose(memory: Path, machine: int, run: Path) -> None:
    """Ends the agent of a machine, whose ranks have ended, and removes its memory."""
    agent = int((folder_on(memory, machine, run) / "agent.lock").read_text())
    os.kill(agent, signal.SIGKILL)
    shutil.rmtree(memory_of(memory, machine))


def restore(run: Path, memory: Path, machines: Sequence[int], step: int, dim: int) -> float:
    """Returns how long it took."""
    folder = memory_of(memory, machines[dist.get_rank() // RANKS_PER_MACHINE])
    folder.mkdir(exist_ok=True)
    os.environ["TORCH_CKPT_MEMORY"] = str(folder)
    options = AgentOptions(replicas=1, failure_domain=str(folder), **QUIET)
    made = Run(run, asynchronous=True, agent=options, timeout_s=SOON_S)
    state = state_of(-1, dim=dim)
    began = time.monotonic()
    assert made.restore(state) == step
    took_s = time.monotonic() - began
    assert_same(state, state_of(step, dim=dim))
    made.save(step + 1, state_of(step + 1), persist=False)
    made.wait()
    made.close()
    return took_s


QUIET: dict[str, Any] = {"persist_on_failure": False}  # The memory alone counts.


def saved_steps(run: Path) -> list[str]:
    return [path.parent.name for path in run.glob("step-*/.metadata")]


@pytest.mark.thin("1-machines1-1")
@pytest.mark.parametrize(
    ("lost", "machines", "dim"),
    [
        (0, [3, 1, 2], 0),
        (1, [2, 0, 3], 1),  # The others have other numbers, and all ranks other shards.
        (2, [0, 1], 0),
        (0, [2, 1], 1),
    ],
)
def test_after_the_loss_of_one_machine_the_newest_step_is_restored_from_memory(
    worlds: Worlds, tmp_path: Path, memory: Path, lost: int, machines: list[int], dim: int
) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        for step in (1, 2):
            world.run(save, run, memory, step, False, QUIET)
            until_replicated(memory, run, step)
        world.kill()
    lose(memory, lost, run)
    worlds.run(RANKS_PER_MACHINE * len(machines), restore, run, memory, machines, 2, dim)
    assert saved_steps(run) in ([], ["step-3"])  # The end of the run has written that.


def restore_from_disk(
    run: Path, memory: Path, step: int, expected: str, machines: Sequence[int] = (0, 1, 2)
) -> None:
    """All ranks restore a step from disk, and the first one warns of the reason, if expected."""
    folder = memory_of(memory, machines[dist.get_rank() // RANKS_PER_MACHINE])
    folder.mkdir(exist_ok=True)
    os.environ["TORCH_CKPT_MEMORY"] = str(folder)
    options = AgentOptions(replicas=1, failure_domain=str(folder), **QUIET)
    made = Run(run, asynchronous=True, agent=options, timeout_s=SOON_S)
    state = state_of(-1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert made.restore(state) == step
    texts = [str(warning.message) for warning in caught]
    if dist.get_rank() == 0 and expected:
        assert any(re.search(expected, text) for text in texts), texts
    assert_same(state, state_of(step))
    made.close()


def save_and_replicate(world: Ranks, run: Path, memory: Path) -> None:
    """Saves step 1 to disk, and step 2 to memory alone, and waits for its replicas."""
    world.run(save, run, memory, 1, True, QUIET)
    world.run(save, run, memory, 2, False, QUIET)
    until_replicated(memory, run, 2)


def restore_with_a_refused_memory(run: Path, memory: Path) -> None:
    """The first machine refuses its memory, so that no rank saves with agents."""
    on_machine(memory)
    if dist.get_rank() < RANKS_PER_MACHINE:
        os.environ["TORCH_CKPT_MEMORY"] = "relative"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = Run(run, asynchronous=True, agent=options_of(dist.get_rank()), timeout_s=SOON_S)
    if dist.get_rank() == 0:
        assert any("saving continues without an agent" in str(each.message) for each in caught)
    state = state_of(-1)
    assert made.restore(state) == 2
    assert_same(state, state_of(2))
    made.save(3, state_of(3))
    made.wait()
    assert made.restore(state) == 3
    made.close()


def test_if_the_memory_of_one_machine_is_refused_all_restore_from_the_others(
    worlds: Worlds, tmp_path: Path, memory: Path
) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        save_and_replicate(world, run, memory)
        world.kill()
    worlds.run(RANKS, restore_with_a_refused_memory, run, memory)


def test_after_the_loss_of_two_buddies_the_newest_step_on_disk_is_restored(
    worlds: Worlds, tmp_path: Path, memory: Path
) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        save_and_replicate(world, run, memory)
        world.kill()
    for machine in (1, 2):
        lose(memory, machine, run)
    worlds.run(RANKS, restore_from_disk, run, memory, 1, "")


def test_a_replica_with_a_flipped_bit_is_refused_by_name_and_the_disk_serves(
    worlds: Worlds, tmp_path: Path, memory: Path, seed: int
) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        save_and_replicate(world, run, memory)
        world.kill()
    lose(memory, 1, run)
    found = whole_replicas(folder_on(memory, 2, run), run_of(run))
    (path,) = [
        slot[1]
        for slots in found.values()
        for slot in slots
        if (slot[0].step, slot[0].rank) == (2, 3)
    ]
    end = used_nbytes(_native.Slot.open(path, False))
    flip(path, random.Random(seed).randrange(4096, end))
    expected = rf"step 2 is passed over in shared memory: .*cannot load replica .*{path.name}: "
    worlds.run(RANKS, restore_from_disk, run, memory, 1, expected)


def save_without_room(run: Path, memory: Path, columns: int) -> str:
    """The second machine has room for its own slots alone. Returns the warning."""
    on_machine(memory)
    options = options_of(dist.get_rank(), **QUIET)
    made = Run(run, asynchronous=True, agent=options, timeout_s=SOON_S)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (1, 2, 3):
            made.save(step, state_of(step, columns), persist=False)
            made.wait()
    made.close()
    return "\n".join(
        str(warning.message) for warning in caught if "replica" in str(warning.message)
    )


def test_where_one_machine_has_no_memory_for_replicas_the_run_goes_on_without_them(
    worlds: Worlds, tmp_path: Path, memory: Path, mount_tmpfs: Callable[[str], Path]
) -> None:
    run = tmp_path / "run"
    columns = 1 << 16  # 3.25 MiB replicated in all slots, and 3.25 MiB of shards.
    memory_of(memory, 1).symlink_to(mount_tmpfs("size=24m"))
    said = worlds.run(RANKS, save_without_room, run, memory, columns)
    assert re.fullmatch(
        r"saving continues without replicas: \S+: cannot reserve \d+ bytes of memory for replicas: "
        r"\S+ has \d+ bytes left",
        said[0],
    ), said
    assert not any(said[1:])


def refuse_domains(run: Path, memory: Path) -> None:
    on_machine(memory)
    with pytest.raises(ValueError, match="3 of 3 machines share the failure domain 'rack'"):
        Run(
            run,
            asynchronous=True,
            agent=AgentOptions(replicas=1, failure_domain="rack"),
            timeout_s=SOON_S,
        )


def test_machines_of_one_failure_domain_are_refused(
    worlds: Worlds, tmp_path: Path, memory: Path
) -> None:
    worlds.run(RANKS, refuse_domains, tmp_path / "run", memory)


def save_on_one_machine(run: Path) -> None:
    expects = (
        pytest.warns(UserWarning, match="requires several machines")
        if dist.get_rank() == 0
        else contextlib.nullcontext()
    )
    with expects:
        made = Run(run, asynchronous=True, agent=AgentOptions(replicas=1), timeout_s=SOON_S)
    made.save(1, state_of(1))
    made.close()


def test_a_single_machine_saves_without_replicas(tmp_path: Path) -> None:
    with Ranks(2) as world:
        world.run(save_on_one_machine, tmp_path / "run")
    assert saved_steps(tmp_path / "run") == ["step-1"]


def stop_replication(run: Path, memory: Path, how: str) -> None:
    if dist.get_rank() != RANKS_PER_MACHINE:
        return
    if how == "ended":
        backend: Any = run_on(run, memory, "{}")._saves._backend
        backend._agent._client.request(Kind.BUDDY)
        return
    folder = folder_on(memory, 1, run)
    (folder / "replication").unlink()  # The next agent knows no buddy.
    os.kill(int((folder / "agent.lock").read_text()), signal.SIGKILL)


def warned_of_replicas(run: Path, memory: Path, step: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save(run, memory, step, True, {})
    return [str(each.message) for each in caught if "replicas" in str(each.message)]


@pytest.mark.thin("ended")
@pytest.mark.parametrize("how", ["ended", "killed"])
def test_the_user_is_warned_once_when_replication_has_stopped(
    worlds: Worlds, tmp_path: Path, memory: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    run = tmp_path / "run"
    worlds.run(RANKS, save, run, memory, 1, True, {})
    until_replicated(memory, run, 1)
    worlds.run(RANKS, stop_replication, run, memory, how)
    warned = [worlds.run(RANKS, warned_of_replicas, run, memory, step) for step in range(2, 9)]
    until(lambda: bool(missing_replicas(newest_first(Location(run)))))
    worlds.run(RANKS, end_run, run, memory)
    texts = [text for ranks in warned for texts in ranks for text in texts]
    assert len(texts) == 1
    # On the coordinator, which perhaps did not hear of the replica of step 1.
    assert texts in (warned[MAX_LAG - 1][0], warned[MAX_LAG][0])
    expected = rf"the last {MAX_LAG} saves have no replicas: \S+: "
    assert re.match(expected, texts[0])
    for command in ("ls", "report"):
        assert main([command, str(run)]) == 0
        printed = capsys.readouterr()
        assert "saves have no replicas: " in " ".join((printed.out + printed.err).split())


def end_run(run: Path, memory: Path) -> None:
    run_on(run, memory, "{}").close()


def test_a_warning_names_slow_replicas_and_ends_with_the_next_one() -> None:
    replication = Replication(mock.Mock(), mock.Mock(), SOON_S)
    replication._is_active = True
    session, machines = b"s" * 16, (0, 1)

    def decide(sequence: int, *replicated: int) -> str:
        saves = [(session, number) for number in replicated]
        replication.agreed((session, sequence), [("host", saves, "") for _ in machines])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            replication.warn()
        return str(caught[0].message) if caught else ""

    assert not any(decide(sequence) for sequence in range(MAX_LAG))
    assert "a replica takes longer than the time between two saves" in decide(MAX_LAG)
    assert decide(MAX_LAG + 1) == ""
    assert replication.missing
    assert decide(MAX_LAG + 2, MAX_LAG + 1) == replication.missing == ""
    assert decide(2 * MAX_LAG + 2, MAX_LAG + 1) != ""


def end(run: Path, memory: Path) -> None:
    run_on(run, memory, json.dumps(QUIET)).close()


@pytest.mark.slow  # The replicas are freed with all the rest.
def test_a_run_that_ends_in_good_order_leaves_nothing_in_memory(
    tmp_path: Path, memory: Path
) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        world.run(save, run, memory, 1, True, QUIET)
        world.run(end, run, memory)
    until(lambda: not list(memory.glob("machine-*/*/*")), SOON_S)


def save_often(run: Path, memory: Path, steps: int) -> tuple[int, float]:
    """Saves more than the agents can send. Returns the superseded saves, and the longest stop."""
    on_machine(memory)
    options = options_of(dist.get_rank(), replicate_bytes_per_s=float(1 << 20), **QUIET)
    agent = SnapshotAgent(run, options=options, timeout_s=SOON_S)
    state = state_of(1, 1 << 16)
    stops = []
    for step in range(steps):
        began = time.monotonic()
        assert agent.stage(state, run / f"step-{step}", step=step, persist=False)
        stops.append(time.monotonic() - began)
        time.sleep(0.2)
    agent.close(drop=True)
    return agent.superseded, max(stops[2:])


def test_ranks_do_not_wait_for_replicas_that_are_too_slow(
    worlds: Worlds, tmp_path: Path, memory: Path
) -> None:
    steps = 8
    found = worlds.run(RANKS, save_often, tmp_path / "run", memory, steps)
    for rank, (superseded, stop_s) in enumerate(found):
        assert stop_s < 2.0  # One replica takes more than 6 s.
        if rank % RANKS_PER_MACHINE == 0:
            assert superseded >= 2


def discard(run: Path, memory: Path) -> None:
    made = run_on(run, memory, json.dumps(QUIET))
    made.discard_after(1)
    dist.barrier()


def test_steps_that_are_discarded_are_not_restored_from_replicas(
    worlds: Worlds, tmp_path: Path, memory: Path
) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        save_and_replicate(world, run, memory)
        world.run(discard, run, memory)
        assert 2 not in replicated_steps(memory, run, 0)
        world.kill()
    lose(memory, 1, run)
    worlds.run(RANKS, restore_from_disk, run, memory, 1, "")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_machines_that_are_lost_at_any_moment_lose_no_replicated_step(
    tmp_path: Path, memory: Path, seed: int, full: bool
) -> None:
    campaign = MachineCampaign(tmp_path / "run", memory, seed)
    try:
        campaign.run(100 if full else 3)
    finally:
        campaign.end()
    print(campaign.report())
    assert not campaign.breaches, campaign.report()
    assert campaign.tally["lost one machine"] > (40 if full else 0)
