"""Checkpoints of DeepSpeed's tensor and pipeline parallelism load without conversion."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepspeed_parallel_runs import (
    resume_fsdp,
    resume_pipeline,
    resume_tensor_parallel,
    save_pipeline,
    save_tensor_parallel,
)
from deepspeed_runs import convert, loaded_whole
from ranks import Ranks, Worlds
from states import assert_same

from torch_ckpt.cli.main import main

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.framework("deepspeed"),
]


Saved = Callable[[int], tuple[Path, list[float]]]


@pytest.fixture(scope="module")
def tensor_parallel(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of a ZeRO stage: a checkpoint of 2 x 2 ranks, and the losses of the steps after it."""

    @functools.cache
    def save_stage(stage: int) -> tuple[Path, list[float]]:
        path = tmp_path_factory.mktemp("tensor") / str(stage)
        return path, engines.run(save_tensor_parallel, path, stage)[0]

    return save_stage


def merged_by_deepspeed(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a universal folder."""
    found = {}
    for file in (path / "zero").glob("*/*.pt"):
        value = torch.load(file, weights_only=False)
        fqn, state = file.parent.name, file.stem
        name = f"model.{fqn}" if state == "fp32" else f"optim.state.{fqn}.{state}"
        found[name] = value["param"] if isinstance(value, dict) else value
    return found


@pytest.mark.thin("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_tensor_parallel_ranks_are_united_as_deepspeed_unites_them(
    engines: Ranks, tensor_parallel: Saved, stage: int
) -> None:
    path, _ = tensor_parallel(stage)
    engines.run(convert, path / (path / "latest").read_text(), path / "universal")
    expected = merged_by_deepspeed(path / "universal")
    expected.pop("model.scale", None)
    loaded = loaded_whole(path)
    assert loaded.pop("model.scale").tolist() == [1.5] * 6
    if stage == 3:  # DeepSpeed stores the steps of ZeRO-3 elsewhere.
        loaded = {fqn: value for fqn, value in loaded.items() if not fqn.endswith(".step")}
    assert_same(loaded, expected)


@pytest.mark.thin("1-1", "3-2")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_training_continues_with_fsdp2_on_other_ranks(
    tensor_parallel: Saved, worlds: Worlds, stage: int, ranks: int
) -> None:
    path, expected = tensor_parallel(stage)
    for losses in worlds.run(ranks, resume_fsdp, path):
        assert losses == pytest.approx(expected, abs=1e-6)


@pytest.mark.thin("1-2-4", "3-1-2")
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 4)])
@pytest.mark.parametrize("source", [1, 3])
def test_tensor_parallel_engines_resume_from_a_universal_folder(
    tensor_parallel: Saved,
    engines: Ranks,
    tmp_path: Path,
    source: int,
    stage: int,
    ranks: int,
) -> None:
    path, expected = tensor_parallel(source)
    target = tmp_path / "universal"
    assert main(["convert", str(path), str(target), "--to", "universal"]) == 0
    for losses in engines.run(resume_tensor_parallel, target, stage, ranks):
        assert losses == pytest.approx(expected, abs=1e-6)


def test_the_patterns_give_what_the_affine_map_gives(
    tensor_parallel: Saved, tmp_path: Path
) -> None:
    path, _ = tensor_parallel(1)
    folder = path / (path / "latest").read_text()
    for file in folder.iterdir():
        if file.name.endswith("model_states.pt"):
            state = torch.load(file, weights_only=False)
            assert state["universal_checkpoint_info"].pop("affine_map")
            torch.save(state, tmp_path / file.name)
        elif file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert_same(loaded_whole(tmp_path), loaded_whole(path))


def test_pipeline_stages_are_united_and_other_numbers_of_them_resume(
    engines: Ranks, tmp_path: Path
) -> None:
    losses = engines.run(save_pipeline, tmp_path)[0]
    engines.run(convert, tmp_path / (tmp_path / "latest").read_text(), tmp_path / "universal")
    expected = merged_by_deepspeed(tmp_path / "universal")
    assert len(expected) == 5 * 2 * 4
    assert_same(loaded_whole(tmp_path / "universal"), expected)
    # DeepSpeed's conversion loses the buffers.
    scales = {f"model.{layer}.scale": torch.full((6,), 1.5) for layer in range(5)}
    assert_same(loaded_whole(tmp_path), {**expected, **scales})
    target = tmp_path / "ours"
    assert main(["convert", str(tmp_path), str(target), "--to", "universal"]) == 0
    for stages in (2, 4):
        for resumed in engines.run(resume_pipeline, target, stages):
            assert resumed == pytest.approx(losses, abs=1e-6)
