"""Loads of DeepSpeed engines on gloo ranks, in which one rank fails."""

from __future__ import annotations

import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_runs import STEPS, convert, engine_of, train_engine
from deepspeed_save_runs import raises

FAILURES: dict[str, str | None] = {
    "model": None,  # DeepSpeed's assertion has no message.
    "weights": None,
    "optimizer": "PytorchStreamReader",
    "client": "of one rank",
    "client's weights": "of one rank",
    "schedule": "of one rank",
    "latest": "only some ranks have found a checkpoint",
    "interrupt": "of the user",
}
"""Where rank 1 fails, and what all ranks raise."""


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt("of the user")


def own_copy(path: Path, name: str) -> Path:
    """Returns this rank's copy of a directory of checkpoints, as on a disk of its own."""
    copy = path.with_name(f"{path.name}-{name}-{dist.get_rank()}")
    shutil.copytree(path, copy)
    return copy


def truncate(files: Any) -> None:
    for file in files:
        os.truncate(file, file.stat().st_size // 2)


def fail_to_load_on_one_rank(path: Path, stage: int) -> dict[str, float]:
    """Fails in many places of a load, on rank 1 each time. Returns how long each load took."""
    from torch_ckpt.frameworks.deepspeed.engine import attach

    engine = engine_of(stage, "fp32", schedules=True)
    attach(engine)
    train_engine(engine, 0, "fp32")
    engine.save_checkpoint(str(path), tag="first")
    continued = train_engine(engine, STEPS, "fp32")
    engine.destroy()
    engine = engine_of(stage, "fp32", schedules=True)
    attach(engine)
    took = {}
    for where, message in FAILURES.items():
        folder = own_copy(path, where)
        options: dict[str, Any] = {}
        if where.endswith("weights"):  # ZeRO-3 gathers and broadcasts parameters then.
            options["load_optimizer_states"] = False
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                if where in ("model", "weights"):
                    for file in (folder / "first").glob("*model_states.pt"):
                        file.unlink()
                elif where == "optimizer":
                    truncate((folder / "first").glob("*pp_rank_1_*optim_states.pt"))
                elif where.startswith("client"):
                    options["custom_load_fn"] = raises
                elif where == "schedule":
                    patch.setattr(engine.lr_scheduler, "load_state_dict", raises)
                elif where == "latest":
                    (folder / "latest").unlink()
                elif where == "interrupt":
                    patch.setattr(engine.lr_scheduler, "load_state_dict", interrupt)
            begin = time.monotonic()
            with pytest.raises((Exception, KeyboardInterrupt), match=message) as caught:
                engine.load_checkpoint(str(folder), **options)
            took[where] = time.monotonic() - begin
        check_error(caught.value, where)
        dist.barrier()
    found, _ = engine.load_checkpoint(str(path))
    assert found is not None
    assert train_engine(engine, STEPS, "fp32") == continued
    assert engine.load_checkpoint(str(path / "nothing")) == (None, None)
    engine.destroy()
    return took


def check_error(error: BaseException, where: str) -> None:
    """Checks that a rank raises the error of the rank that has failed."""
    kind = {
        "model": AssertionError,
        "weights": AssertionError,
        "optimizer": RuntimeError,
        "client": ValueError,
        "client's weights": ValueError,
        "schedule": ValueError,
    }
    assert isinstance(error, kind.get(where, BaseException)), repr(error)
    notes = " ".join(getattr(error, "__notes__", []))
    if dist.get_rank() == 0 and where in kind:
        assert "raised on rank 1 in a load of DeepSpeed" in notes
    if where == "optimizer":  # The error of torch does not name the file.
        assert "torch.load of " in notes
        assert "pp_rank_1" in notes


def fail_to_load_universal(path: Path) -> float:
    """Rank 1 cannot read a file of a universal folder; returns how long the load took."""
    save_first(path)
    convert(path / "first", path / "universal")
    if dist.get_rank() == 0:
        (path / "latest_universal").write_text("universal")
    dist.barrier()
    return fail_to_load(engine_of(1, "fp32", universal=True), path, "universal/zero/*/exp_avg.pt")


def fail_to_load_of_another_layout(path: Path) -> float:
    """As :func:`fail_to_load_universal`, where ranks exchange parts of the state of Adam."""
    save_first(path)
    if dist.get_rank() == 0:  # As an older DeepSpeed saves.
        for file in (path / "first").glob("*optim_states.pt"):
            content = torch.load(file, weights_only=False)
            del content["optimizer_state_dict"]["param_alignment_paddings"]
            torch.save(content, file)
    dist.barrier()
    zero = {"stage": 1, "parameter_alignment": True}
    engine = engine_of(1, "fp32", zero_optimization=zero)
    return fail_to_load(engine, path, "first/*pp_rank_1_*optim_states.pt")


def save_first(path: Path) -> None:
    engine = engine_of(1, "fp32")
    train_engine(engine, 0, "fp32")
    engine.save_checkpoint(str(path), tag="first")
    engine.destroy()


def fail_to_load(engine: Any, path: Path, pattern: str) -> float:
    """Loads where rank 1 has truncated files, then whole ones, and trains."""
    from torch_ckpt.frameworks.deepspeed.engine import attach

    attach(engine)
    folder = own_copy(path, "own")
    if dist.get_rank() == 1:
        truncate(folder.glob(pattern))
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="PytorchStreamReader"):
        engine.load_checkpoint(str(folder))
    took = time.monotonic() - begin
    dist.barrier()
    engine.load_checkpoint(str(path))
    assert all(map(math.isfinite, train_engine(engine, STEPS, "fp32")))
    engine.destroy()
    return took
