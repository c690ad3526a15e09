"""Opens checkpoints of DeepSpeed's ZeRO stages 1 to 3, and universal folders, without conversion.

The FQNs are the same as from ``torch.distributed.checkpoint.state_dict.get_state_dict``:
``model.<fqn>`` and ``optim.state.<fqn>.<name>``. The boxes of a tensor lie in the flat partitions
of all ranks, so a load reads byte ranges of DeepSpeed's own files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.errors import CheckpointError, CorruptionError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.opened import Opened
from torch_ckpt.formats.rules import Rule, Rules
from torch_ckpt.formats.torch_save import has_boxes
from torch_ckpt.frameworks.deepspeed.experts import EXPERT_FILE, Experts
from torch_ckpt.frameworks.deepspeed.files import STAND_INS, Model, Optimizer, Shapes, sizes_of
from torch_ckpt.frameworks.deepspeed.folders import MODEL_FILE, RANK_FILE, deepspeed_folder
from torch_ckpt.frameworks.deepspeed.parallel import unite
from torch_ckpt.frameworks.deepspeed.universal import FOLDER, read_universal
from torch_ckpt.frameworks.deepspeed.zero_partitions import (
    add_partition,
    partition_of,
    read_partitions,
)
from torch_ckpt.frameworks.rank_files.entries import Entries
from torch_ckpt.frameworks.rank_files.files import Computed, File, Files, Partitioned, Stored, Value
from torch_ckpt.options import Verification

__all__ = ["open_deepspeed", "open_directory"]

_EXPERT_OPTIMIZER_FILE = re.compile(r"expp_rank_.*_optim_states\.pt")
_LAYER_FILE = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")

_ADAM_OPTIONS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}

# Values of a model file that describe its tensors. They become entries of the index.
_CONSUMED = {
    *("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "optimizer"),
}


@dataclass(frozen=True)
class _Names:
    """Names of the files in a folder, by rank."""

    model: dict[int, str]
    optimizer: dict[int, str]
    zero3: bool  # Whether each rank has a model file.


def open_directory(
    path: Location,
    names: Collection[str],
    *,
    verify: Verification,
    trust_pickle: bool,
    rules: Rules | None = None,
) -> Opened | None:
    """Opens the checkpoint in a directory, or to which it points; ``None`` if it has none."""
    if (folder := deepspeed_folder(path)) is None:
        return None
    return open_deepspeed(folder, verify=verify, trust_pickle=trust_pickle, rules=rules)


def open_deepspeed(
    folder: Location, *, verify: Verification, trust_pickle: bool, rules: Rules | None = None
) -> Opened:
    """Opens the folder of a tag: the model and optimizer files of all ranks, or a universal folder.

    ``rules`` define how the shards of model-parallel ranks form parameters; by default, as the
    checkpoint describes. With ``trust_pickle``, the classes of DeepSpeed are imported. Raises
    MismatchError if the rules do not match the parameters, and UnsupportedError if the checkpoint
    has no ZeRO partitions, or tensor parallelism that it does not describe, or experts with tensor
    or pipeline parallelism or in a universal folder.
    """
    names = _file_names(folder)
    files = Files(
        folder, "DeepSpeed", verify=verify, trust_pickle=trust_pickle, stand_ins=STAND_INS
    )
    is_universal = FOLDER in folder.names()
    if is_universal and rules is not None:
        raise UnsupportedError(
            f"cannot load {folder} with rules: a universal folder has whole parameters"
        )
    applied: Mapping[str, Rule] = {}
    with gc_paused():
        if is_universal:
            model, optimizer = _whole(files, names)
        else:
            model, optimizer, applied = _united(files, names, rules)
        _complete(optimizer, model.rest.get("ds_config"))
        return dataclasses.replace(_opened(files, model, optimizer), rules=applied)


def _whole(files: Files, names: Mapping[int, _Names]) -> tuple[Model, Optimizer]:
    """Reads a universal folder."""
    models = [_read_model(files, of_rank) for _, of_rank in sorted(names.items())]
    model = models[0]
    # Pipeline stages have different parameters, tensor-parallel ranks the same ones.
    for others in zip(*(one.groups for one in models), strict=True):
        for shapes in others[1:]:
            others[0].update(shapes)
    return model, read_universal(files, model.groups, whole=len(names) == 1)


def _united(
    files: Files, names: Mapping[int, _Names], rules: Rules | None
) -> tuple[Model, Optimizer, Mapping[str, Rule]]:
    """Reads the files of all model-parallel ranks, and unites their shards."""
    ranks: list[tuple[Model, Optimizer]] = []
    expert_rules: dict[str, Rule] = {}
    for _, of_rank in sorted(names.items()):
        model = _read_model(files, of_rank)
        experts = Experts(files, model)
        if experts.rules and len(names) > 1:
            raise _refused_experts(files.folder, "ds_autoep_layers")
        optimizer = read_partitions(files, of_rank.optimizer, model.groups, experts)
        of_experts = experts.ranks(model, optimizer)
        trained = {fqn for _, one in of_experts for fqn in one.weights}
        experts.check_all(trained)
        expert_rules |= {fqn: rule for fqn, rule in experts.rules.items() if fqn in trained}
        # Other values are frozen parameters or buffers.
        model.tensors.update(
            (fqn, value) for fqn, value in experts.weights.items() if fqn not in trained
        )
        ranks += of_experts
    if len(ranks) == 1 and rules is None:
        return *ranks[0], {}
    if expert_rules:
        return unite(files, ranks, len(ranks), rules, expert_rules)
    _add_layers(files, [model for model, _ in ranks])
    return unite(files, ranks, _tensor_ranks(files, ranks), rules, {})


def _tensor_ranks(files: Files, ranks: Sequence[tuple[Model, Optimizer]]) -> int:
    """Returns the number of tensor-parallel ranks of a pipeline stage.

    Raises NotFoundError if the files of a rank are missing.
    """
    stored = ranks[0][0].rest.get("checkpoint_parallel_dimensions")
    degrees = stored.value if stored is not None and isinstance(stored.value, dict) else {}
    tensor, stages = degrees.get("tp_degree", len(ranks)), degrees.get("pp_degree", 1)
    if tensor * stages != len(ranks):
        raise NotFoundError(
            f"cannot load {files.folder}: {tensor * stages} model-parallel ranks have saved it, "
            f"and it has files of {len(ranks)}"
        )
    return int(tensor)


def _complete(optimizer: Optimizer, config: Stored | None) -> None:
    """Converts parameter groups to the form of torch's optimizers, if DeepSpeed's differ.

    DeepSpeed's own Adam counts steps by group, and lacks options that torch's Adam has.
    """
    for options in optimizer.param_groups:
        step = options.pop("step", None)
        for fqn in options["params"] if step is not None else ():
            states = optimizer.states.setdefault(fqn, {})
            states.setdefault("step", Stored(optimizer.file, step, ()))
        if options.keys() >= {"bias_correction", "betas", "eps"}:  # No Adam of torch has the first.
            for name, value in _ADAM_OPTIONS.items():
                options.setdefault(name, value)
            options.setdefault("decoupled_weight_decay", _is_adamw(config))


def _is_adamw(config: Stored | None) -> bool:
    """Returns whether DeepSpeed's Adam decouples the weight decay, as it does by default."""
    value: Any = None if config is None else config.value
    for key in ("optimizer", "params", "adam_w_mode"):
        value = value.get(key) if isinstance(value, dict) else None
    return value is not False


