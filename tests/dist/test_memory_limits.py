"""Memory limits of containers: saves go on without an agent, and are never killed for memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import Ranks

from torch_ckpt import Run, SnapshotStager
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.cgroups import RESERVED_NBYTES

MIB = 1 << 20
STATE_NBYTES = 192 * MIB
CONTROLLER = Path("/sys/fs/cgroup/memory")

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory")]


@pytest.fixture
def group(memory: Path) -> Iterator[Path]:
    """A group of cgroup v1 of this test alone."""
    made = CONTROLLER / f"torch_ckpt-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a group with a memory limit here: {error}")
    yield made
    while members := (made / "cgroup.procs").read_text().split():  # An agent that ends.
        (CONTROLLER / "cgroup.procs").write_text(members[0])
    made.rmdir()


def begin(group: Path, nbytes: int) -> dict[str, torch.Tensor]:
    """Has this rank be in a container with this much room beside its state and the reserve."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    state = {f"w{n}": torch.ones(STATE_NBYTES // 16) for n in range(4)}
    used = int((group / "memory.usage_in_bytes").read_text())
    limit = used + nbytes + RESERVED_NBYTES
    (group / "memory.limit_in_bytes").write_text(str(limit))
    return state


def train(run: Path, group: Path, nbytes: int, agent: bool) -> list[str]:
    state = begin(group, nbytes)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with Run(run, asynchronous=True, agent=agent) as made:
            for step in (1, 2):
                for tensor in state.values():
                    tensor.fill_(step)
                made.save(step, state)
                made.wait()
            assert made.restore(state, step=1) == 1
    assert all(tensor.eq(1).all() for tensor in state.values())
    return [str(w.message) for w in warned if "bytes free" in str(w.message)]


@pytest.mark.parametrize("agent", [True, False])
def test_a_container_with_too_little_memory_saves_and_is_told_how_much_it_needs(
    run: Path, group: Path, agent: bool
) -> None:
    room = STATE_NBYTES * 3 // 2 if agent else STATE_NBYTES // 2
    with Ranks(1) as world:
        (told,) = world.run(train, run, group, room, agent)
    print(*told, sep="\n")
    assert len(told) == 1 or agent  # There may be too little for the fallback as well.
    assert str(group / "memory.limit_in_bytes") in told[0]
    assert ("without an agent" in told[0]) == agent
    assert not list(Path(os.environ["TORCH_CKPT_MEMORY"]).glob("*/*/rank-*"))


def stage(group: Path) -> None:
    state = begin(group, STATE_NBYTES // 2)
    with pytest.raises(StorageError, match=r"cannot stage 201326592 bytes: .* bytes free"):
        SnapshotStager().stage(state)


def test_a_writer_that_needs_all_tensors_staged_raises(group: Path) -> None:
    with Ranks(1) as world:
        world.run(stage, group)
