"""Saves of DeepSpeed engines on gloo ranks, by this package and by DeepSpeed itself."""

from __future__ import annotations

import functools
import gc
import math
import os
import resource
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_expert_runs as experts
import deepspeed_parallel_runs as parallel
import pytest
import torch
import torch.distributed as dist
from deepspeed_runs import CLIENT, STEPS, engine_of, initialized, train_engine
from torch import nn

# What an engine is, and a function that trains it for a step.
Trained = tuple[Any, Callable[[int], float]]


def zero_engine(stage: int, dtype: str = "fp32") -> Trained:
    engine = engine_of(stage, dtype)
    return engine, lambda step: train_engine(engine, step * STEPS, dtype)[-1]


def expert_engine(stage: int) -> Trained:
    from deepspeed.utils import groups

    for kept in vars(groups).values():  # An earlier run had another order of ranks.
        if isinstance(kept, dict) and "ep_size_2" in kept:
            kept.clear()
    engine = experts.engine_of(stage, 2)
    return engine, lambda step: experts.train_step(engine, experts.batch(step))


def tensor_engine(stage: int) -> Trained:
    engine = parallel.engine_of(stage, parallel.TENSOR_RANKS)
    return engine, lambda step: parallel.train(engine, parallel.TENSOR_RANKS, step)


def pipeline_engine() -> Trained:
    engine = parallel.pipeline_engine(2)
    return engine, lambda step: parallel.train_pipeline(engine, 2, step)


ENGINES: dict[str, Callable[[], Trained]] = {
    **{
        f"zero-{stage}-{dtype}": lambda stage=stage, dtype=dtype: zero_engine(stage, dtype)
        for stage in (0, 1, 2, 3)
        for dtype in ("fp32", "bf16")
    },
    "experts-1": lambda: expert_engine(1),
    "experts-2": lambda: expert_engine(2),
    "tensor-1": lambda: tensor_engine(1),
    "tensor-3": lambda: tensor_engine(3),
    "pipeline": pipeline_engine,
}


def tagged_tensors() -> dict[str, Any]:
    """Parameters, and tensors with attributes."""
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    frozen = nn.Parameter(torch.arange(4), requires_grad=False)
    tagged: Any = weight.detach()[1]
    tagged.tags = {"of": "the client", "mask": torch.arange(3)}
    frozen.note = "frozen"  # type: ignore[attr-defined]
    return {"weight": weight, "list": [weight, frozen, tagged], "tuple": (weight, tagged)}


def save_both(kind: str, asynchronous: bool, stock: Path, path: Path) -> None:
    """Saves by DeepSpeed, by this package, and trains at once; then resumes from our files."""
    from torch_ckpt.frameworks.deepspeed.engine import attach

    engine, train = ENGINES[kind]()
    train(0)
    client: dict[str, Any] = {**CLIENT, "rng": torch.arange(9)}
    if not kind.startswith("experts"):  # DeepSpeed clones their files.
        client |= tagged_tensors()
    engine.save_checkpoint(str(stock), client_state=client)
    checkpoints = attach(engine, asynchronous=asynchronous)
    assert engine.save_checkpoint(str(path), client_state=client)
    continued = train(1)
    if asynchronous:
        checkpoints.wait()
    engine.destroy()
    results = []
    for folder in (stock, path):
        engine, train = ENGINES[kind]()
        if folder == path:
            attach(engine, asynchronous=asynchronous)
        found, loaded = engine.load_checkpoint(str(folder))
        assert found is not None
        assert {name: loaded[name] for name in CLIENT} == CLIENT
        results.append(train(1))
        engine.destroy()
    assert results[0] == results[1]
    # DeepSpeed itself does not resume experts exactly.
    assert kind.startswith("experts") or results[1] == continued, (results, continued)