def _file_names(folder: Location) -> dict[int, _Names]:
    """Returns the names of the files of all ranks, by model-parallel rank.

    Raises NotFoundError if a model file or optimizer file is missing, and UnsupportedError if the
    checkpoint has experts without ZeRO, or in a universal folder, or on model-parallel ranks.
    """
    model: dict[int, str] = {}
    optimizer: dict[int, dict[int, str]] = {}
    by_rank: dict[int, dict[int, str]] = {}
    listed = folder.names()
    for name in listed:
        rank_file, model_file = RANK_FILE.fullmatch(name), MODEL_FILE.fullmatch(name)
        if rank_file:
            kind = by_rank if rank_file[3] == "model" else optimizer
            of_rank = kind.setdefault(int(rank_file[2]), {})
            rank = int(rank_file[1])
            if of_rank.setdefault(rank, name) != name:
                raise CorruptionError(
                    f"cannot load {folder}: both {of_rank[rank]} and {name} are of rank {rank}"
                )
        elif model_file:
            model[int(model_file[1])] = name
    found = model or by_rank
    for name in listed:
        if _EXPERT_OPTIMIZER_FILE.fullmatch(name) or (
            EXPERT_FILE.fullmatch(name) and (FOLDER in listed or len(found) > 1)
        ):
            raise _refused_experts(folder, name)
    if not found:
        raise NotFoundError(f"cannot load {folder}: it has no model file of DeepSpeed")
    if not optimizer and FOLDER not in listed:
        first = next(iter(model.values()), None) or next(iter(by_rank[min(by_rank)].values()))
        raise UnsupportedError(
            f"cannot load {folder}: it has no optimizer files of ZeRO; load {folder / first} by "
            "itself"
        )
    names: dict[int, _Names] = {}
    for shard in range(max({*found, *optimizer}) + 1):
        if shard not in found or (optimizer and shard not in optimizer):
            raise NotFoundError(
                f"cannot load {folder}: it has no files of model-parallel rank {shard}"
            )
        of_shard = {0: model[shard]} if model else by_rank[shard]
        names[shard] = _Names(of_shard, optimizer.get(shard, {}), not model)
    return names


