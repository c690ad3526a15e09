"""verl's checkpoint engine: actors publish weights, and rollouts get them bit for bit.

The real verl, whose manager makes these calls on its workers, on CPUs and without Ray.
"""

from __future__ import annotations

import asyncio
import sys
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import Forks
from ranks import Worlds
from support.tensors import bits

from torch_ckpt import Publisher
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.publishing.version_files import read_version

ROOT = Path(__file__).resolve().parents[3]
VERL = ROOT / "build/verl"
START_TIMEOUT_S = 300  # Ranks import verl, Ray and transformers.
pytestmark = [
    pytest.mark.framework,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not VERL.exists(), reason="tests/check.py frameworks installs verl"),
]
STEPS = 4


def weights(step: int) -> dict[str, torch.Tensor]:
    """What an actor's engine yields: whole tensors, of which a step changes a part."""
    generator, found = torch.Generator().manual_seed(7), {}
    for number in range(7):
        value = torch.randn(130 + number, 300, generator=generator)
        for each in range(step):
            value[each::20] += 0.01
        found[f"model.layers.{number}.weight"] = value
    return found | {"model.norm.weight": torch.full((300,), 1.0 + step)}


def new_engine(url: str, **options: Any) -> Any:
    """As verl's workers make it."""
    if str(VERL) not in sys.path:
        sys.path.append(str(VERL))
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.utils.import_utils import import_external_libs

    import_external_libs("torch_ckpt.frameworks.verl.versions")
    return CheckpointEngineRegistry.new("torch_ckpt", url=url, **{"timeout_s": 60.0, **options})


def act(url: str) -> None:
    """An actor: sends weights as verl's manager has it do."""
    rank = dist.get_rank()
    engine = new_engine(url, is_master=rank == 0, bucket_size=1 << 20, dtype="bfloat16")
    assert engine.prepare() == {}
    for which, world in zip(type(engine).build_topology(2, 1, [{}] * 3), (2, 1), strict=True):
        assert which == {"rank": list(range(world))}
    engine.init_process_group(rank=rank)
    for step in range(1, STEPS + 1):
        send = engine.send_weights(iter(weights(step).items()), global_steps=step)
        assert asyncio.run(send) == {}
        engine.finalize()


def roll_out(pipe: connection.Connection, url: str) -> None:
    """A rollout: sends the bits of the weights that it gets at each step."""
    engine = new_engine(url, bucket_size=1 << 20)
    engine.init_process_group(rank=0)

    async def receive(step: int) -> dict[str, bytes]:
        return {name: bits(each) async for name, each in engine.receive_weights(global_steps=step)}

    for step in range(1, STEPS + 1):
        pipe.send(asyncio.run(receive(step)))
        engine.finalize()
    pipe.recv()


def test_rollouts_get_the_weights_of_the_actors_at_each_step(
    worlds: Worlds, tmp_path: Path
) -> None:
    process, pipe = Forks().start(roll_out, str(tmp_path))
    try:
        worlds.run(2, act, str(tmp_path), timeout_s=START_TIMEOUT_S)
        for step in range(1, STEPS + 1):
            assert pipe.poll(START_TIMEOUT_S)
            expected = {name: bits(value.bfloat16()) for name, value in weights(step).items()}
            assert pipe.recv() == expected
    finally:
        process.kill()
        process.join()
    kinds = [read_version(Location(tmp_path), step).is_whole for step in range(1, STEPS + 1)]
    assert kinds == [True, False, False, False]


def test_a_rollout_names_the_version_that_does_not_come(tmp_path: Path) -> None:
    engine = new_engine(str(tmp_path), timeout_s=0.2)

    async def receive(step: int | None) -> None:
        async for _ in engine.receive_weights(global_steps=step):
            pass

    with pytest.raises(CheckpointError, match=r"version 3 of .* was not there within 0.2 s"):
        asyncio.run(receive(3))
    with pytest.raises(ValueError, match="global_steps"):
        asyncio.run(receive(None))


def test_the_weights_before_the_first_step_are_version_0(tmp_path: Path) -> None:
    with Publisher(tmp_path) as training:
        training.publish(0, weights(0))
    engine = new_engine(str(tmp_path), timeout_s=1.0)

    async def receive() -> dict[str, bytes]:
        return {name: bits(each) async for name, each in engine.receive_weights(global_steps=0)}

    assert asyncio.run(receive()) == {name: bits(each) for name, each in weights(0).items()}
