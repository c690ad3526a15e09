"""Checkpoints of DeepSpeed's expert parallelism load into a model with all experts."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed_expert_runs import (
    EXPERTS,
    LAYERS,
    resume_engine,
    resume_on_one_rank,
    save_experts,
)
from deepspeed_runs import loaded_whole
from ranks import Ranks, Worlds
from states import assert_same

from torch_ckpt import FastReader
from torch_ckpt.cli.main import main
from torch_ckpt.errors import CheckpointError, CorruptionError, NotFoundError, UnsupportedError

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.framework("deepspeed"),
]

EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts"
FOUR = "four ranks with experts 2 x 2"
# ZeRO stage, ranks with different experts, whether the order is data before experts, and the number
# of a frozen expert on each rank.
CASES = {
    FOUR: (2, 2, False, None),
    "data before experts": (2, 2, True, None),
    "one expert each": (1, 4, False, None),
    "a frozen expert on each rank": (2, 2, False, 1),
}

Saved = Callable[[str], tuple[Path, list[float], dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def saved(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of a case, saved when first asked for: the folder, the losses after it, all tensors."""

    @functools.cache
    def save_case(case: str) -> tuple[Path, list[float], dict[str, torch.Tensor]]:
        path = tmp_path_factory.mktemp("experts")
        results = engines.run(save_experts, path, *CASES[case])
        tensors = {fqn: tensor for _, of_rank in results for fqn, tensor in of_rank.items()}
        return path, results[0][0], tensors

    return save_case


@pytest.mark.thin(FOUR, "a frozen expert on each rank")
@pytest.mark.parametrize("case", CASES)
def test_all_experts_are_loaded_by_their_numbers_in_the_layer(saved: Saved, case: str) -> None:
    path, _, expected = saved(case)
    assert len(expected) == LAYERS * (3 + EXPERTS * 5)
    loaded = loaded_whole(path)
    assert_same({fqn: value for fqn, value in loaded.items() if fqn in expected}, expected)
    states = [fqn for fqn in loaded if fqn.startswith("optim.") and fqn.endswith(".exp_avg")]
    _, ranks, _, frozen = CASES[case]
    assert len(states) == LAYERS * (3 + 3 * (EXPERTS if frozen is None else EXPERTS - ranks))


@pytest.mark.thin(FOUR, "a frozen expert on each rank")
@pytest.mark.parametrize("case", CASES)
def test_training_continues_with_all_experts_on_one_rank(
    saved: Saved, worlds: Worlds, case: str
) -> None:
    path, expected, _ = saved(case)
    _, ranks, _, frozen = CASES[case]
    losses = worlds.run(1, resume_on_one_rank, path, ranks, frozen)[0]
    assert losses == pytest.approx(expected, abs=1e-6)


@pytest.mark.thin("2")
@pytest.mark.parametrize("ranks", [1, 2])
def test_deepspeed_resumes_with_all_experts_on_each_rank_from_a_universal_folder(
    saved: Saved, worlds: Worlds, tmp_path: Path, ranks: int
) -> None:
    path, expected, _ = saved(FOUR)
    target = tmp_path / "universal"
    assert main(["convert", str(path), str(target), "--to", "universal"]) == 0
    for losses in worlds.run(ranks, resume_engine, target):
        assert losses == pytest.approx(expected, abs=1e-6)


@pytest.fixture
def copied(saved: Saved, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be changed."""
    path, _, _ = saved(FOUR)
    return Path(shutil.copytree(path / (path / "latest").read_text(), tmp_path / "tag"))


def test_experts_of_tensor_parallel_ranks_are_refused(copied: Path) -> None:
    model = copied / "mp_rank_00_model_states.pt"
    shutil.copy(model, model.with_name("mp_rank_01_model_states.pt"))
    with pytest.raises(UnsupportedError, match="it has layer_0_expert_0_mp_rank_00"):
        FastReader(copied).read_metadata()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"ds_autoep_layers": [{"ep": 2}]}, "its ds_autoep_layers are invalid"),
        ({"ds_config": "ds.json"}, "it is unknown which ranks have which experts"),
        ({"dp_world_size": 6}, "on 6 ranks, and the layer has 4 experts"),
    ],
)
def test_experts_that_cannot_be_told_apart_are_an_error(
    copied: Path, change: dict[str, Any], error: str
) -> None:
    file = copied / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(file, weights_only=False), **change}, file)
    with pytest.raises(CheckpointError, match=error):
        FastReader(copied).read_metadata()


def test_an_alias_of_an_expert_is_refused_and_the_others_load(copied: Path) -> None:
    file = copied / "mp_rank_00_model_states.pt"
    expert = f"0.{EXPERT}.0.up.weight"
    before = loaded_whole(copied)
    aliases = {"tied": expert, expert: "0.up.weight"}
    torch.save({**torch.load(file, weights_only=False), "shared_params": aliases}, file)
    with pytest.raises(dcp.CheckpointException, match=r"UnsupportedError.*'tied'.*experts share"):
        dcp.load({"model.tied": None}, storage_reader=FastReader(copied), no_dist=True)
    assert_same(loaded_whole(copied), before)


def test_a_missing_file_of_an_expert_is_named(copied: Path) -> None:
    next(copied.glob("layer_1_expert_2_*")).unlink()
    with pytest.raises(NotFoundError, match=f"no file of expert 2 of '1.{EXPERT}"):
        FastReader(copied).read_metadata()


def test_a_file_of_an_expert_has_its_weights_only(copied: Path) -> None:
    file = next(copied.glob("layer_1_expert_2_*"))
    torch.save({**torch.load(file), "1.up.weight": torch.ones(6, 6)}, file)
    with pytest.raises(CorruptionError, match=f"{file.name}: it has '1.up.weight'"):
        FastReader(copied).read_metadata()