def _refused_experts(folder: Location, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"cannot load {folder}: it has {what}, and experts can be loaded only with ZeRO, without "
        "tensor or pipeline parallelism, and without a file of each in a universal folder"
    )


def _read_model(files: Files, names: _Names) -> Model:
    opened: dict[int, File] = {}
    first = files.read(names.model[min(names.model)])
    opened[min(names.model)] = first
    count = first.at("dp_world_size", kind=int) if names.zero3 else 1
    absent = files.open_ranks(names.model, count, opened)
    groups = _groups(first)
    for rank, file in opened.items():
        if _groups(file) != groups:
            raise file.damage(
                f"its param_shapes, those of rank {rank}, differ from those in {first.name}"
            )
        steps, others = first.state.get("global_steps"), file.state.get("global_steps")
        if steps != others:
            raise file.damage(
                f"rank {rank} saved it after {others} steps, and {first.name} is of {steps}"
            )
    tensors: dict[str, Value] = {}
    buffers = first.at("buffer_names", kind=list)
    # A pipeline stage stores its module in files of layers.
    module = {} if first.at("module") is None else first.at("module", kind=dict)
    for fqn, value in module.items():
        # ZeRO-3 leaves an empty tensor in place of each parameter.
        is_empty = isinstance(value, torch.Tensor) and not value.numel()
        if not (names.zero3 and is_empty) or fqn in buffers:
            tensors[fqn] = Stored(first, value, ("module", fqn))
    if names.zero3:
        tensors.update(_frozen(files, opened, count, absent))
    rest = {
        str(key): Stored(first, value, (key,))
        for key, value in first.state.items()
        if key not in _CONSUMED
    }
    aliases = _aliases(first, {fqn for shapes in groups for fqn in shapes}, tensors)
    return Model(groups, tensors, aliases, rest, buffers, first)


def _aliases(file: File, trained: Collection[str], tensors: Mapping[str, Value]) -> dict[str, str]:
    """Returns alias -> name of the parameter that it shares, as the file states.

    A name with different elements is not an alias. The module of ZeRO-1 and ZeRO-2 stores elements
    for each name: those of an alias are in the same record as those of the parameter.
    """
    stated = file.state.get("shared_params") or {}
    if not isinstance(stated, dict):
        raise file.damage(f"shared_params is a {type(stated).__name__}")
    return {
        alias: fqn
        for alias, fqn in stated.items()
        if alias not in trained
        if alias not in tensors or _is_same(tensors[alias], tensors.get(fqn))
    }


