"""FastReader on DeepSpeed's formats: names, values, and files that are damaged or disagree."""

from __future__ import annotations

import argparse
import enum
import pickle
import re
import types
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed_checkpoints import OPTIONS, RANKS, values, write, zero3_partition

from torch_ckpt import FastReader
from torch_ckpt.cli.main import main
from torch_ckpt.errors import CheckpointError, CorruptionError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.frameworks.rank_files.files import Files, Fragment, Partitioned, Unreadable

STAGES = (2, 3)
Change = Callable[[int, dict[str, Any]], Any]


class Color(enum.Enum):
    """A class that no list allows."""

    RED = 1
    BLUE = 2


def load(path: Path, *, without: Collection[str] = (), **options: Any) -> dict[str, Any]:
    """Every value of a checkpoint, by its FQN, but for some."""
    reader = FastReader(path, **options)
    state = {
        fqn: torch.empty(stored.size, dtype=stored.properties.dtype)
        if hasattr(stored, "chunks")
        else None
        for fqn, stored in reader.read_metadata().state_dict_metadata.items()
        if fqn not in without
    }
    dcp.load(state, storage_reader=FastReader(path, **options), no_dist=True)
    return state


def optim_file(folder: Path, rank: int) -> Path:
    return folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("stage", STAGES)
def test_names_and_values_are_those_of_the_state_dict(tmp_path: Path, stage: int) -> None:
    write(tmp_path / "tag", stage)
    (tmp_path / "latest").write_text("tag\n")
    found = load(tmp_path)
    for fqn, tensor in {**values(), "model.tied": values()["model.up.weight"]}.items():
        assert torch.equal(found.pop(fqn), tensor), fqn
    names = [["up.weight", "cube", "empty"], ["up.bias", "scalar"]]
    for group, (options, fqns) in enumerate(zip(OPTIONS, names, strict=True)):
        for name, value in {**options, "params": fqns}.items():
            assert found.pop(f"optim.param_groups.{group}.{name}") == value
    assert found == {
        "loss_scaler.cur_scale": 4.0,
        "dp_world_size": RANKS,
        "global_steps": 9,
        "lr_scheduler.last_epoch": 8,
        "client.model": "a client's",
    }


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("alias", "fqn"),
    [
        ("cube", "up.weight"),  # Trained, both.
        ("frozen", "up.weight"),
        ("up.bias", "frozen"),
        ("frozen", "buffer"),
        ("buffer", "up.bias"),
    ],
)
def test_a_stated_alias_never_replaces_stored_elements(
    tmp_path: Path, stage: int, alias: str, fqn: str
) -> None:
    def share(_: int, model: dict[str, Any]) -> None:
        model["shared_params"] = {alias: fqn}

    write(tmp_path / "tag", stage, change_model=share)
    found = load(tmp_path / "tag")
    for name, tensor in values().items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("stage", STAGES)
def test_a_tied_parameter_in_the_module_has_the_master_weights(tmp_path: Path, stage: int) -> None:
    """The module has it in 16 bits: a view of the same record, as torch.save stores tied tensors.

    With ZeRO-3, that is so for small parameters, which every rank has whole.
    """

    def tie(_: int, model: dict[str, Any]) -> None:
        shared = values()["model.up.weight"].bfloat16()
        model["module"].update({"up.weight": shared, "tied": shared})

    write(tmp_path / "tag", stage, change_model=tie)
    assert torch.equal(load(tmp_path / "tag")["model.tied"], values()["model.up.weight"])


@pytest.mark.parametrize("stage", STAGES)
def test_an_alias_of_a_parameter_that_was_not_saved_is_missing_only_if_requested(
    tmp_path: Path, stage: int
) -> None:
    def exclude(_: int, model: dict[str, Any]) -> None:
        model["shared_params"] = {"head": "frozen"}
        del model["module"]["frozen"]
        for name in ("frozen_param_shapes", "frozen_param_fragments"):
            model[name] = None

    write(tmp_path / "tag", stage, change_model=exclude)
    found = load(tmp_path / "tag")
    assert not {"model.head", "model.frozen"} & set(found)
    for name, tensor in values().items():
        assert name == "model.frozen" or torch.equal(found[name], tensor), name
    with pytest.raises(dcp.CheckpointException, match=r"model\.head"):
        dcp.load(
            {"model.head": torch.empty(11)},
            storage_reader=FastReader(tmp_path / "tag"),
            no_dist=True,
        )


