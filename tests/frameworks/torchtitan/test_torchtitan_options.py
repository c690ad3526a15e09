"""The options of torchtitan's checkpoint configuration: honoured, or refused by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="tests/check.py frameworks installs it")

from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager

from torch_ckpt.errors import UnsupportedError
from torch_ckpt.frameworks.torchtitan import checkpoints as torchtitan
from torch_ckpt.frameworks.torchtitan.checkpoints import FastCheckpointManager
from torch_ckpt.runs.run import Run

DOCUMENT = Path(__file__).parents[3] / "docs/torchtitan.md"

pytestmark = [
    pytest.mark.framework("torchtitan"),
    pytest.mark.slow,
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore"),
]


class State:
    def state_dict(self) -> dict[str, Any]:
        return {"value": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def built(path: Path, *, adapter: Any = None, **options: Any) -> Any:
    return FastCheckpointManager.Config(enable=True, **options).build(
        dataloader=None,
        model_parts=[torch.nn.Linear(2, 2)],
        optimizers=State(),
        lr_schedulers=State(),
        states={"train_state": State()},
        sd_adapter=adapter,
        base_folder=str(path),
    )


def test_every_option_of_torchtitan_is_one_that_is_honoured() -> None:
    options = {option.name for option in fields(CheckpointManager.Config)}
    assert options == torchtitan._HONOURED | {"async_mode"}


def test_what_is_refused_is_an_option_of_a_run_and_an_unknown_option_is_named(
    tmp_path: Path,
) -> None:
    options = set(inspect.signature(Run).parameters)
    assert options > torchtitan._REFUSED.keys() | torchtitan._STATED.keys()
    with pytest.raises(TypeError, match="'keep_larst'"):
        built(tmp_path, run={"keep_larst": 3})


def test_every_other_option_of_a_run_is_in_the_table_of_the_documents() -> None:
    options = set(inspect.signature(Run).parameters)
    (row,) = re.findall(r"^\| `run` \|.*`Run`, such as .*?: (.*) \|$", DOCUMENT.read_text(), re.M)
    assert (
        set(re.findall(r"`(\w+)`", row))
        == options - torchtitan._REFUSED.keys() - torchtitan._STATED.keys()
    )


def test_a_configuration_builds_the_manager(tmp_path: Path) -> None:
    manager = built(tmp_path, interval=3, keep_latest_k=2, async_mode="ASYNC")
    assert isinstance(manager, BaseCheckpointManager)
    assert Path(manager.run.directory) == tmp_path.resolve() / "checkpoint"
    assert manager.run.asynchronous
    assert manager.run.retention.keep_last == 2
    manager.close()
    manager.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"run": {"every": 3}}, "checkpoint.interval"),
        ({"run": {"directory": "x"}}, "checkpoint.folder"),
        ({"run": {"keep_last": 3}}, "checkpoint.keep_latest_k"),
        ({"run": {"asynchronous": True}}, "checkpoint.async_mode"),
        ({"run": {"keep_best": 3}}, "'keep_best'] is given, and has no use: torchtitan passes no"),
        ({"run": {"max_overhead": 0.1}}, "checkpoint.interval decides"),
        ({"run": {"agent": True}}, "checkpoint.async_mode='async'"),
        ({"exclude_from_loading": ["data_loader"]}, "checkpoint.exclude_from_loading"),
        ({"last_save_in_hf": True}, "checkpoint.last_save_in_hf"),
        ({"initial_load_in_hf": True}, "checkpoint.initial_load_in_hf"),
        ({"async_mode": "later"}, "async_mode"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        built(tmp_path, **options)


def test_an_initial_model_of_hugging_face_needs_a_path(tmp_path: Path) -> None:
    class Adapter:
        hf_assets_path = None

    with pytest.raises(ValueError, match=r"checkpoint\.initial_load_path or hf_assets_path"):
        built(tmp_path, adapter=Adapter(), initial_load_in_hf=True)


def test_an_option_of_a_later_torchtitan_is_refused_unless_it_is_at_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(kw_only=True)
    class Later(BaseCheckpointManager.Config):  # type: ignore[misc, name-defined, unused-ignore]
        compress: bool = False

    monkeypatch.setattr(BaseCheckpointManager, "Config", Later)
    config: Callable[..., Any] = FastCheckpointManager.Config

    class Own(config):  # type: ignore[misc, valid-type]
        compress = False

    monkeypatch.setattr(FastCheckpointManager, "Config", Own)
    built(tmp_path).close()
    monkeypatch.setattr(Own, "compress", True)
    with pytest.raises(UnsupportedError, match=r"checkpoint\.compress=True"):
        built(tmp_path)


def test_steps_may_be_on_a_store(tmp_path: Path, store_url: str) -> None:
    saved = built(tmp_path, folder=store_url, interval=2)
    assert saved.save(2)
    saved.close()
    torch.manual_seed(5)
    loaded = built(tmp_path, folder=store_url, interval=2)
    assert loaded.load()
    loaded.close()
    model = saved.states["model"].state_dict()
    assert model.keys() == loaded.states["model"].state_dict().keys()
    for name, value in loaded.states["model"].state_dict().items():
        assert torch.equal(value, model[name])
    assert not (tmp_path / "checkpoint").exists()