class Plain(nn.Module):
    """A weight large enough that a save takes a while: 12 MiB with the state of Adam."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.sum(0)


def plain_engine(rows: int = 1024, **config: Any) -> Any:
    net = Plain(rows)
    return initialized(
        net,
        net.parameters(),
        {
            "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            **config,
        },
    )


def fill(engine: Any, value: float) -> None:
    """Gives all weights a value, on this rank."""
    engine.module.weight.data.fill_(value)
    for part in engine.optimizer.single_partition_of_fp32_groups:
        part.data.fill_(value)


def value_of(path: Path) -> int:
    """The one value of all files of the checkpoint that ``latest`` names."""
    folder = path / (path / "latest").read_text()
    model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    assert (model["module"]["weight"] == model["value"]).all()
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    for name in names:
        state = torch.load(folder / name, weights_only=False)["optimizer_state_dict"]
        for part in state["single_partition_of_fp32_groups"]:
            assert (part == model["value"]).all(), name
    return int(model["value"])


def save_until_killed(
    path: Path, first: int, asynchronous: bool, ours: bool, tag: str | None
) -> None:
    """Saves one value after the other, until something kills this rank."""
    from torch_ckpt.frameworks.deepspeed.engine import attach

    engine = plain_engine()
    if ours:
        attach(engine, asynchronous=asynchronous)
    for value in range(first, first + 100_000):
        fill(engine, value)
        engine.save_checkpoint(str(path), tag=tag or f"step{value}", client_state={"value": value})
        if dist.get_rank() == 0:
            (path / "saved").write_text(f"{value}")


def fail_to_save(path: Path, asynchronous: bool) -> list[str]:
    """Saves twice; the second time, rank 1 cannot write. Returns what was found at each step."""
    from torch_ckpt.errors import StorageError
    from torch_ckpt.frameworks.deepspeed.engine import attach

    engine = plain_engine()
    checkpoints = attach(engine, asynchronous=asynchronous)
    client = {"value": 1}
    fill(engine, 1)
    engine.save_checkpoint(str(path), tag="first", client_state=client)
    checkpoints.wait()
    fill(engine, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        if asynchronous:
            engine.save_checkpoint(str(path), tag="second", client_state=client)
            time.sleep(0.5)
            with pytest.raises(StorageError):
                engine.save_checkpoint(str(path), tag="third", client_state=client)
        else:
            with pytest.raises(StorageError):
                engine.save_checkpoint(str(path), tag="second", client_state=client)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    after_failure = sorted(os.listdir(path)), (path / "latest").read_text()
    dist.barrier()
    engine.save_checkpoint(str(path), tag="fourth", client_state={"value": 2})
    engine.destroy()  # Waits.
    dist.barrier()
    return [*after_failure[0], after_failure[1], (path / "latest").read_text()]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("of the client")


def raises(*_: Any, **__: Any) -> Any:
    raise ValueError("of one rank")


FAILURES = {
    "client state": "of the client",
    "keys of client state": "argument of type 'NoneType'|not iterable",
    "module": "of one rank",
    "optimizer": "of one rank",
    "schedule": "of one rank",
    "directory": "Not a directory",
    "script": "Is a directory",
    "URL": "cannot save to s3://run",
    "no directory": "save_dir must be a non-empty string",
    "interrupt": "of the user",
    "weights": "of one rank",
}
"""Where one rank fails, and what all ranks raise."""


def fail_on_one_rank(path: Path, stage: int, asynchronous: bool) -> dict[str, float]:
    """Fails in many places of a save, on one rank each time. Returns how long each save took."""
    from torch_ckpt.errors import CheckpointError
    from torch_ckpt.frameworks.deepspeed.engine import attach

    engine = engine_of(stage, "fp32", schedules=True)
    checkpoints = attach(engine, asynchronous=asynchronous)
    train_engine(engine, 0, "fp32")
    engine.save_checkpoint(str(path), tag="first")
    checkpoints.wait()
    took = {}
    for number, (where, message) in enumerate(FAILURES.items()):
        if where == "weights" and stage == 3:
            continue  # DeepSpeed gathers them by collectives, or saves none.
        # The first rank writes the client's state and the script, and makes the directory.
        at_first = {"client state", "directory", "script"}
        is_failing = dist.get_rank() == (0 if where in at_first else 1)
        folder: Any = path
        client: Any = {"value": number}
        with pytest.MonkeyPatch.context() as patch:
            if where == "directory":
                folder = path / "latest" / "below"
            elif where == "script":
                folder = path.with_name(f"{path.name}-script")
                (folder / "zero_to_fp32.py").mkdir(parents=True, exist_ok=True)
            if is_failing and where == "client state":
                client = {"value": Unpicklable()}
            elif is_failing and where == "keys of client state":
                client = None
            elif is_failing and where in ("module", "weights"):
                patch.setattr(engine.module, "state_dict", raises)
            elif is_failing and where in ("optimizer", "schedule"):
                owner = engine.optimizer if where == "optimizer" else engine.lr_scheduler
                patch.setattr(owner, "state_dict", raises)
            elif is_failing and where in ("URL", "no directory"):
                folder = "s3://run" if where == "URL" else ""
            elif is_failing and where == "interrupt":

                def interrupt(*_: Any, **__: Any) -> Any:
                    raise KeyboardInterrupt("of the user")

                patch.setattr(engine, "_get_buffer_names", interrupt)
            save: Callable[..., Any] = engine.save_16bit_model
            if where != "weights":
                save = functools.partial(engine.save_checkpoint, tag="second", client_state=client)
            begin = time.monotonic()
            with pytest.raises((Exception, KeyboardInterrupt), match=message) as caught:
                save(str(folder))
            took[where] = time.monotonic() - begin
            if where not in ("interrupt", "weights"):  # These break a call off.
                kind = {"directory": CheckpointError, "script": OSError}.get(where, Exception)
                assert isinstance(caught.value, kind), repr(caught.value)
                assert not type(caught.value).__name__.startswith("RankTimeout"), caught.value
        dist.barrier()
        assert (path / "latest").read_text() == "first"
        assert not (path / "second").exists()
        assert not [each for each in os.listdir(path) if each.startswith(".")]
        dist.barrier()
    losses = train_engine(engine, STEPS, "fp32")
    engine.save_checkpoint(str(path), tag="third", client_state={"value": 3})
    engine.destroy()
    dist.barrier()
    assert (path / "latest").read_text() == "third"
    assert all(map(math.isfinite, losses))
    return took


def save_again(path: Path, asynchronous: bool) -> None:
    """Saves the same tag twice. The second checkpoint has other ranks' files no more."""
    from torch_ckpt.frameworks.deepspeed.engine import attach

    engine = plain_engine()
    checkpoints = attach(engine, asynchronous=asynchronous)
    for value in (1, 2):
        fill(engine, value)
        engine.save_checkpoint(str(path), tag="last", client_state={"value": value})
        checkpoints.wait()
        if value == 1 and dist.get_rank() == 0:
            (path / "last" / "zero_pp_rank_7_mp_rank_00_optim_states.pt").write_bytes(b"old")
            (path / "last" / "layer_07-model_00-model_states.pt").write_bytes(b"old")
            (path / "last" / "notes.txt").write_text("mine")
            (path / "last" / "dataloader.pt").write_text("mine")
            (path / "last" / "logs").mkdir()
        dist.barrier()
    fill(engine, 3)
    engine.save_checkpoint(str(path), tag="aside", client_state={"value": 3}, save_latest=False)
    engine.save_16bit_model(str(path), "model.bin")
    engine.destroy()
    dist.barrier()
    left = weakref.ref(engine)
    del engine
    gc.collect()
    assert left() is None