def test_a_clients_value_does_not_hide_one_of_the_optimizer(tmp_path: Path) -> None:
    write(tmp_path / "tag", 2, change_model=lambda _, model: model.update(loss_scaler="mine"))
    found = load(tmp_path / "tag")
    assert found["loss_scaler.cur_scale"] == 4.0
    assert found["client.loss_scaler"] == "mine"


def test_groups_of_deepspeeds_own_adam_get_the_form_of_torchs(tmp_path: Path) -> None:
    def fuse(rank: int, optim: dict[str, Any]) -> None:
        base = optim["optimizer_state_dict"]
        for group in base["param_groups"]:
            group.update(step=9, betas=(0.9, 0.99), eps=1e-8, bias_correction=True)
        for state in base["state"].values():
            del state["step"]

    write(tmp_path / "tag", 3, fuse)
    found = load(tmp_path / "tag")
    assert torch.equal(found["optim.state.scalar.step"], torch.tensor(9.0))
    adamw = torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"][0]
    for name in adamw:
        assert f"optim.param_groups.1.{name}" in found
    assert found["optim.param_groups.0.decoupled_weight_decay"] is True
    assert "optim.param_groups.0.step" not in found


def hole(rank: int, optim: dict[str, Any]) -> None:
    if rank == 1:
        fqn, address = next(iter(optim["param_slice_mappings"][0].items()))
        assert fqn == "cube"
        address.numel -= 1


def overlap(rank: int, optim: dict[str, Any]) -> None:
    if rank == 1:
        optim["param_slice_mappings"][0]["cube"].numel += 1


def beyond(rank: int, optim: dict[str, Any]) -> None:
    if rank == 1:
        optim["param_slice_mappings"][0]["cube"].start = 1 << 40


def other_step(rank: int, optim: dict[str, Any]) -> None:
    if rank == 2:
        base = optim.get("base_optimizer_state") or optim["optimizer_state_dict"]
        base["state"][0]["step"] += 1


def other_step_in_a_view(rank: int, optim: dict[str, Any]) -> None:
    base = optim.get("base_optimizer_state") or optim["optimizer_state_dict"]
    base["state"][0]["step"] = torch.tensor([0.0, 9.0 + (rank == 2)])[1]


def no_groups(_: int, optim: dict[str, Any]) -> None:
    optim["ds_zero_partition_groups"] = 5


def no_facts(_: int, optim: dict[str, Any]) -> None:
    optim["ds_zero_partition_groups"] = [5, 5]


def no_ranks(rank: int, optim: dict[str, Any]) -> None:
    facts = {"partition_count": RANKS, "partition_rank": rank, "partition_ranks": 5}
    optim["ds_zero_partition_groups"] = [facts, facts]


def other_options(rank: int, optim: dict[str, Any]) -> None:
    if rank == 1:
        base = optim.get("base_optimizer_state") or optim["optimizer_state_dict"]
        base["param_groups"][1]["lr"] = 3.0


def short(rank: int, optim: dict[str, Any]) -> None:
    if rank == 1:
        optim["fp32_flat_groups"][0] = optim["fp32_flat_groups"][0][:-1].clone()


def other_dtype(rank: int, optim: dict[str, Any]) -> None:
    if rank == 1:
        optim["fp32_flat_groups"][0] = optim["fp32_flat_groups"][0].double()


