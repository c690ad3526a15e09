"""Expert parallelism: which experts of DeepSpeed's ``MoE`` layers the files of a rank contain.

All ranks of an expert-parallel group have the same number of experts, and each rank numbers its
experts from 0. This module uses the number within the layer instead, as in the same model on one
rank. The optimizer state of an expert is partitioned over the ranks with the same experts. With
ZeRO-1 and ZeRO-2, the weights of each expert are also in a file, named by its number in the layer.

Layers of ``deepspeed.moe`` have separate parameters for each expert. AutoEP stacks all experts of a
rank in one parameter, so each rank has a shard of it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

import torch

from torch_ckpt._core import _native
from torch_ckpt.errors import NotFoundError, UnsupportedError
from torch_ckpt.formats.rules import Rule
from torch_ckpt.formats.unions import Boxes
from torch_ckpt.frameworks.deepspeed.files import Model, Optimizer, Shapes, sizes_of
from torch_ckpt.frameworks.deepspeed.inferred_rules import boxes_of_map
from torch_ckpt.frameworks.rank_files.files import (
    INVALID,
    Boxed,
    File,
    Files,
    Stored,
    Unreadable,
    Value,
    as_boxed,
)

__all__ = ["EXPERT_FILE", "Experts"]

EXPERT_FILE = re.compile(r"layer_\d+_expert_(\d+)_mp_rank_\d+_model_states\.pt")
"""The name of a file with the weights of one expert of one layer."""

_EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,9})(\..*)")
_STACKED = re.compile(r"(.*)\.(\d{1,9})")
_DATA_FIRST = "use_data_before_expert_parallelism"


class Experts:
    """The experts of a checkpoint, and their names on each rank.

    ``weights`` contains the weights of the experts by FQN, from the files of the experts. ``rules``
    is FQN -> rule that unites the shards of AutoEP's expert-parallel ranks. Raises NotFoundError if
    the file of an expert is missing.
    """

    def __init__(self, files: Files, model: Model) -> None:
        self.rules, self._sizes = _stacked_rules(model.file)
        self.weights: dict[str, Value] = {}
        self._model = model
        self._config = model.file.state.get("ds_config")
        self._shards: dict[str, tuple[str, int]] = {}  # Name of a shard -> FQN and position.
        numbers: dict[str, set[int]] = {}  # Prefix of names -> the experts.
        stacked: dict[str, dict[int, Stored]] = {}
        for name in files.folder.names():
            if (found := EXPERT_FILE.fullmatch(name)) is None:
                continue
            file = files.read(name)
            for fqn, value in file.at(kind=dict).items():
                is_text = isinstance(fqn, str)
                part = _STACKED.fullmatch(fqn) if is_text else None
                if part is not None and part[1] in self.rules and part[2] == found[1]:
                    experts, number = stacked.setdefault(part[1], {}), int(part[2])
                    if number in experts or not isinstance(value, torch.Tensor):
                        raise file.damage(f"it has {fqn!r}, which is no tensor or in another file")
                    experts[number] = Stored(file, value, (fqn,))
                    continue
                expert = _EXPERT.fullmatch(fqn) if is_text else None
                if expert is None or expert[2] != found[1] or fqn in self.weights:
                    raise file.damage(f"it has {fqn!r}")
                self.weights[fqn] = Stored(file, value, (fqn,))
                numbers.setdefault(expert[1], set()).add(int(expert[2]))
        self._totals = {prefix: max(found) + 1 for prefix, found in numbers.items()}
        for prefix, total in self._totals.items():
            if missing := set(range(total)) - numbers[prefix]:
                raise NotFoundError(
                    f"cannot load {files.folder}: it has no file of expert {min(missing)} of "
                    f"{prefix[:-1]!r}"
                )
        for fqn, parts in stacked.items():
            self.weights[fqn] = self._stack(fqn, parts)
        for alias, fqn in [*model.aliases.items()]:
            if any(map(_EXPERT.fullmatch, (alias, fqn))):  # Each rank has a different expert.
                why = f"cannot load {alias!r} of {files.folder}: experts share {fqn!r}"
                del model.aliases[alias]
                model.tensors[alias] = Unreadable(UnsupportedError(why))

    def rank_count(self, partitions: Sequence[int]) -> int:
        """Returns the number of data-parallel ranks, from the partitions of each flat group.

        A group of experts has one partition for each rank with the same experts.
        """
        if not self.weights and not self.rules:
            return max([0, *partitions])
        count: int = self._model.file.at("dp_world_size", kind=int)
        return count

    def on_all_ranks(self, shapes: Shapes, partitions: int, ranks: int, file: File) -> Shapes:
        """Returns the parameters of a flat group on all ranks, given those of the first rank.

        ``partitions`` is the number of partitions of the group, ``ranks`` that of data-parallel
        ranks. Raises UnsupportedError if ranks have different parameters that are not experts, or
        if the order of the ranks is unknown.
        """
        degree = ranks // partitions
        if degree > 1:
            self._check(shapes, partitions, ranks, file)
        return {
            self._at(position, degree, fqn): sizes
            for position in range(degree)
            for fqn, sizes in shapes.items()
        }

    def ranks(self, model: Model, optimizer: Optimizer) -> list[tuple[Model, Optimizer]]:
        """Returns the model and the optimizer of each expert-parallel rank of AutoEP.

        The first one also has all other parameters. Without AutoEP, it is the only one.
        """
        if not self.rules:
            return [(model, optimizer)]
        count = 1 + max((position for _, position in self._shards.values()), default=0)
        ranks: list[tuple[Model, Optimizer]] = []
        for position in range(count):
            # Name in the optimizer -> FQN, of the parameters of this rank.
            names: dict[str, str] = {}
            for name in optimizer.weights:
                fqn, shard = self._shards.get(name, (name, 0))
                if shard == position:
                    names[name] = fqn
            own_fqns = set(names.values())
            groups = [
                {fqn: sizes for fqn, sizes in shapes.items() if fqn in own_fqns}
                for shapes in model.groups
            ]
            param_groups = [
                {**group, "params": [names[name] for name in group["params"] if name in names]}
                for group in optimizer.param_groups
            ]
            weights = {fqn: optimizer.weights[name] for name, fqn in names.items()}
            states = {fqn: optimizer.states.get(name, {}) for name, fqn in names.items()}
            own = dataclasses.replace(
                optimizer, weights=weights, states=states, param_groups=param_groups
            )
            tensors = {} if position else model.tensors
            rank = Model(groups, tensors, model.aliases, model.rest, model.buffers, model.file)
            ranks.append((rank, own))
        return ranks

    def _stack(self, fqn: str, parts: Mapping[int, Stored]) -> Boxed:
        """Returns a parameter of AutoEP from the files of its experts.

        Raises CorruptionError if an expert has another shape or dtype, and NotFoundError if its
        file is missing.
        """
        boxes = {number: as_boxed(fqn, part) for number, part in parts.items()}
        first = next(iter(boxes.values()))
        count, *sizes = self._sizes[fqn]
        for number, box in boxes.items():
            if number >= count or box.dtype != first.dtype or box.sizes != tuple(sizes):
                raise parts[number].file.damage(
                    f"expert {number} of {fqn!r} is {box.dtype} of {box.sizes}, and the parameter "
                    f"{first.dtype} of {self._sizes[fqn]}"
                )
        for number in range(count):
            if number not in parts:
                raise self._missing(fqn, number)
        placed: list[_native.IndexBox] = [
            ([number, *offsets], [1, *sizes], file, begin, nbytes, plain, ())
            for number, one in sorted(boxes.items())
            for offsets, sizes, file, begin, nbytes, plain, _ in one.boxes
        ]
        return Boxed(first.dtype, (len(parts), *first.sizes), placed)

    def _check(self, shapes: Shapes, partitions: int, ranks: int, file: File) -> None:
        """Checks a group whose parameters differ between ranks."""
        for fqn in shapes:
            if fqn in self.rules:
                self._check_stacked(fqn, ranks // partitions, file)
                continue
            expert = _EXPERT.fullmatch(fqn)
            if expert is None:
                raise UnsupportedError(
                    f"cannot load {file.path}: {fqn!r} has {partitions} partitions on {ranks} "
                    "ranks, and is not of an expert"
                )
            total = self._totals.get(expert[1], 0)
            if ranks % partitions or total % (ranks // partitions):
                raise file.damage(
                    f"{fqn!r} has {partitions} partitions on {ranks} ranks, and the layer has "
                    f"{total} experts"
                )
        if partitions > 1 and not isinstance(self._config, dict):
            raise UnsupportedError(
                f"cannot load {self._model.file.path}: without the configuration of DeepSpeed, it "
                "is unknown which ranks have which experts"
            )

    def check_all(self, trained: Collection[str]) -> None:
        """Checks that each parameter of AutoEP is trained, or stored in the files of experts.

        Raises NotFoundError if these files are missing.
        """
        for fqn in self.rules:
            if fqn not in trained and fqn not in self.weights:
                raise self._missing(fqn, 0)

    def _missing(self, fqn: str, expert: int) -> NotFoundError:
        folder = self._model.file.path.parent
        return NotFoundError(f"cannot load {folder}: it has no file of expert {expert} of {fqn!r}")

    def _check_stacked(self, fqn: str, degree: int, file: File) -> None:
        """Checks that the number of ranks that share a parameter of AutoEP matches its rule."""
        union = self.rules[fqn].union
        ranks = [box[0] for box in union.boxes] if isinstance(union, Boxes) else []
        count = 1 + max(ranks, default=0)
        if count != degree:
            raise file.damage(f"{degree} ranks share {fqn!r}, and its affine_map has {count}")

    def name(self, fqn: str, rank: int, partitions: int, ranks: int) -> str:
        """Returns the FQN of the parameter that a data-parallel rank names ``fqn``.

        ``partitions`` is the number of partitions of the flat group, ``ranks`` that of
        data-parallel ranks.
        """
        degree = ranks // partitions
        if isinstance(self._config, dict) and self._config.get(_DATA_FIRST):
            return self._at(rank // partitions, degree, fqn)
        return self._at(rank % degree, degree, fqn)

    def _at(self, position: int, degree: int, fqn: str) -> str:
        """Returns the name of a parameter of a rank at this position of ``degree`` ranks."""
        if fqn in self.rules:
            name = f"{fqn} of expert-parallel rank {position}"
            self._shards[name] = fqn, position
            return name
        expert = _EXPERT.fullmatch(fqn) if position else None
        if expert is None:
            return fqn
        first = position * (self._totals[expert[1]] // degree)
        return f"{expert[1]}{first + int(expert[2])}{expert[3]}"


def _stacked_rules(file: File) -> tuple[dict[str, Rule], Shapes]:
    """Returns the rules of AutoEP's parameters, whose experts ranks share, and their sizes.

    Raises UnsupportedError if the experts of a rank are not boxes.
    """
    rules: dict[str, Rule] = {}
    sizes: Shapes = {}
    try:
        for layer in file.state.get("ds_autoep_layers") or ():
            for fqn, one in layer["affine_maps"]["params"].items():
                rules[fqn] = Rule(re.escape(fqn), boxes_of_map(fqn, one))
                sizes[fqn] = sizes_of(file, fqn, one["logical_shape"])
    except INVALID as error:
        raise file.damage(
            f"its ds_autoep_layers are invalid: {type(error).__name__}: {error}"
        ) from None
    return rules, sizes