def save_through_links(path: Path, asynchronous: bool) -> None:
    """Saves to names that are links: by DeepSpeed, and twice by this package."""
    from torch_ckpt.frameworks.deepspeed.engine import attach

    run, disk = path / "run", path / "disk"
    if dist.get_rank() == 0:
        for folder in (run, disk / "stock", disk / "last", path / "logs"):
            folder.mkdir(parents=True)
        (disk / "last" / "notes.txt").write_text("mine")
        (disk / "last" / "logs").symlink_to("../../logs")
        for name in ("stock", "last", "new", "latest", "model.bin"):
            (run / name).symlink_to(f"../disk/{name}")
    dist.barrier()
    engine = plain_engine()
    engine.save_checkpoint(str(run), tag="stock", client_state={"value": 0})
    checkpoints = attach(engine, asynchronous=asynchronous)
    for value, tag in ((1, "last"), (2, "last"), (3, "new")):
        fill(engine, value)
        engine.save_checkpoint(str(run), tag=tag, client_state={"value": value})
        checkpoints.wait()
    engine.save_16bit_model(str(run), "model.bin")
    engine.destroy()


def refuse_other_engines() -> None:
    from torch_ckpt.errors import UnsupportedError
    from torch_ckpt.frameworks.deepspeed.engine import attach

    engine = plain_engine()
    attach(engine)
    with pytest.raises(UnsupportedError, match="FastCheckpointEngine"):
        attach(engine)
    engine.destroy()
    engine = plain_engine(checkpoint={"use_node_local_storage": True})
    with pytest.raises(UnsupportedError, match="use_node_local_storage"):
        attach(engine)
    engine.destroy()