@pytest.mark.parametrize(
    ("stage", "change", "message"),
    [
        (2, beyond, "rank_1_.*of 'cube' exceed"),
        (2, other_step, "rank_2_.*'step' of 'up.weight' on rank 2 differs .* rank 0 in zero_pp"),
        (3, other_step, "rank_2_.*'step' of 'up.weight' on rank 2 differs .* rank 0 in zero_pp"),
        (2, other_step_in_a_view, "rank_2_.*'step' of 'up.weight' on rank 2 differs .* rank 0"),
        (3, no_groups, "optimizer_state_dict.ds_zero_partition_groups is a int"),
        (3, no_facts, "it has no optimizer_state_dict.ds_zero_partition_groups.0.partition_count"),
        (3, no_ranks, "it has no optimizer_state_dict.ds_zero_partition_groups.0.partition_ranks"),
        (2, other_options, "rank_1_.*parameter groups, those of rank 1, differ .* rank 0 in zero"),
        (3, short, "rank_1_.*'up.weight'.* has 21 elements, and their shapes require 22"),
        (3, other_dtype, "rank_1_.*'up.weight' of rank 1 is torch.float64"),
    ],
)
def test_files_that_disagree_are_refused(
    tmp_path: Path, stage: int, change: Change, message: str
) -> None:
    write(tmp_path / "tag", stage, change)
    with pytest.raises(CorruptionError, match=message):
        FastReader(tmp_path / "tag").read_metadata()


def refused(path: Path, kind: type[CheckpointError], match: str) -> set[str]:
    """The values that cannot be loaded, with this error. All others are right."""
    names: set[str] = set()
    right = {**values(), "model.tied": values()["model.up.weight"]}
    for fqn in FastReader(path).read_metadata().state_dict_metadata:
        state = {fqn: torch.zeros_like(right[fqn]) if fqn in right else None}
        try:
            dcp.load(state, storage_reader=FastReader(path), no_dist=True)
        except dcp.CheckpointException as failed:
            (error, _) = failed.failures[0]
            assert type(error) is kind, error
            assert re.search(match, str(error)), error
            names.add(fqn)
        else:
            assert fqn not in right or torch.equal(state[fqn], right[fqn]), fqn
    return names


@pytest.mark.thin(1)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_values_without_the_part_of_a_rank_are_refused_and_the_others_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: int, rank: int, damage: str
) -> None:
    write(tmp_path / "tag", stage)
    path = optim_file(tmp_path / "tag", rank)
    kind = NotFoundError if damage == "missing" else CorruptionError
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-100])
    name = "" if damage == "missing" else f".*{path.name}"
    found = refused(tmp_path / "tag", kind, f"of '.*the part of rank {rank} cannot be read.*{name}")
    everywhere = {"up.weight", "cube", "up.bias"} if stage == 3 else set()
    assert {f"model.{fqn}" for fqn in everywhere} <= found
    assert any(fqn.startswith("optim.state.") for fqn in found)
    assert not found & {"model.buffer", "model.frozen", "model.empty", "global_steps"}

    assert main(["verify", "--quiet", str(tmp_path / "tag")]) == 1
    printed = capsys.readouterr().out
    assert f"{len(found)} FQNs are damaged\n" in printed
    assert all(fqn in printed for fqn in found)
    assert main(["inspect", str(tmp_path / "tag")]) == 0
    assert "values that cannot be loaded" in capsys.readouterr().out


@pytest.mark.parametrize("change", [hole, overlap])
def test_a_tensor_whose_ranks_do_not_fit_is_refused_and_the_others_load(
    tmp_path: Path, change: Change
) -> None:
    write(tmp_path / "tag", 2, change)
    match = "of 'cube' .* in zero_pp_rank_1_.*not each of"
    states = {f"optim.state.cube.{name}" for name in ("exp_avg", "exp_avg_sq")}
    assert refused(tmp_path / "tag", CorruptionError, match) == {"model.cube", *states}


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_of_another_form_is_refused_and_the_others_load(tmp_path: Path, stage: int) -> None:
    def compress(_: int, optim: dict[str, Any]) -> None:
        base = optim.get("base_optimizer_state") or optim["optimizer_state_dict"]
        base["state"][1]["worker_error"] = torch.zeros(2)  # As that of 1-bit Adam.

    write(tmp_path / "tag", stage, compress)
    match = "'worker_error' of group 1 has shape"
    states = {f"optim.state.{fqn}.worker_error" for fqn in ("up.bias", "scalar")}
    assert refused(tmp_path / "tag", UnsupportedError, match) == states


