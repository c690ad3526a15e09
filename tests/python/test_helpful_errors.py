"""Errors that name everything that is wrong, and what to pass instead."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import deepspeed_checkpoints
import pytest
import torch
from checkpoints import failure_of, load
from safetensors.torch import save_file
from torch.distributed.checkpoint._extension import ExtensionRegistry, ZStandard

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, Run, SafetensorsWriter
from torch_ckpt.errors import NotFoundError, UnsupportedError


def save(path: Path, state: dict[str, Any] | None = None) -> None:
    torch_ckpt.save(state or {"w": torch.ones(3)}, checkpoint_id=path)


def load_error(path: Path, state: dict[str, Any] | None = None) -> BaseException:
    wanted = state or {"w": torch.ones(3)}
    return failure_of(lambda: torch_ckpt.load(wanted, storage_reader=FastReader(path)))


def test_a_load_names_all_differences_at_once(tmp_path: Path) -> None:
    stored = {f"layer.{i}.weight": torch.ones(4, 4) for i in range(3)}
    save(tmp_path, {"model": {**stored, "bias": torch.ones(4), "scale": torch.ones(2)}})
    wanted = {
        "model": {
            "layer.0.weight": torch.ones(4, 5),
            "layer.1.weight": torch.ones(5, 4),
            "layers.2.weight": torch.ones(4, 4),
            "bias": torch.ones(4, dtype=torch.float16),
            "head": torch.ones(1),
        }
    }
    error = load_error(tmp_path, wanted)
    assert type(error) is ValueError
    message = str(error)
    assert message.startswith("Size mismatch between saved")  # As DCP's own message does.
    for part in (
        "missing in the checkpoint: model.layers.2.weight (similar: model.layer.2.weight), "
        "model.head",
        "another shape in the checkpoint: model.layer.0.weight [4, 4], not [4, 5], "
        "model.layer.1.weight [4, 4], not [5, 4]",
        "another dtype in the checkpoint, which is no error: model.bias torch.float32, not "
        "torch.float16",
        "not requested: model.layer.2.weight, model.scale",
    ):
        assert part in message


def test_missing_names_without_a_prefix_are_recognised(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"a.weight": torch.ones(2)}})
    error = load_error(tmp_path, {"a.weight": torch.ones(2), "b": torch.ones(2)})
    assert type(error) is RuntimeError
    assert str(error).startswith("Missing key in checkpoint state_dict: a.weight.")
    assert "a.weight (similar: model.a.weight), b\n" in str(error)


def test_a_long_list_of_differences_is_cut(tmp_path: Path) -> None:
    save(tmp_path, {f"stored.{i}": torch.ones(1) for i in range(1000)})
    error = load_error(tmp_path, {f"wanted.{i}": torch.ones(1) for i in range(1000)})
    assert str(error).count("and 980 more") == 2
    assert len(str(error)) < 5000


def test_a_stored_tensor_in_place_of_an_object_is_a_difference(tmp_path: Path) -> None:
    save(tmp_path, {"lr": torch.ones(()), "w": torch.ones(2)})
    error = load_error(tmp_path, {"lr": 0.1, "w": torch.ones(3)})
    assert "of another type in the checkpoint: lr a tensor, not float" in str(error)
    assert "of another shape in the checkpoint: w [2], not [3]" in str(error)


def test_many_missing_names_are_reported_quickly(tmp_path: Path) -> None:
    names = [f"{i}.self_attn.q_proj.weight" for i in range(10_000)]
    value = torch.ones(1)
    save(tmp_path, {f"model.layers.{name}": value for name in names})
    begin = time.monotonic()
    error = load_error(tmp_path, {f"model.layer.{name}": value for name in names})
    assert "(similar: model.layers.0.self_attn.q_proj.weight)" in str(error)
    assert time.monotonic() - begin < 10


def message_for(path: Path) -> str:
    error = load_error(path)
    assert isinstance(error, NotFoundError)
    assert str(error).startswith(f"no checkpoint is committed in {path}: ")
    return str(error).removeprefix(f"no checkpoint is committed in {path}: ")


def test_a_run_is_named_with_its_steps(tmp_path: Path) -> None:
    for step in (50, 100, 150):
        save(tmp_path / f"step-{step}")
    (tmp_path / "step-200").mkdir()  # Not committed.
    assert message_for(tmp_path) == (
        f"it is a run with 3 steps, 50 to 150; use Run('{tmp_path}').restore, or pass a step, "
        f"such as {tmp_path}/step-150"
    )


def test_the_newest_of_many_steps_is_named(tmp_path: Path) -> None:
    for step in range(95, 185):
        save(tmp_path / f"step-{step}")
    assert message_for(tmp_path) == (
        f"it is a run with 90 steps, 95 to 184; use Run('{tmp_path}').restore, or pass a step, "
        f"such as {tmp_path}/step-184"
    )


def test_checkpoints_in_subdirectories_are_named(tmp_path: Path) -> None:
    for step in (9, 10):
        save(tmp_path / f"iter_{step}")
    assert message_for(tmp_path) == (
        f"its checkpoints are in iter_9, iter_10; pass one of them, such as {tmp_path}/iter_10"
    )
    save(tmp_path / "iter_10.5")
    assert message_for(tmp_path).endswith(f"pass one of them, such as {tmp_path}/iter_10.5")


def test_an_unfinished_save_is_named(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"PK")
    assert "did not finish" in message_for(tmp_path)


def test_files_of_torch_save_are_named(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    assert message_for(tmp_path) == (
        f"it has files of torch.save; pass one of them, such as {tmp_path}/pytorch_model.bin"
    )
    torch_ckpt.load(
        {"w": torch.zeros(3)}, storage_reader=FastReader(tmp_path / "pytorch_model.bin")
    )


def test_a_folder_with_safetensors_and_files_of_torch_save_loads_the_safetensors(
    tmp_path: Path,
) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    save_file({"w": torch.full([3], 2.0)}, tmp_path / "model.safetensors")
    state = {"w": torch.ones(3)}
    torch_ckpt.load(state, storage_reader=FastReader(tmp_path))
    assert state["w"].tolist() == [2.0] * 3


def test_deepspeeds_folders_without_a_latest_file_are_named(tmp_path: Path) -> None:
    for step in (90, 100):
        deepspeed_checkpoints.write(tmp_path / f"global_step{step}", 2)
    assert message_for(tmp_path) == (
        f"it has checkpoints of DeepSpeed in global_step90, global_step100 (pass {tmp_path}/"
        "global_step100); there is no file latest, which would name the DeepSpeed checkpoint to "
        "load"
    )
    torch.save({"w": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "exported").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "exported" / "model.safetensors")
    message = message_for(tmp_path)
    assert f"of safetensors in exported (pass {tmp_path}/exported)" in message
    assert f"torch.save in pytorch_model.bin (pass {tmp_path}/pytorch_model.bin)" in message
    assert f"pass {tmp_path}/global_step100" in message


@pytest.mark.parametrize("has_latest", [True, False])
@pytest.mark.parametrize("weights", ["model.safetensors", "model.safetensors.index.json"])
def test_a_folder_with_weights_and_a_training_state_asks_for_one_of_them(
    tmp_path: Path, weights: str, has_latest: bool
) -> None:
    """As Hugging Face's Trainer leaves it with DeepSpeed."""
    state = tmp_path / "global_step100"
    deepspeed_checkpoints.write(tmp_path / "global_step99", 2)
    deepspeed_checkpoints.write(state, 2)
    if has_latest:
        (tmp_path / "latest").write_text(state.name)
    torch_ckpt.save(
        {"w": torch.full([3], 2.0), "v": torch.zeros(3)},
        storage_writer=SafetensorsWriter(
            tmp_path, max_shard_nbytes=12 if "index" in weights else 10**6
        ),
    )
    error = load_error(tmp_path)
    assert isinstance(error, UnsupportedError)
    assert "safetensors" in str(error)
    assert "DeepSpeed" in str(error)
    assert f"pass {tmp_path / weights} for the weights, or {state} for the training" in str(error)
    loaded = {"w": torch.ones(3)}
    torch_ckpt.load(loaded, storage_reader=FastReader(tmp_path / weights))
    assert loaded["w"].tolist() == [2.0] * 3
    FastReader(state).read_metadata()


