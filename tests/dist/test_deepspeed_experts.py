"""Checkpoints of DeepSpeed's expert parallelism load into a model with all experts."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
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
from torch_ckpt.errors import UnsupportedError

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
    ),
]

FOUR = "four ranks with experts 2 x 2"
CASES = {FOUR: (2, 2, False), "data before experts": (2, 2, True), "one expert each": (1, 4, False)}

Saved = dict[str, tuple[Path, list[float], dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def engines() -> Iterator[Ranks]:
    """Four ranks that have imported DeepSpeed."""
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def saved(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """By case: a checkpoint, the losses of the steps after it, and the tensors of all ranks."""
    found: Saved = {}
    for case, arguments in CASES.items():
        path = tmp_path_factory.mktemp("experts")
        tensors: dict[str, torch.Tensor] = {}
        results = engines.run(save_experts, path, *arguments)
        for _, of_rank in results:
            tensors.update(of_rank)
        found[case] = path, results[0][0], tensors
    return found


@pytest.mark.parametrize("case", CASES)
def test_all_experts_are_loaded_by_their_numbers_in_the_layer(saved: Saved, case: str) -> None:
    path, _, expected = saved[case]
    assert len(expected) == LAYERS * (3 + EXPERTS * 5)
    loaded = loaded_whole(path)
    assert_same({fqn: value for fqn, value in loaded.items() if fqn in expected}, expected)
    states = [fqn for fqn in loaded if fqn.startswith("optim.") and fqn.endswith(".exp_avg")]
    assert len(states) == LAYERS * (3 + EXPERTS * 3)


@pytest.mark.parametrize("case", CASES)
def test_training_continues_with_all_experts_on_one_rank(
    saved: Saved, worlds: Worlds, case: str
) -> None:
    path, expected, _ = saved[case]
    assert worlds.run(1, resume_on_one_rank, path)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_deepspeed_resumes_with_all_experts_on_each_rank_from_a_universal_folder(
    saved: Saved, worlds: Worlds, tmp_path: Path, ranks: int
) -> None:
    path, expected, _ = saved[FOUR]
    target = tmp_path / "universal"
    assert main(["convert", str(path), str(target), "--to", "universal"]) == 0
    for losses in worlds.run(ranks, resume_engine, target):
        assert losses == pytest.approx(expected, abs=1e-6)


def test_experts_of_tensor_parallel_ranks_are_refused(saved: Saved, tmp_path: Path) -> None:
    path, _, _ = saved[FOUR]
    shutil.copytree(path / (path / "latest").read_text(), tmp_path / "tag")
    file = next((tmp_path / "tag").glob("layer_1_expert_3_*"))
    file.rename(file.with_name("layer_1_expert_3_mp_rank_01_model_states.pt"))
    with pytest.raises(UnsupportedError, match="it has layer_1_expert_3_mp_rank_01"):
        FastReader(tmp_path / "tag").read_metadata()


def test_autoep_is_refused(saved: Saved, tmp_path: Path) -> None:
    path, _, _ = saved[FOUR]
    shutil.copytree(path / (path / "latest").read_text(), tmp_path / "tag")
    file = tmp_path / "tag/mp_rank_00_model_states.pt"
    torch.save({**torch.load(file, weights_only=False), "ds_autoep_layers": [{"ep": 2}]}, file)
    with pytest.raises(UnsupportedError, match="AutoEP is not supported"):
        FastReader(tmp_path / "tag").read_metadata()
