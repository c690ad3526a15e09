"""Writes universal folders of DeepSpeed, which its engines load with ``load_universal``.

A folder has a file for the weights and for each state of each parameter. Engines of all ZeRO stages
load it, on any number of ranks. DeepSpeed need not be installed.
"""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element

from torch_ckpt.commits.replacement import Replacement, replace_file
from torch_ckpt.commits.temporary import remove_abandoned
from torch_ckpt.conversion.pieces import Source
from torch_ckpt.conversion.torch_file import check_target, lay_out_value, write_files
from torch_ckpt.errors import SITE, AlreadyExistsError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.torch_archive import ArchiveLayout, PendingTensor

__all__ = ["RESTORE", "write_universal"]

_FOLDER = "zero"
_POINTER = "latest_universal"
_WEIGHTS = "fp32"
_COMMON = "optimizer_state.pt"
_MODEL, _STATE, _GROUPS = "model.", "optim.state.", "optim.param_groups."

_MODEL_FILE = "mp_rank_00_model_states.pt"
_ZERO3_MODEL_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""An engine of ZeRO-3 reads this file instead of the other one, and only its counters."""

_STACKED_EXPERTS = re.compile(r".*\.experts\.w[123]")
"""Names that AutoEP gives to the stacked parameters of experts."""

_MAX_SHOWN = 8  # Values of one option in a warning.

RESTORE = (
    "for group, stored in zip(engine.optimizer.param_groups, "
    'torch.load("{path}")["param_groups"]): '
    'group.update(stored | {{"params": group["params"]}})'
)
"""Restores the options of the groups of a ZeRO-3 engine."""

_MIN_VERSION = "0.3.17"  # Engines require a version, at least this one.


def write_universal(source: Source, target: Location, overwrite: bool) -> None:
    """Writes a source with the names of ``get_state_dict`` as a universal folder.

    Each parameter of ``optim.param_groups`` gets a folder with its weights, in fp32, and its
    states. Other tensors of the model are buffers or frozen parameters. DeepSpeed stores them with
    the model, and does not load them from a universal folder. The file ``latest_universal`` is
    written beside the folder. If ``target`` is a link, it remains, and its target is replaced.

    Raises AlreadyExistsError if the folder exists and ``overwrite`` is false, or if it is not a
    universal folder. Raises UnsupportedError if the source has other names, or a value that the
    format cannot store: weights of a wider dtype than fp32, or a state that is neither a number nor
    of its parameter's size.
    """
    place = target.resolved()
    remove_abandoned(place.parent, place.name)  # It may restore the name of a replaced folder.
    check_target(target, overwrite)
    _check_replaced(source, target)
    groups = _parameter_groups(source)
    _warn_of_options(groups, target)
    with Replacement(place, is_folder=True, name=target) as new:
        files = _files(source, groups, new.unpublished)
        for folder in {path.parent for path, _ in files}:
            folder.create_directories()
        write_files(source, files, target)
        for folder in {path.parent for path, _ in files} | {new.unpublished / _FOLDER}:
            folder.sync()
        new.commit()
        replace_file(target.with_name(_POINTER), target.name.encode())


def _check_replaced(source: Source, target: Location) -> None:
    """Checks that the folder to replace is a universal folder that does not contain the source.

    Otherwise raises AlreadyExistsError.
    """
    if not target.is_directory():
        if target.is_file():
            raise AlreadyExistsError(f"cannot write {target}: it is a file")
        return
    if not (target / _FOLDER / _COMMON).is_file():
        raise AlreadyExistsError(f"cannot replace {target}: it is not a universal folder")
    if target.resolved() in source.path.resolved().parents:
        raise AlreadyExistsError(f"cannot replace {target}: the source is in it")


def _parameter_groups(source: Source) -> list[dict[str, Any]]:
    state: dict[str, Any] = {}
    for name, value in {**source.objects, **source.tensors}.items():
        if name.startswith(_GROUPS):
            set_element(state, source.paths[name], value)
    groups: Any = state.get("optim", {}).get("param_groups")
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and "params" in group for group in groups
    ):
        raise _wrong_names(source, f"it has no {_GROUPS}0.params")
    seen: set[str] = set()
    for fqn in (fqn for group in groups for fqn in group["params"]):
        if not isinstance(fqn, str) or not _is_file_name(fqn) or fqn == _COMMON:
            raise _unsupported(source, f"{fqn!r} cannot be the name of a folder")
        if fqn in seen:
            raise _unsupported(source, f"{fqn!r} is in its parameter groups twice")
        seen.add(fqn)
        facts = source.tensors.get(f"{_MODEL}{fqn}")
        if facts is None:
            raise _wrong_names(source, f"it has no tensor {_MODEL}{fqn}")
        if not facts.dtype.is_floating_point or facts.dtype.itemsize > 4:
            raise _unsupported(source, f"the weights of {fqn!r} are {facts.dtype}, not fp32")
    return groups


def _is_file_name(name: str) -> bool:
    """Returns whether a name from an untrusted checkpoint can name a file in the folder."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _different(groups: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the options that differ between groups: name -> value in each group."""
    names = dict.fromkeys(name for group in groups for name in group if name != "params")
    values = {name: [group.get(name, "none") for group in groups] for name in names}
    return {name: of for name, of in values.items() if any(value != of[0] for value in of)}


