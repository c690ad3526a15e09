"""Universal folders of DeepSpeed: ``zero/<FQN>/{fp32,exp_avg,exp_avg_sq,step}.pt``.

A conversion from ZeRO-1 or ZeRO-2 stores a dict with the whole tensor and hints for tensor
parallelism. One from ZeRO-3 stores a flat tensor without its shape, and no step.
"""

from __future__ import annotations

import math

import torch

from torch_ckpt.errors import CorruptionError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.frameworks.deepspeed.files import Optimizer, Shapes
from torch_ckpt.frameworks.deepspeed.zero_partitions import named_groups, rest_of
from torch_ckpt.frameworks.rank_files.files import File, Files, Stored, Unreadable, Value

__all__ = ["FOLDER", "read_universal"]

FOLDER = "zero"
_OPTIMIZER = "optimizer_state"
_WEIGHTS = "fp32"


def read_universal(files: Files, groups: list[Shapes], *, whole: bool) -> Optimizer:
    """Reads the files of each parameter of the flat groups.

    ``whole``: whether the groups have the sizes of whole parameters rather than of shards. A value
    is unreadable if its file is missing or damaged, or if its tensor has another shape.
    """
    folder = files.folder / FOLDER
    names = set(folder.names())
    common = files.read(f"{FOLDER}/{_OPTIMIZER}.pt")
    param_groups = named_groups(common, common.at("param_groups", kind=list), groups)
    weights: dict[str, Value] = {}
    states: dict[str, dict[str, Value]] = {}
    for number, shapes in enumerate(groups):
        scalars = _scalars(common, number)
        for fqn, sizes in shapes.items():
            stems = _stems(folder, fqn) if fqn in names else []
            values = {stem: _value(files, fqn, stem, sizes if whole else None) for stem in stems}
            missing = NotFoundError(f"cannot load {fqn!r}: {folder} has no {fqn}/{_WEIGHTS}.pt")
            weights[fqn] = values.pop(_WEIGHTS, Unreadable(missing))
            states[fqn] = {**scalars, **values}
    return Optimizer(weights, states, param_groups, rest_of(common), common, ("param_groups",))


def _scalars(common: File, group: int) -> dict[str, Value]:
    """Returns the states that parameters of a group share: ZeRO-3 has them with those of rank 0."""
    key = "optimizer_state_dict"
    if key not in common.at(kind=dict):
        return {}
    return {
        str(name): Stored(common, value, (key, "state", group, name))
        for name, value in (common.at(key, "state", kind=dict).get(group) or {}).items()
        if not isinstance(value, torch.Tensor) or not value.ndim
    }


def _stems(folder: Location, fqn: str) -> list[str]:
    return [name.removesuffix(".pt") for name in (folder / fqn).names() if name.endswith(".pt")]


def _value(files: Files, fqn: str, stem: str, sizes: tuple[int, ...] | None) -> Value:
    """Returns the weights or a state of a parameter."""
    try:
        return _stored(files.read(f"{FOLDER}/{fqn}/{stem}.pt"), fqn, sizes)
    except (CorruptionError, NotFoundError, UnsupportedError) as error:
        return Unreadable(error)


def _stored(file: File, fqn: str, sizes: tuple[int, ...] | None) -> Stored:
    """Returns the tensor or number in a file. The tensor must have the sizes, if known."""
    is_hinted = isinstance(file.state, dict)
    value = file.at("param", kind=torch.Tensor) if is_hinted else file.state
    keys = ("param",) if is_hinted else ()
    # The parameters of AutoEP are whole, but param_shapes has the shapes of a rank.
    has_own_sizes = sizes is None or (is_hinted and file.state.get("is_expert_param"))
    if not isinstance(value, torch.Tensor) or has_own_sizes:
        return Stored(file, value, keys)
    assert sizes is not None
    if file.name.endswith("/step.pt"):
        sizes = ()
    is_flat = not is_hinted and value.ndim == 1 and value.numel() == math.prod(sizes)
    if tuple(value.shape) != sizes and not is_flat:
        raise file.damage(f"{fqn!r} has shape {tuple(value.shape)}, and {sizes} in param_shapes")
    return Stored(file, value.reshape(sizes), keys)
