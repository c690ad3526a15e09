"""Expert parallelism: which experts of DeepSpeed's ``MoE`` layers the files of a rank have.

The ranks of an expert-parallel group have as many experts each, and every rank numbers its own from
0. Here, an expert has its number in the layer, as in the same model on one rank. Its optimizer
state is partitioned over the ranks with the same experts.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

from torch_ckpt.errors import UnsupportedError
from torch_ckpt.formats.deepspeed_files import File, Files, Model, Shapes, Stored

__all__ = ["EXPERT_FILE", "Experts", "add_expert_files"]

_EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")
EXPERT_FILE = re.compile(r"layer_\d+_expert_\d+_mp_rank_(\d+)_model_states\.pt")
"""The name of a file with the weights of one expert. Its group is the model-parallel rank."""


class Experts:
    """The names of experts by rank.

    Args:
        groups: The parameters of each flat group of the first rank.
        file: An optimizer file.
        partitions: Number of partitions of each flat group.
    """

    def __init__(self, groups: list[Shapes], file: File, partitions: Sequence[int]) -> None:
        self._partitions = partitions
        self._ranks = max(partitions, default=0)
        config = file.state.get("ds_config")
        name = "use_data_before_expert_parallelism"
        self._data_first = isinstance(config, dict) and config.get(name) is True
        self._count: dict[str, int] = {}  # Prefix of names -> number of experts of a rank.
        for number, shapes in enumerate(groups):
            found = [_EXPERT.fullmatch(fqn) for fqn in shapes]
            if self._degree(number) > 1 and not all(found):
                raise file.damage(
                    f"group {number} has {partitions[number]} partitions on {self._ranks} ranks, "
                    "and its parameters are not all of experts"
                )
            for match in filter(None, found):
                count = self._count.get(match[1], 0)
                self._count[match[1]] = max(count, int(match[2]) + 1)

    def _degree(self, group: int) -> int:
        """Number of ranks of an expert-parallel group; 1 if all ranks have the same parameters."""
        return self._ranks // max(self._partitions[group], 1)

    def name(self, group: int, rank: int, fqn: str) -> str:
        """Returns the FQN of what a rank calls ``fqn``."""
        if self._data_first:
            return self._shifted(fqn, rank // max(self._partitions[group], 1))
        return self._shifted(fqn, rank % self._degree(group))

    def all(self, group: int, shapes: Shapes) -> Shapes:
        """Returns the parameters of a group on all ranks."""
        return {
            self._shifted(fqn, position): sizes
            for position in range(self._degree(group))
            for fqn, sizes in shapes.items()
        }

    def _shifted(self, fqn: str, position: int) -> str:
        found = _EXPERT.fullmatch(fqn) if position else None
        if found is None:
            return fqn
        return f"{found[1]}{position * self._count[found[1]] + int(found[2])}{found[3]}"


def add_expert_files(files: Files, model: Model, trained: Container[str]) -> None:
    """Adds the frozen parameters and buffers of experts, which have a file each.

    Args:
        files: The files of the checkpoint.
        model: The model, which gets them.
        trained: FQNs of the parameters that the optimizer has.

    Raises:
        UnsupportedError: The checkpoint is one of AutoEP.
    """
    names = [name for name in files.folder.names() if EXPERT_FILE.fullmatch(name)]
    if names and model.file.state.get("ds_autoep_layers"):
        raise UnsupportedError(f"cannot load {files.folder}: AutoEP is not supported")
    for name in names:
        file = files.read(name)
        for fqn, value in file.at(kind=dict).items():
            if fqn not in trained:
                model.tensors[str(fqn)] = Stored(file, value, (fqn,))