def _is_same(value: Value, other: Value | None) -> bool:
    """Returns whether two tensors of a file have the same elements, as far as its records show."""
    if not isinstance(value, Stored) or not isinstance(other, Stored):
        return False
    if not has_boxes(value.value) or not has_boxes(other.value):
        return False
    return value.file.same_record(value.value, other.file, other.value) is True


def _add_layers(files: Files, models: Sequence[Model]) -> None:
    """Adds the buffers and frozen parameters that pipeline stages store in files of layers.

    The file of a layer contains names without the number of the layer. Each tensor-parallel rank of
    the first stage receives the values of all stages.
    """
    wanted = {fqn for model in models for fqn in model.buffers}
    wanted |= {fqn for model in models for fqn in model.file.state.get("frozen_param_shapes") or ()}
    for name in files.folder.names():
        if (found := _LAYER_FILE.fullmatch(name)) is None:
            continue
        file = files.read(name)
        for key, value in file.at(kind=dict).items():
            if (fqn := f"{int(found[1])}.{key}") in wanted:
                models[int(found[2] or 0)].tensors[fqn] = Stored(file, value, (key,))


def _groups(file: File) -> list[Shapes]:
    shapes = file.at("param_shapes", kind=list)
    if not all(isinstance(group, dict) for group in shapes):
        raise file.damage("its param_shapes are not dicts")
    groups = [{str(fqn): sizes_of(file, fqn, s) for fqn, s in group.items()} for group in shapes]
    if len({fqn for group in groups for fqn in group}) != sum(map(len, groups)):
        raise file.damage("its param_shapes repeat a parameter")
    return groups


def _frozen(
    files: Files, opened: dict[int, File], count: int, absent: dict[int, CheckpointError]
) -> dict[str, Value]:
    """Returns the parameters that ZeRO-3 partitions, but the optimizer does not contain."""
    tensors: dict[str, Partitioned] = {}
    for rank, file in sorted(opened.items()):
        for fqn, sizes in (file.state.get("frozen_param_shapes") or {}).items():
            flat = file.at("frozen_param_fragments", fqn, kind=torch.Tensor)
            tensor = tensors.setdefault(fqn, Partitioned(flat.dtype, sizes_of(file, fqn, sizes)))
            numel = torch.Size(tensor.sizes).numel()
            part = partition_of(fqn, numel, rank, count, 0)
            add_partition(tensors, file, rank, flat, [part])
    return files.covered(tensors, absent, "the weights")


def _opened(files: Files, model: Model, optimizer: Optimizer) -> Opened:
    """Returns the open checkpoint, with the FQNs of ``get_state_dict``."""
    entries = Entries(files)
    weights: dict[str, Value] = {**model.tensors, **optimizer.weights}
    for alias, fqn in model.aliases.items():
        if fqn in weights:  # Frozen parameters may be excluded from a save.
            weights[alias] = weights[fqn]
    for fqn, value in weights.items():
        entries.add(("model", fqn), value)
    for fqn, states in optimizer.states.items():
        for name, state in states.items():
            value = _as_tensor(state) if name == "step" else state
            entries.add(("optim", "state", fqn, name), value)
    groups = Stored(optimizer.file, optimizer.param_groups, optimizer.groups_at)
    entries.add(("optim", "param_groups"), groups)
    for key, value in optimizer.rest.items():
        entries.add((key,), value)
    for key, value in model.rest.items():
        is_taken = key in ("model", "optim") or key in optimizer.rest
        entries.add(("client", key) if is_taken else (key,), value)
    return entries.opened()


def _as_tensor(step: Value) -> Value:
    """Returns a number as a tensor, as in torch's optimizers."""
    if not isinstance(step, Stored) or not isinstance(step.value, int | float):
        return step
    tensor = torch.tensor(float(step.value), device="cpu")
    return Computed(step.file, tensor.dtype, (), lambda: tensor)
