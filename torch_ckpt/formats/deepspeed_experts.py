"""Expert parallelism: which experts of DeepSpeed's ``MoE`` layers the files of a rank have.

The ranks of an expert-parallel group have as many experts each, and every rank numbers its own from
0. Here, an expert has its number in the layer, as in the same model on one rank. Its optimizer
state is partitioned over the ranks with the same experts. Each expert has a file of its weights as
well, with its number in the layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch_ckpt.errors import NotFoundError, UnsupportedError
from torch_ckpt.formats.deepspeed_files import Model, Shapes
from torch_ckpt.formats.rank_files import File, Files, Stored

__all__ = ["EXPERT_FILE", "Experts"]

EXPERT_FILE = re.compile(r"layer_\d+_expert_(\d+)_mp_rank_\d+_model_states\.pt")
"""The name of a file with the weights of one expert of one layer."""

_EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,9})(\..*)")
_DATA_FIRST = "use_data_before_expert_parallelism"


class Experts:
    """The experts of a checkpoint, and their names on each rank.

    Args:
        files: The files of the checkpoint.
        model: The model without the experts.

    Attributes:
        weights: FQN -> the weights of the experts, as the files of the experts have them.

    Raises:
        CorruptionError: A file of an expert has other values.
        NotFoundError: The file of an expert is missing.
        UnsupportedError: The checkpoint is one of AutoEP, or parameters of experts are tied.
    """

    def __init__(self, files: Files, model: Model) -> None:
        if model.file.state.get("ds_autoep_layers"):
            raise UnsupportedError(f"cannot load {files.folder}: AutoEP is not supported")
        self.weights: dict[str, Stored] = {}
        self._model = model
        self._config = model.file.state.get("ds_config")
        numbers: dict[str, set[int]] = {}  # Prefix of names -> the experts.
        for name in files.folder.names():
            if (found := EXPERT_FILE.fullmatch(name)) is None:
                continue
            file = files.read(name)
            for fqn, value in file.at(kind=dict).items():
                expert = _EXPERT.fullmatch(fqn) if isinstance(fqn, str) else None
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
        tied = [fqn for fqn in model.aliases.items() if any(map(_EXPERT.fullmatch, fqn))]
        if tied:
            raise UnsupportedError(f"cannot load {files.folder}: experts share {tied[0][1]!r}")

    def rank_count(self, partitions: Sequence[int]) -> int:
        """Returns the number of data-parallel ranks.

        Args:
            partitions: Number of partitions of each flat group. Of a group of experts, it is the
                number of ranks with the same experts.
        """
        if not self.weights:
            return max([0, *partitions])
        count: int = self._model.file.at("dp_world_size", kind=int)
        return count

    def on_all_ranks(self, shapes: Shapes, partitions: int, ranks: int, file: File) -> Shapes:
        """Returns the parameters of a flat group, those of all ranks.

        Args:
            shapes: The parameters of the first rank.
            partitions: Number of partitions of the group.
            ranks: Number of data-parallel ranks.
            file: The file with these numbers.

        Raises:
            CorruptionError: The experts cannot be on as many ranks.
            UnsupportedError: Ranks have different parameters that are not experts, or the order of
                the ranks is unknown.
        """
        degree = ranks // partitions
        if degree > 1:
            self._check(shapes, partitions, ranks, file)
        return {
            self._at(position, degree, fqn): sizes
            for position in range(degree)
            for fqn, sizes in shapes.items()
        }

    def _check(self, shapes: Shapes, partitions: int, ranks: int, file: File) -> None:
        """Checks a group whose parameters differ between ranks."""
        for fqn in shapes:
            expert = _EXPERT.fullmatch(fqn)
            if expert is None:
                raise UnsupportedError(
                    f"cannot load {file.path}: {fqn!r} has {partitions} partitions on {ranks} "
                    "ranks, and is not of an expert of deepspeed.moe"
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

    def name(self, fqn: str, rank: int, partitions: int, ranks: int) -> str:
        """Returns the FQN of what a rank calls ``fqn``.

        Args:
            fqn: The name on the rank.
            rank: The data-parallel rank.
            partitions: Number of partitions of the flat group.
            ranks: Number of data-parallel ranks.
        """
        degree = ranks // partitions
        if isinstance(self._config, dict) and self._config.get(_DATA_FIRST):
            return self._at(rank // partitions, degree, fqn)
        return self._at(rank % degree, degree, fqn)

    def _at(self, position: int, degree: int, fqn: str) -> str:
        """Returns the FQN of a parameter of a rank at this position of ``degree`` ranks."""
        expert = _EXPERT.fullmatch(fqn) if position else None
        if expert is None:
            return fqn
        first = position * (self._totals[expert[1]] // degree)
        return f"{expert[1]}{first + int(expert[2])}{expert[3]}"
