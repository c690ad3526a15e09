"""ZeRO partitions: the elements of parameters in the optimizer file of each rank.

ZeRO-1 and ZeRO-2 flatten all parameters of a group into one tensor and cut it by rank, so a
parameter may span ranks. Each file has the slices of its rank: FQN, start and length. ZeRO-3 cuts
each parameter into one partition per rank, of equal length, and pads the last ones. It stores no
slices: they follow from the shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_ckpt.errors import CheckpointError, UnsupportedError
from torch_ckpt.frameworks.deepspeed.experts import Experts
from torch_ckpt.frameworks.deepspeed.files import Optimizer, Shapes
from torch_ckpt.frameworks.rank_files.files import (
    File,
    Files,
    Fragment,
    Partitioned,
    Stored,
    Unreadable,
    Value,
)

__all__ = ["Slice", "add_partition", "named_groups", "partition_of", "read_partitions", "rest_of"]

_TOP = "optimizer_state_dict"
_ZERO3_WEIGHTS = "fp32_flat_groups"
_ZERO12_WEIGHTS = "single_partition_of_fp32_groups"
_ZERO3_GROUPS = "ds_zero_partition_groups"
_GEOMETRY = {
    *("base_optimizer_state", "group_paddings", "param_alignment_paddings", "partition_count"),
    *("param_slice_mappings", "zero_stage", _ZERO3_GROUPS, "ds_version"),
    *("param_groups", "universal_checkpoint_info", _TOP, _ZERO3_WEIGHTS, _ZERO12_WEIGHTS),
}


class Slice(NamedTuple):
    """Elements ``[begin, begin + numel)`` of a parameter at ``start`` of a flat tensor."""

    fqn: str
    begin: int
    start: int
    numel: int


def read_partitions(
    files: Files, names: dict[int, str], groups: list[Shapes], experts: Experts
) -> Optimizer:
    """Reads the optimizer files of all ranks, by the flat groups of the first rank.

    Raises NotFoundError if the file of a rank is missing, CorruptionError if the files disagree,
    and UnsupportedError if this package does not read partitions of this kind.
    """
    ranks: dict[int, File] = {}
    first = min(names)
    try:
        ranks[first] = files.read(names[first])
    except Exception:  # Another file may state the number of ranks, and so the damaged tensors.
        first = max(names)
        ranks[first] = files.read(names[first])
    count = ranks[first].at(_TOP, "partition_count", kind=(int, list))
    stated = count if isinstance(count, list) else [count] * len(groups)
    partitions = stated
    if ranks[first].at(_TOP, kind=dict).get(_ZERO3_GROUPS):
        # With ZeRO-3, groups of experts have fewer partitions than the others.
        facts = ranks[first].at(_TOP, _ZERO3_GROUPS, kind=list)
        at = (_TOP, _ZERO3_GROUPS)
        partitions = [ranks[first].at(*at, n, "partition_count") for n in range(len(facts))]
    if len(partitions) != len(groups) or not all(
        type(number) is int and number > 0 for number in (*partitions, *stated)
    ):
        raise ranks[first].damage(f"its partition_count is {str(count)[:200]}")
    count = experts.rank_count([*partitions, *stated])
    absent = files.open_ranks(names, count, ranks)
    merged = _Merged(groups, partitions, experts, count, ranks[first])
    for rank, file in sorted(ranks.items()):
        merged.add(rank, file)
    return merged.optimizer(files, absent)


class _Merged:
    """The partitions of all ranks, collected by parameter."""

    def __init__(
        self,
        local_groups: list[Shapes],
        partitions: Sequence[int],
        experts: Experts,
        ranks: int,
        file: File,
    ) -> None:
        self.local_groups = local_groups
        self.partitions = partitions
        self.experts = experts
        self.ranks = ranks
        self.groups = [
            experts.on_all_ranks(shapes, count, ranks, file)
            for shapes, count in zip(local_groups, partitions, strict=True)
        ]
        groups = self.groups
        self.sizes = {fqn: sizes for shapes in groups for fqn, sizes in shapes.items()}
        self.weights = {fqn: Partitioned(torch.float32, s) for fqn, s in self.sizes.items()}
        self.flat_states: dict[str, dict[str, Partitioned]] = {}
        self.scalars: dict[tuple[int, str], tuple[int, Stored]] = {}
        self.unreadable: dict[tuple[int, str], Unreadable] = {}
        self.first: tuple[int, File] | None = None
        self._read: dict[str, int] = {}  # FQN -> number of elements on earlier ranks.

    def add(self, rank: int, file: File) -> None:
        """Adds the file of a rank. Requires: the ranks are added in order."""
        is_zero3 = _ZERO3_WEIGHTS in file.at(_TOP, kind=dict)
        weights = _ZERO3_WEIGHTS if is_zero3 else _ZERO12_WEIGHTS
        base = (_TOP, _TOP if is_zero3 else "base_optimizer_state")
        if isinstance(file.at(*base), list):
            raise UnsupportedError(
                f"cannot load {file.path}: it is an elastic checkpoint, which DeepSpeed has "
                "deprecated"
            )
        self._check_agreement(rank, file, (*base, "param_groups"))
        if len(file.at(_TOP, weights, kind=list)) != len(self.groups):
            raise file.damage(
                f"it has {len(file.at(_TOP, weights))} flat groups, and param_shapes has "
                f"{len(self.groups)}"
            )
        for number in range(len(self.groups)):
            flat = file.at(_TOP, weights, number, kind=torch.Tensor)
            if is_zero3:
                slices = list(self._zero3_slices(file, number, rank, flat.numel()))
            else:
                slices = list(self._mapped_slices(file, number, rank))
            add_partition(self.weights, file, rank, flat, slices)
            states = file.at(*base, "state", kind=dict).get(number) or {}
            if not isinstance(states, dict):
                raise file.damage(f"the state of group {number} is a {type(states).__name__}")
            for name, value in states.items():
                stored = Stored(file, value, (*base, "state", number, name))
                # A state may be longer than the weights, which are stored without their padding.
                is_flat = isinstance(value, torch.Tensor) and value.ndim == 1
                if is_flat and value.numel() >= flat.numel():
                    self._add_flat_state(rank, stored, number, slices)
                else:
                    self._add_scalar(rank, stored, number)

    def _add_flat_state(self, rank: int, stored: Stored, group: int, slices: list[Slice]) -> None:
        tensors = self.flat_states.setdefault(str(stored.keys[-1]), {})
        for fqn in self.groups[group]:
            tensors.setdefault(fqn, Partitioned(stored.dtype, self.sizes[fqn]))
        add_partition(tensors, stored.file, rank, stored.value, slices)

    def _add_scalar(self, rank: int, stored: Stored, group: int) -> None:
        """Adds a state that all parameters of a group share, such as the step."""
        file, value, name = stored.file, stored.value, str(stored.keys[-1])
        if isinstance(value, torch.Tensor) and value.ndim:
            error = UnsupportedError(
                f"cannot load {file.path}: state {name!r} of group {group} has shape "
                f"{tuple(value.shape)}, which is not an element for each element of the weights"
            )
            self.unreadable.setdefault((group, name), Unreadable(error))
            return
        first_rank, first = self.scalars.setdefault((group, name), (rank, stored))
        if not first.file.same_value(first.value, file, value):
            fqn = next(iter(self.groups[group]), "")
            raise file.damage(
                f"{name!r} of {fqn!r} on rank {rank} differs from that of rank {first_rank} in "
                f"{first.file.name}; are the files of different saves?"
            )

    def _zero3_slices(self, file: File, group: int, rank: int, flat_numel: int) -> Iterator[Slice]:
        """Yields the slices of a rank of ZeRO-3, which follow from the shapes."""
        count, shapes = self.partitions[group], self.local_groups[group]
        partition = self._zero3_partition(file, group, rank)
        start = 0
        for name, sizes in shapes.items():
            fqn = self.experts.name(name, rank, count, self.ranks)
            numel = math.prod(sizes)
            yield partition_of(fqn, numel, partition, count, start)
            start += -(-numel // count)
        if start != flat_numel:
            raise file.damage(
                f"a flat group of {', '.join(map(repr, itertools.islice(shapes, 3)))} and so on "
                f"has {flat_numel} elements, and their shapes require {start} for each of {count} "
                "ranks"
            )

    def _zero3_partition(self, file: File, group: int, rank: int) -> int:
        """Returns the number of a rank's partition of a group."""
        count = self.partitions[group]
        if not file.at(_TOP, kind=dict).get(_ZERO3_GROUPS):
            return rank
        at = (_TOP, _ZERO3_GROUPS, group)
        facts = file.at(*at, kind=dict)
        partition, ranks = facts.get("partition_rank"), facts.get("partition_ranks")
        if (
            facts.get("partition_count") != count
            or type(partition) is not int
            or not 0 <= partition < count
            # Older versions do not store the ranks.
            or (ranks is not None and file.at(*at, "partition_ranks", partition) != rank)
        ):
            raise file.damage(f"the partition of group {group} is {str(facts)[:200]}")
        return partition

    def _mapped_slices(self, file: File, group: int, rank: int) -> Iterator[Slice]:
        """Yields the slices that a file of ZeRO-1 or ZeRO-2 lists for its rank."""
        mapping = file.at(_TOP, "param_slice_mappings", group, kind=dict)
        for name, address in mapping.items():
            fqn = name
            if isinstance(name, str):
                fqn = self.experts.name(name, rank, self.partitions[group], self.ranks)
            fields = address if isinstance(address, dict) else vars(address)
            start, numel = fields.get("start"), fields.get("numel")
            if fqn not in self.groups[group] or type(start) is not int or type(numel) is not int:
                raise file.damage(f"its slice of {fqn!r} in group {group} is invalid")
            begin = self._read.get(fqn, 0)
            self._read[fqn] = begin + numel
            yield Slice(fqn, begin, start, numel)

    def _check_agreement(self, rank: int, file: File, groups: tuple[str, ...]) -> None:
        """Checks that the parameter groups of a rank are equal to the first rank's."""
        found = file.at(*groups, kind=list)
        if self.first is None:
            self.first, self._groups_at = (rank, file), groups
            return
        first_rank, first = self.first
        theirs = first.at(*self._groups_at, kind=list)
        options = list(_options(found)), list(_options(theirs))
        same = len(options[0]) == len(options[1]) and all(
            mine[0] == yours[0] and file.same_value(mine[1], first, yours[1])
            for mine, yours in zip(*options, strict=True)
        )
        if not same:
            raise file.damage(
                f"its parameter groups, those of rank {rank}, differ from those of rank "
                f"{first_rank} in {first.name}; are the files of different saves?"
            )

    def optimizer(self, files: Files, absent: Mapping[int, CheckpointError]) -> Optimizer:
        """Returns the merged state. ``absent`` is rank -> why its file cannot be read."""
        assert self.first is not None
        _, file = self.first
        weights = files.covered(self.weights, absent, "the weights")
        states: dict[str, dict[str, Value]] = {}
        for name, tensors in self.flat_states.items():
            for fqn, tensor in files.covered(tensors, absent, repr(name)).items():
                states.setdefault(fqn, {})[name] = tensor
        shared: dict[tuple[int, str], Value] = {
            at: stored for at, (_, stored) in self.scalars.items()
        }
        for (group, name), value in (shared | self.unreadable).items():
            for fqn in self.groups[group]:
                states.setdefault(fqn, {})[name] = value
        param_groups = named_groups(file, file.at(*self._groups_at), self.groups)
        rest = rest_of(file, _TOP)
        return Optimizer(weights, states, param_groups, rest, file, self._groups_at)