def test_a_file_that_is_truncated_after_it_was_opened_is_an_error_with_a_tensor(
    tmp_path: Path,
) -> None:
    write(tmp_path / "tag", 3)
    reader = FastReader(tmp_path / "tag")
    opened = reader.read_metadata()
    path = optim_file(tmp_path / "tag", 1)
    path.write_bytes(path.read_bytes()[:100])
    reader.read_metadata = lambda *args, **kwargs: opened  # type: ignore[method-assign]
    state = {"model.up.weight": torch.empty(5, 7)}
    with pytest.raises(
        dcp.CheckpointException,
        match=rf"(?s)model\.up\.weight.*{path.name}|{path.name}.*model\.up\.weight",
    ):
        dcp.load(state, storage_reader=reader, no_dist=True)


def test_partitions_in_another_order_than_ranks_load(tmp_path: Path) -> None:
    def permute(rank: int, optim: dict[str, Any]) -> None:
        partition = (rank + 1) % RANKS
        optim.update(zero3_partition(values(), partition))
        facts = {"partition_count": RANKS, "partition_rank": partition}
        optim["ds_zero_partition_groups"] = [facts, facts]

    write(tmp_path / "tag", 3, permute)
    found = load(tmp_path / "tag")
    for fqn, tensor in values().items():
        assert torch.equal(found[fqn], tensor), fqn


def test_partitions_over_some_of_the_ranks_are_refused(tmp_path: Path) -> None:
    def halve(rank: int, optim: dict[str, Any]) -> None:
        facts = {"partition_count": 1, "partition_rank": 0}
        optim["ds_zero_partition_groups"] = [facts, facts]

    write(tmp_path / "tag", 3, halve)
    match = f"'up.weight' has 1 partitions on {RANKS} ranks, and is not of an expert"
    with pytest.raises(UnsupportedError, match=match):
        FastReader(tmp_path / "tag").read_metadata()


@pytest.mark.filterwarnings("ignore:the parameter groups")
def test_a_file_of_a_universal_folder_that_cannot_be_read_refuses_its_value_alone(
    tmp_path: Path,
) -> None:
    write(tmp_path / "tag", 2)
    folder = tmp_path / "universal"
    assert main(["convert", str(tmp_path / "tag"), str(folder), "--to", "universal"]) == 0
    damaged = folder / "zero" / "cube" / "exp_avg.pt"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    (folder / "zero" / "up.bias" / "fp32.pt").unlink()
    torch.save({"param": torch.zeros(3)}, folder / "zero" / "up.weight" / "exp_avg_sq.pt")
    for fqn, kind, match in (
        ("optim.state.cube.exp_avg", CorruptionError, "exp_avg.pt"),
        ("model.up.bias", NotFoundError, "has no up.bias/fp32.pt"),
        ("optim.state.up.weight.exp_avg_sq", CorruptionError, r"has shape \(3,\), and \(5, 7\)"),
    ):
        with pytest.raises(dcp.CheckpointException, match=rf"{kind.__name__}.*{match}"):
            dcp.load({fqn: None}, storage_reader=FastReader(folder), no_dist=True)
    names = {"optim.state.cube.exp_avg", "model.up.bias", "optim.state.up.weight.exp_avg_sq"}
    found = load(folder, without=names)
    for name, tensor in values().items():
        assert name in names or torch.equal(found[name], tensor), name


def test_elements_that_two_ranks_have_are_refused(tmp_path: Path) -> None:
    files = Files(Location(tmp_path), "DeepSpeed", verify=True, trust_pickle=False)
    files.foreign.files.append(("name", 16))
    twice = [Fragment(0, 0, 0, 2, 0), Fragment(1, 0, 0, 2, 8)]
    tensors = {"w": Partitioned(torch.float32, (4,), twice)}
    found = files.covered(tensors, {}, "the weights")["w"]
    assert isinstance(found, Unreadable)
    assert re.search(r"'w' .*\[0, 2\) of rank 0 .*\[0, 2\) of rank 1", str(found.error))


