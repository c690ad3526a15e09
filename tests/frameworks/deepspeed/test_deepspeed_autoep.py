"""Checkpoints of DeepSpeed's AutoEP load into a model with all experts, and are written for it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed_autoep_runs import EXPERTS, HIDDEN, INNER, resume_engine, resume_plain, save
from deepspeed_runs import convert, loaded_whole
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

# ZeRO stage, ranks with different experts, whether the order is data before experts, and whether a
# parameter of experts is frozen.
CASES = {
    "stage 1": (1, 2, False, False),
    "stage 2, data before experts": (2, 2, True, False),
    "stage 2, one expert each": (2, 4, False, False),
    "stage 3": (3, 2, False, False),
    "stage 1, frozen": (1, 2, False, True),
}

Saved = Callable[[str], tuple[Path, list[float]]]


@pytest.fixture(scope="module")
def saved(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of a case, which is saved when first asked for: the tag's folder, the losses after it."""

    @functools.cache
    def save_case(case: str) -> tuple[Path, list[float]]:
        path = tmp_path_factory.mktemp("autoep")
        losses = engines.run(save, path, *CASES[case])[0]
        return path / (path / "latest").read_text(), losses

    return save_case


@pytest.mark.thin("stage 2, one expert each", "stage 3")
@pytest.mark.parametrize("case", [case for case in CASES if "frozen" not in case])
def test_every_tensor_equals_what_deepspeed_converts(
    saved: Saved, engines: Ranks, tmp_path: Path, case: str
) -> None:
    path, _ = saved(case)
    engines.run(convert, path, tmp_path / "universal")
    for prefix in ("model.", "optim."):
        assert main(["diff", str(path), str(tmp_path / "universal"), "--prefix", prefix]) == 0
    assert loaded_whole(path)["model.layers.1.mlp.experts.w3"].shape == (EXPERTS, INNER, HIDDEN)


@pytest.mark.thin("stage 2, one expert each", "stage 3")
@pytest.mark.parametrize("case", [case for case in CASES if "frozen" not in case])
def test_training_continues_with_all_experts_on_one_rank(
    saved: Saved, worlds: Worlds, case: str
) -> None:
    path, expected = saved(case)
    assert worlds.run(1, resume_plain, path)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.thin("stage 2, one expert each-2-1", "stage 3-1-4")
@pytest.mark.parametrize(("stage", "ranks"), [(1, 4), (2, 1), (1, 2)])
@pytest.mark.parametrize("case", ["stage 2, one expert each", "stage 3"])
def test_deepspeed_resumes_with_other_experts_on_each_rank(
    saved: Saved, engines: Ranks, tmp_path: Path, case: str, stage: int, ranks: int
) -> None:
    path, expected = saved(case)
    target = tmp_path / "universal"
    assert main(["convert", str(path), str(target), "--to", "universal"]) == 0
    for losses in engines.run(resume_engine, target, stage, ranks):
        assert losses == pytest.approx(expected, abs=1e-6)


def test_rules_may_say_how_ranks_share_experts(saved: Saved) -> None:
    path, _ = saved("stage 1")
    rules = ".*experts.* shard(0) transpose(1, 2)\n.* unique"
    key = "model.layers.0.mlp.experts.w2"
    state = {key: torch.empty(EXPERTS, INNER, HIDDEN)}
    dcp.load(state, storage_reader=FastReader(path, rules=rules), no_dist=True)
    assert_same(state[key], loaded_whole(path)[key].transpose(1, 2))


def test_frozen_experts_are_those_of_their_files(saved: Saved) -> None:
    path, _ = saved("stage 1, frozen")
    loaded = loaded_whole(path)
    frozen = "layers.1.mlp.experts.w2"
    assert f"optim.state.{frozen}.exp_avg" not in loaded
    for expert in range(EXPERTS):
        file = path / f"layer_1_expert_{expert}_mp_rank_00_model_states.pt"
        stored = torch.load(file)[f"{frozen}.{expert}"]
        assert_same(loaded[f"model.{frozen}"][expert], stored)


@pytest.fixture
def copied(saved: Saved, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a checkpoint, to be changed."""

    def copy(case: str) -> Path:
        return Path(shutil.copytree(saved(case)[0], tmp_path / "tag"))

    return copy


def change(folder: Path, edit: Callable[[dict[str, Any]], None], pattern: str) -> None:
    for file in folder.glob(pattern):
        state = torch.load(file, weights_only=False)
        edit(state)
        torch.save(state, file)


MAPS = "its ds_autoep_layers are invalid"
EDITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no dict": (lambda layer: layer.update(affine_maps=5), MAPS),
    "no pieces": (
        lambda layer: [
            one["ranks"][rank].update(pieces=[])
            for one in layer["affine_maps"]["params"].values()
            for rank in (0, 1)
        ],
        "2 ranks share .*, and its affine_map has 1",
    ),
    "no map": (lambda layer: layer.pop("affine_maps"), MAPS),
    "no ranks": (lambda layer: layer.update(affine_maps={"params": {"w": {}}}), MAPS),
    "one rank": (
        lambda layer: [one["ranks"].pop(1) for one in layer["affine_maps"]["params"].values()],
        "2 ranks share .*, and its affine_map has 1",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_layers_that_are_invalid_are_an_error(copied: Callable[[str], Path], edit: str) -> None:
    folder = copied("stage 1")
    call, match = EDITS[edit]
    change(folder, lambda state: call(state["ds_autoep_layers"][0]), "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=match):
        FastReader(folder).read_metadata()


@pytest.mark.parametrize("missing", [[2], [3], range(EXPERTS)], ids=["one", "last", "all"])
def test_a_missing_file_of_a_frozen_expert_is_named(
    copied: Callable[[str], Path], missing: Iterable[int]
) -> None:
    folder = copied("stage 1, frozen")
    for expert in missing:
        next(folder.glob(f"layer_1_expert_{expert}_*")).unlink()
    match = rf"no file of expert {min(missing)} of 'layers\.1\.mlp\.experts"
    with pytest.raises(NotFoundError, match=match):
        FastReader(folder).read_metadata()


def test_two_files_of_a_frozen_expert_are_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("stage 1, frozen")
    file = next(folder.glob("layer_1_expert_3_*"))
    shutil.copy(file, folder / file.name.replace("layer_1", "layer_7"))
    with pytest.raises(CorruptionError, match="which is no tensor or in another file"):
        FastReader(folder).read_metadata()


def test_files_of_exchanged_ranks_are_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("stage 3")
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    (folder / names[0]).rename(folder / "other")
    (folder / names[1]).rename(folder / names[0])
    (folder / "other").rename(folder / names[1])
    with pytest.raises(CorruptionError, match="the partition of group 0 is"):
        FastReader(folder).read_metadata()


def test_tensor_parallel_ranks_are_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("stage 3")
    for file in folder.glob("*mp_rank_00*"):
        shutil.copy(file, file.with_name(file.name.replace("mp_rank_00", "mp_rank_01")))
    with pytest.raises(UnsupportedError, match="it has ds_autoep_layers, and experts"):
        FastReader(folder).read_metadata()