def add_partition(
    tensors: dict[str, Partitioned], file: File, rank: int, flat: torch.Tensor, slices: list[Slice]
) -> None:
    """Adds the slices of one flat tensor of a rank to the tensors of their FQNs.

    Raises CorruptionError if a slice exceeds the tensor, or the dtypes of the ranks differ.
    """
    offset = file.flat(slices[0].fqn, flat) if slices else 0
    for fqn, begin, start, numel in slices:
        if not numel:
            continue
        if start < 0 or numel < 0 or start + numel > flat.numel():
            raise file.damage(
                f"elements [{start}, {start + numel}) of {fqn!r} exceed the {flat.numel()} of its "
                "partition"
            )
        tensor = tensors[fqn]
        if not tensor.fragments:
            tensor.dtype = flat.dtype
        if tensor.dtype != flat.dtype:
            raise file.damage(
                f"{fqn!r} of rank {rank} is {flat.dtype}, and {tensor.dtype} in another file"
            )
        at = offset + start * flat.dtype.itemsize
        tensor.fragments.append(Fragment(rank, file.archive.number, begin, numel, at))


def partition_of(fqn: str, numel: int, partition: int, count: int, start: int) -> Slice:
    """Returns the slice of a parameter on a rank of ZeRO-3, without padding."""
    length = -(-numel // count)
    begin = min(partition * length, numel)
    return Slice(fqn, begin, start, min(length, numel - begin))


def named_groups(file: File, param_groups: list[Any], groups: list[Shapes]) -> list[dict[str, Any]]:
    """Returns parameter groups with FQNs instead of the numbers of flat groups.

    Raises CorruptionError unless they name each flat group exactly once.
    """
    named: list[dict[str, Any]] = []
    used: list[Any] = []
    for options in param_groups:
        numbers = options.get("params") if isinstance(options, dict) else None
        if not isinstance(numbers, list) or not set(numbers) <= set(range(len(groups))):
            raise file.damage(f"a parameter group has params {str(numbers)[:200]}")
        used += numbers
        named.append({**options, "params": [fqn for number in numbers for fqn in groups[number]]})
    if sorted(used) != list(range(len(groups))):
        raise file.damage(f"its parameter groups name flat groups {used} of {len(groups)}")
    return named


def rest_of(file: File, *keys: str) -> dict[str, Stored]:
    """Returns the values of an optimizer's state that do not describe partitions."""
    return {
        str(key): Stored(file, value, (*keys, key))
        for key, value in file.at(*keys, kind=dict).items()
        if key not in _GEOMETRY
    }


def _options(param_groups: list[Any]) -> Iterator[tuple[str, Any]]:
    for number, options in enumerate(param_groups):
        for name, value in options.items() if isinstance(options, dict) else ():
            yield f"{number}.{name}", value