def _warn_of_options(groups: Sequence[Mapping[str, Any]], target: Location) -> None:
    """Warns of options that an engine of ZeRO-3 cannot load from the folder.

    Source: ``load_hp_checkpoint_state_from_checkpoint_dir_stage3`` of DeepSpeed 0.19.8.
    """
    if not (different := _different(groups)):
        return
    named = []
    for name, values in different.items():
        shown = [f"{value} in group {number}" for number, value in enumerate(values)]
        more = [f"and {len(shown) - _MAX_SHOWN} more"] if len(shown) > _MAX_SHOWN else []
        named.append(f"{name} ({', '.join(shown[:_MAX_SHOWN] + more)})")
    warnings.warn(
        f"the parameter groups in {target} differ in {'; '.join(named)}. An engine of ZeRO-3 gives "
        "all groups the options of the first one, so it does not load these: its groups retain the "
        "options of its configuration, and begin with the first rate of a scheduler. To restore "
        f"them, run this after engine.load_checkpoint ({SITE}formats/): "
        f"{RESTORE.format(path=str(target / _FOLDER / _COMMON))}",
        stacklevel=2,
    )


def _unsupported(source: Source, why: str) -> UnsupportedError:
    return UnsupportedError(f"cannot write {source.path} as a universal folder: {why}")


def _wrong_names(source: Source, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"cannot write {source.path} as a universal folder: {what}; a universal folder needs the "
        "names of get_state_dict, such as model.layer.weight and optim.state.layer.weight.exp_avg"
    )


def _files(
    source: Source, groups: list[dict[str, Any]], folder: Location
) -> list[tuple[Location, ArchiveLayout]]:
    """Returns path and layout of each file."""
    files: list[tuple[Location, ArchiveLayout]] = []

    def add(path: Location, value: Any) -> None:
        files.append((path, lay_out_value(value, path)))

    zero = folder / _FOLDER
    steps: dict[int, dict[str, Any]] = {}
    states = _states(source, groups)
    for number, group in enumerate(groups):
        for fqn in group["params"]:
            sizes = source.tensors[f"{_MODEL}{fqn}"].sizes
            weights = PendingTensor(f"{_MODEL}{fqn}", torch.float32, sizes)
            hints = _hints(fqn, sizes)
            add(zero / fqn / f"{_WEIGHTS}.pt", {"param": weights, **hints})
            for name, value in states[fqn].items():
                is_tensor = isinstance(value, PendingTensor)
                if is_tensor and value.sizes == sizes and name != "step":
                    add(zero / fqn / f"{name}.pt", {"param": value, **hints})
                elif not is_tensor or not value.sizes:
                    steps.setdefault(number, {})[name] = value
                    if name == "step":
                        add(zero / fqn / "step.pt", value)
                else:
                    what = f"state {name!r} of {fqn!r} has sizes {list(value.sizes)}"
                    raise _unsupported(source, f"{what}, and the parameter {list(sizes)}")
    add(zero / _COMMON, _common_state(source, groups, steps))
    model = _model_state(source, groups)
    add(folder / _MODEL_FILE, model)
    add(folder / _ZERO3_MODEL_FILE, {**model, "module": {}, "buffer_names": []})
    return files