def test_weights_whose_training_state_is_elsewhere_load(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step100")  # Not uploaded.
    save_file({"w": torch.full([3], 2.0)}, tmp_path / "model.safetensors")
    state = {"w": torch.ones(3)}
    torch_ckpt.load(state, storage_reader=FastReader(tmp_path))
    assert state["w"].tolist() == [2.0] * 3


def test_a_path_that_does_not_exist_names_a_similar_one(tmp_path: Path) -> None:
    save(tmp_path / "step-100")
    assert message_for(tmp_path / "step_100") == (
        f"the directory does not exist; did you mean {tmp_path}/step-100?"
    )
    (tmp_path / "empty").mkdir()
    assert message_for(tmp_path / "empty") == "the directory is empty"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("x")
    assert message_for(tmp_path / "other") == "there is no .metadata; it has notes"


def test_a_checkpoint_is_not_taken_for_a_run(tmp_path: Path) -> None:
    save(tmp_path / "step-100")
    with Run(tmp_path / "step-100") as run, pytest.raises(NotFoundError, match="is a checkpoint"):
        run.restore({"w": torch.ones(3)})


def test_a_stream_transform_that_this_process_lacks_is_named(tmp_path: Path) -> None:
    writer = FastWriter(tmp_path, _extensions=[ZStandard()])
    torch_ckpt.save({"w": torch.ones(3)}, storage_writer=writer)
    registry = ExtensionRegistry()
    registry.extensions.clear()
    reader = FastReader(tmp_path, _extension_registry=registry)
    error = failure_of(load, {"w": torch.zeros(3)}, reader)
    assert isinstance(error, UnsupportedError)
    assert "'w'" in str(error)
    assert "stream.zstd" in str(error)