def test_files_of_another_save_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "tag", 2)
    more = tmp_path / "tag" / f"zero_pp_rank_{RANKS}_mp_rank_00_optim_states.pt"
    more.write_bytes(optim_file(tmp_path / "tag", 0).read_bytes())
    with pytest.raises(CorruptionError, match=f"3 ranks have saved it, but it has {more.name}"):
        FastReader(tmp_path / "tag").read_metadata()


def test_experts_without_zero_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "tag", 2)
    name = "expp_rank_0_mp_rank_00_optim_states.pt"
    (tmp_path / "tag" / name).write_bytes(b"")
    with pytest.raises(UnsupportedError, match=f"it has {name}, and experts can be loaded only"):
        FastReader(tmp_path / "tag").read_metadata()


def test_a_value_of_a_class_that_is_not_allowed_is_refused_if_it_is_requested(
    tmp_path: Path,
) -> None:
    def call(rank: int, optim: dict[str, Any]) -> None:
        optim["extra"] = pickle.PickleBuffer  # A class that no list allows.
        optim["optimizer_state_dict"]["param_groups"][0]["hook"] = print

    write(tmp_path / "tag", 3, call)
    names = {"extra": "pickle.PickleBuffer", "optim.param_groups.0.hook": "builtins.print"}
    for fqn, name in names.items():
        with pytest.raises(dcp.CheckpointException, match=f"{fqn.split('.')[-1]}.*GLOBAL {name}"):
            dcp.load({fqn: None}, storage_reader=FastReader(tmp_path / "tag"), no_dist=True)
    found = load(tmp_path / "tag", without=names)
    for name, tensor in values().items():
        assert torch.equal(found[name], tensor), name

    def replace(rank: int, optim: dict[str, Any]) -> None:
        optim["fp32_flat_groups"][0] = print

    write(tmp_path / "other", 3, replace)
    with pytest.raises(UnsupportedError, match=r"fp32_flat_groups\.0.*GLOBAL builtins.print"):
        FastReader(tmp_path / "other").read_metadata()


@pytest.mark.parametrize("stage", [2, 3])
def test_objects_of_a_client_do_not_keep_the_weights_from_loading(
    tmp_path: Path, stage: int
) -> None:
    """Neither as values nor as keys. Most clients store their arguments, and some their configs."""
    client = {
        "args": argparse.Namespace(lr=0.1, layers=[1], nested=argparse.Namespace()),
        "config": types.SimpleNamespace(hidden=8),
        "of_a_class": Color.RED,
        "by_a_class": {Color.RED: 1, Color.BLUE: 2, (Color.RED, 1): torch.ones(2)},
    }
    write(tmp_path / "tag", stage, change_model=lambda _, model: model.update(client))
    state = {name: torch.zeros_like(tensor) for name, tensor in values().items()}
    state |= {"args": None, "config": None}
    dcp.load(state, storage_reader=FastReader(tmp_path / "tag"), no_dist=True)
    for name, tensor in values().items():
        assert torch.equal(state[name], tensor), name
    assert state["args"] == client["args"]
    assert state["config"] == client["config"]
    with pytest.raises(dcp.CheckpointException, match="GLOBAL"):
        dcp.load({"of_a_class": None}, storage_reader=FastReader(tmp_path / "tag"), no_dist=True)


def test_a_tag_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step7")
    with pytest.raises(NotFoundError, match="latest names 'global_step7', which is missing"):
        FastReader(tmp_path).read_metadata()


def test_inspect_and_diff_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "two", 2)
    write(tmp_path / "three", 3)
    assert main(["inspect", str(tmp_path / "two")]) == 0
    printed = capsys.readouterr().out
    assert "DeepSpeed" in printed
    assert "rank 2:" in printed
    assert main(["diff", str(tmp_path / "two"), str(tmp_path / "three")]) == 0