def _hints(fqn: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Returns the hints that DeepSpeed needs about a parameter, besides its elements.

    An engine with AutoEP extracts the experts of a rank from a parameter only if it is marked.
    """
    if _STACKED_EXPERTS.fullmatch(fqn) and len(sizes) == 3:
        return {"cat_dim": 0, "is_expert_param": True, "ep_num_experts": sizes[0]}
    return {}


def _states(source: Source, groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the optimizer's state: FQN -> name -> a tensor or a number.

    Raises UnsupportedError if a state belongs to no parameter, or has another form.
    """
    states: dict[str, dict[str, Any]] = {fqn: {} for group in groups for fqn in group["params"]}
    for name, value in {**source.objects, **source.tensors}.items():
        if not name.startswith(_STATE):
            continue
        fqn, _, state = name.removeprefix(_STATE).rpartition(".")
        if not _is_file_name(state):
            raise _unsupported(source, f"state {state!r} of {fqn!r} cannot be the name of a file")
        if fqn not in states or state == _WEIGHTS:
            raise _unsupported(source, f"{name!r} is not a state of a parameter in a group")
        if not isinstance(value, PendingTensor | int | float):
            raise _unsupported(source, f"{name!r} is a {type(value).__name__}")
        states[fqn][state] = value
    return states


def _common_state(
    source: Source,
    groups: list[dict[str, Any]],
    steps: Mapping[int, Mapping[str, Any]],
) -> dict[str, Any]:
    """Returns the common state of all parameters.

    An engine of ZeRO-3 assigns the options of the first group to all groups. So the options that it
    reads must be the ones common to all groups. Its groups retain the other options.
    """
    numbered = [{**group, "params": [number]} for number, group in enumerate(groups)]
    different = _different(groups)
    shared = {name: value for name, value in groups[0].items() if name not in different}
    zero3_groups = [{**shared, "params": [0]}, *numbered[1:]]
    return {
        "param_groups": numbered,
        "optimizer_state_dict": {
            "state": {number: dict(steps.get(number, {})) for number in range(len(groups))},
            "param_groups": zero3_groups,
        },
        "ds_version": str(source.objects.get("ds_version", _MIN_VERSION)),
    }


def _model_state(source: Source, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the state of the engine, and all other values except parameters and their states."""
    trained = {fqn for group in groups for fqn in group["params"]}
    rest: dict[str, Any] = {}
    module: dict[str, Any] = {}
    for name, value in {**source.objects, **source.tensors}.items():
        if name.startswith((_STATE, _GROUPS)):
            continue
        if not name.startswith(_MODEL):
            set_element(rest, source.paths[name], value)
        elif (fqn := name.removeprefix(_MODEL)) not in trained:
            module[fqn] = value
    defaults: dict[str, Any] = {
        "lr_scheduler": None,
        "global_steps": 0,
        "skipped_steps": 0,
        "global_samples": 0,
        "ds_config": {},
        "ds_version": _MIN_VERSION,
    }
    return {
        **defaults,
        **rest,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "module": module,
        "buffer_names": list(module),
        "param_shapes": [
            OrderedDict(
                (fqn, torch.Size(source.tensors[f"{_MODEL}{fqn}"].sizes)) for fqn in group["params"]
            )
            for group in groups
        ],
        "shared_params": {},
    }
