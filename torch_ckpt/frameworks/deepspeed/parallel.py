"""Unites the model-parallel ranks of a DeepSpeed checkpoint into whole parameters.

The files of each tensor- or pipeline-parallel rank have shards with the same FQNs. A rule for each
FQN defines how its shards form the parameter: a rule of the caller, or one inferred from the
``universal_checkpoint_info`` of the checkpoint. Shards become boxes of the whole parameter, which
remain in DeepSpeed's files. Only parameters that a rule computes are read as a whole, when they are
loaded.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_ckpt.errors import CorruptionError, MismatchError, UnsupportedError
from torch_ckpt.formats.rules import Rule, Rules
from torch_ckpt.formats.unions import (
    Average,
    Boxes,
    Replicated,
    Shards,
    Sizes,
    Unique,
    listed,
)
from torch_ckpt.frameworks.deepspeed.files import Model, Optimizer
from torch_ckpt.frameworks.deepspeed.inferred_rules import rules_from_info
from torch_ckpt.frameworks.rank_files.files import (
    INVALID,
    Computed,
    Files,
    Stored,
    Unreadable,
    Value,
    as_boxed,
    united,
)

__all__ = ["unite"]

_WEIGHTS = "fp32"
_CHECKED_NBYTES = 1 << 20
"""Replicas of at most this size are compared when they are loaded."""

_MAX_NAMED = 50

Ranks = Sequence[tuple[Model, Optimizer]]


def unite(
    files: Files,
    ranks: Ranks,
    tensor_ranks: int,
    rules: Rules | None,
    expert_rules: Mapping[str, Rule],
) -> tuple[Model, Optimizer, Mapping[str, Rule]]:
    """Unites the states of model-parallel ranks, and returns the rule of each parameter as well.

    The ranks of a pipeline stage are consecutive; each stage has ``tensor_ranks``. The rules of the
    caller must match each parameter; without them, rules are inferred from the checkpoint.
    ``expert_rules`` are for parameters that expert-parallel ranks share. All other parameters of
    such ranks are taken from the first one.

    If the shards of a parameter overlap or do not cover it, raises MismatchError for a rule of the
    caller; for other rules, the parameter is unreadable. Raises UnsupportedError if the checkpoint
    does not describe its sharding.
    """
    united = _United(files, ranks, tensor_ranks, rules, expert_rules)
    return *united.result(), united.rules


class _United:
    def __init__(
        self,
        files: Files,
        ranks: Ranks,
        tensor_ranks: int,
        rules: Rules | None,
        expert_rules: Mapping[str, Rule],
    ) -> None:
        self.files, self.ranks, self.tensor_ranks = files, ranks, tensor_ranks
        self.sizes = [model.sizes() for model, _ in ranks]
        self.trained = {fqn: None for sizes in self.sizes for fqn in sizes}
        others = {fqn: value for model, _ in ranks for fqn, value in model.tensors.items()}
        self.others = [fqn for fqn in others if fqn not in self.trained]
        buffers = {fqn for model, _ in ranks for fqn in model.buffers}
        frozen = [fqn for fqn in self.others if fqn not in buffers and _is_tensor(others[fqn])]
        shards = {fqn: self._shards(fqn) for fqn in (*self.trained, *frozen)}
        self.is_own = rules is None
        self.refused: dict[str, Unreadable] = {}  # FQN -> why it has no rule.
        if rules is not None:
            self.rules = rules.matches(shards)
        elif tensor_ranks == 1 or expert_rules:
            unique = {fqn: Rule(re.escape(fqn), Unique()) for fqn in shards}
            self.rules = {**unique, **expert_rules}
        else:
            self.rules = self._own_rules(shards)

    def _shards(self, fqn: str) -> dict[int, Sizes]:
        """Returns the shards of a parameter from the first pipeline stage that has it."""
        found: dict[int, Sizes] = {}
        for rank, (model, _) in enumerate(self.ranks):
            if found and next(iter(found)) // self.tensor_ranks != rank // self.tensor_ranks:
                break
            if fqn in self.trained:
                if (sizes := self.sizes[rank].get(fqn)) is not None:  # A rank may have no elements.
                    found[rank] = sizes
            elif fqn in model.tensors:
                found[rank] = model.tensors[fqn].sizes
        return found

    def _own_rules(self, shards: Mapping[str, Shards]) -> dict[str, Rule]:
        by_rank: dict[int, dict[str, Shards]] = {}
        for fqn, of_ranks in shards.items():
            by_rank.setdefault(next(iter(of_ranks)), {})[fqn] = of_ranks
        rules: dict[str, Rule] = {}
        for rank, of_rank in by_rank.items():
            stored = self.ranks[rank][0].rest.get("universal_checkpoint_info")
            if stored is None or not isinstance(stored.value, dict):
                found = [f"{fqn} of {[*of_ranks.values()]}" for fqn, of_ranks in of_rank.items()]
                raise UnsupportedError(
                    f"cannot load {self.files.folder}: {self.tensor_ranks} tensor-parallel ranks "
                    "have saved it, and it has no universal_checkpoint_info, which says how its "
                    "parameters are sharded; pass FastReader(rules=...), or --rules. Its "
                    f"parameters and their sizes on each rank: {'; '.join(found[:_MAX_NAMED])}"
                    + (f"; and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else "")
                )
            for fqn, shards_of in of_rank.items():
                try:
                    rules |= rules_from_info(stored.value, {fqn: shards_of})
                except UnsupportedError as error:
                    self.refused[fqn] = Unreadable(error)
                except (*INVALID, re.error) as error:
                    raise stored.file.damage(
                        f"its universal_checkpoint_info is invalid: {type(error).__name__}: {error}"
                    ) from error
        return rules

    def result(self) -> tuple[Model, Optimizer]:
        model, optimizer = self.ranks[0]
        weights: dict[str, Value] = {}
        states: dict[str, dict[str, Value]] = {}
        for fqn in self.trained:
            shards = self._shards(fqn)
            if (error := self.refused.get(fqn)) is not None:
                names = self.ranks[next(iter(shards))][1].states.get(fqn, {})
                weights[fqn], states[fqn] = error, dict.fromkeys(names, error)
                continue
            rule = self.rules[fqn]
            new = rule.renamed(fqn)
            if new in weights:
                raise MismatchError(f"the rules give two parameters the name {new!r}: {fqn!r} too")
            parts = {rank: self.ranks[rank][1].weights[fqn] for rank in shards}
            weights[new] = self._united(fqn, _WEIGHTS, rule, shards, parts)
            named = {rank: self.ranks[rank][1].states.get(fqn, {}) for rank in shards}
            if len({tuple(sorted(values)) for values in named.values()}) > 1:
                raise CorruptionError(
                    f"cannot load the state of {fqn!r} from {self.files.folder}: its "
                    f"model-parallel ranks {listed(shards)} have different states"
                )
            states[new] = {
                name: self._united(
                    fqn, name, rule, shards, {rank: values[name] for rank, values in named.items()}
                )
                for name in next(iter(named.values()))
            }
        tensors = {self._renamed(fqn): self._other(fqn) for fqn in self.others}
        aliases = {
            self._renamed(alias): self._renamed(fqn)
            for one, _ in self.ranks
            for alias, fqn in one.aliases.items()
            if alias not in self.trained and not self._has_own(alias)
        }
        united = Model([], tensors, aliases, model.rest, model.buffers, model.file)
        groups = self._parameter_groups()
        return united, dataclasses.replace(
            optimizer, weights=weights, states=states, param_groups=groups
        )

    def _has_own(self, alias: str) -> bool:
        """Returns whether a rank has elements under this name, rather than as an alias."""
        return any(alias in model.tensors and alias not in model.aliases for model, _ in self.ranks)

    def _renamed(self, fqn: str) -> str:
        rule = self.rules.get(fqn)
        return fqn if rule is None else rule.renamed(fqn)

    def _other(self, fqn: str) -> Value:
        """Returns a buffer or object, which all ranks have, or a frozen parameter."""
        if (error := self.refused.get(fqn)) is not None:
            return error
        rule = self.rules.get(fqn)
        if rule is None:
            return next(model.tensors[fqn] for model, _ in self.ranks if fqn in model.tensors)
        shards = self._shards(fqn)
        values = {rank: self.ranks[rank][0].tensors[fqn] for rank in shards}
        return self._united(fqn, _WEIGHTS, rule, shards, values)

    def _united(
        self,
        fqn: str,
        name: str,
        rule: Rule,
        shards: dict[int, Sizes],
        values: dict[int, Value],
    ) -> Value:
        """Unites the weights, or one state, of a parameter."""
        first = next(iter(values.values()))
        for value in values.values():
            if isinstance(value, Unreadable):
                return value
        if not _is_tensor(first) or (
            name != _WEIGHTS and first.sizes != next(iter(shards.values()))
        ):
            assert isinstance(first, Stored)
            for rank, value in values.items():
                assert isinstance(value, Stored)
                if not first.file.same_value(first.value, value.file, value.value):
                    raise value.file.damage(
                        f"{name!r} of {fqn!r} on model-parallel rank {rank} differs from that of "
                        "another rank; are the files of different saves?"
                    )
            return first
        try:
            return self._of_shards(fqn, name, rule, shards, values)
        except (CorruptionError, MismatchError, UnsupportedError) as error:
            if not self.is_own:
                raise  # The caller's rules are wrong.
            return Unreadable(error, next(iter(shards.values())))

    def _of_shards(
        self,
        fqn: str,
        name: str,
        rule: Rule,
        shards: dict[int, Sizes],
        values: dict[int, Value],
    ) -> Value:
        """Unites the shards of a tensor.

        Raises CorruptionError if they have different dtypes, MismatchError if the rule cannot unite
        them, and UnsupportedError if it is unknown how the rule applies to the state.
        """
        if len(shards) < self.tensor_ranks and not isinstance(rule.union, Unique | Boxes):
            raise MismatchError(
                f"{fqn!r} is {rule.union}, but only rank {listed(shards)} of {self.tensor_ranks} "
                "tensor-parallel ranks has it"
            )
        state = None if name == _WEIGHTS else name
        sizes, placed = rule.place(fqn, shards, state)
        sources = {rank: as_boxed(fqn, value) for rank, value in values.items()}
        dtype = next(iter(sources.values())).dtype
        if other := [rank for rank, source in sources.items() if source.dtype != dtype]:
            raise CorruptionError(
                f"cannot load {name!r} of {fqn!r}: it is {dtype}, and {sources[other[0]].dtype} on "
                f"model-parallel rank {other[0]}"
            )
        whole = united(dtype, sizes, placed, sources)
        is_computed = rule.changes(state) or any(one.scale != 1 for one in placed)
        if len(sources) > 1 and not is_computed:
            is_compared = isinstance(rule.union, Replicated) and whole.nbytes <= _CHECKED_NBYTES
            is_computed = is_compared or isinstance(rule.union, Average)
        if not is_computed:
            return whole
        result = rule.changed(fqn, torch.empty(sizes, dtype=dtype, device="meta"), state)

        def compute() -> torch.Tensor:
            return rule.unite(fqn, shards, lambda rank: self.files.read_boxes(sources[rank]), state)

        file = self.ranks[next(iter(values))][0].file
        return Computed(file, result.dtype, tuple(result.shape), compute)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Returns the parameter groups of all ranks: the same options, and other parameters."""
        first = self.ranks[0][1]
        for rank, (_, optimizer) in enumerate(self.ranks):
            if [_options(g) for g in optimizer.param_groups] != [
                _options(g) for g in first.param_groups
            ]:
                raise optimizer.file.damage(
                    f"the parameter groups of model-parallel rank {rank} differ from those of rank "
                    f"0 in {first.file.name}; are the files of different saves?"
                )
        merged: list[dict[str, Any]] = []
        for groups in zip(*(one.param_groups for _, one in self.ranks), strict=True):
            params = {fqn: None for group in groups for fqn in group["params"]}
            merged.append({**groups[0], "params": [self._renamed(fqn) for fqn in params]})
        return merged


def _options(group: Mapping[str, Any]) -> str:
    return repr({key: value for key, value in group.items() if key != "params"})


def _is_tensor(value: Value) -> bool:
    return not isinstance(value, Stored) or isinstance(value.value, torch.Tensor)
