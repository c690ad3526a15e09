r"""Rules: how the shards of model-parallel ranks form whole parameters.

A rule is a regular expression over the FQNs of parameters, and operators. The first rule that
matches the whole FQN applies, to the weights and to each state of the optimizer. The first operator
of a rule unites the shards; the others change the whole parameter. As text::

    # pattern                 operators
    .*embedding\.weight        shard(0) padded(50257)
    .*qkv\.weight              fused([4096, 1024, 1024], 0)
    .*dense\.weight            shard(1)
    .*norm\.(weight|bias)      replicated
    transformer\.(.*)          shard(0) rename("model.\1")

The idea is from DeepSpeed's Universal Checkpointing (arXiv 2406.18820), which calls the operators
patterns.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_ckpt._core.tensors import DTYPE_CODES
from torch_ckpt.errors import CorruptionError, MismatchError, UnsupportedError
from torch_ckpt.formats.equality import same_bits
from torch_ckpt.formats.unions import (
    Average,
    Boxes,
    Fused,
    Operator,
    Placed,
    Replicated,
    Shard,
    Shards,
    Sizes,
    Union,
    Unique,
    check_cover,
    slices,
)

__all__ = ["Cast", "Padded", "Rename", "Rule", "Rules", "Transpose"]


@dataclass(frozen=True)
class Padded(Operator):
    """Only the first ``to`` rows belong to the parameter, as in a padded vocabulary."""

    to: int

    name = "padded"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.to:
            raise ValueError("padded to 0 rows has no elements")


@dataclass(frozen=True)
class Transpose(Operator):
    """Two dimensions are exchanged."""

    dim0: int
    dim1: int

    name = "transpose"

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(self.dim0, self.dim1).contiguous()


@dataclass(frozen=True)
class Cast(Operator):
    """The weights are converted to a dtype such as ``"bfloat16"``. Optimizer states are not."""

    dtype: str

    name = "cast"

    def __post_init__(self) -> None:
        super().__post_init__()
        if getattr(torch, self.dtype, None) not in DTYPE_CODES:
            raise ValueError(f"{self.dtype!r} is not a dtype of torch")

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(getattr(torch, self.dtype))


@dataclass(frozen=True)
class Rename(Operator):
    r"""The parameter has the FQN ``to``, in which ``\1`` is the first group of the pattern."""

    to: str

    name = "rename"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.to:
            raise ValueError("the new name is empty")


_OPERATORS: dict[str, type[Operator]] = {
    kind.name: kind
    for kind in (
        *(Unique, Replicated, Average, Shard, Fused, Boxes),
        *(Padded, Transpose, Cast, Rename),
    )
}


_SCALE_POWERS: dict[str | None, int] = {None: 1, "exp_avg": -1, "exp_avg_sq": -2}
"""How the scale of the weights applies to each state. Gradients have the inverse scale."""

_STEPS: tuple[type[Operator], ...] = (Padded, Transpose, Cast, Rename)
"""The steps after the union, in order."""


@dataclass(frozen=True)
class Rule:
    """A pattern, and the steps for parameters whose FQN it matches.

    Attributes:
        pattern: Regular expression that matches a whole FQN.
        union: How the shards of ranks form the parameter.
        then: Further steps, at most one of each kind: ``padded``, ``transpose``, ``cast`` and
            ``rename``, in this order.

    Raises:
        ValueError: The pattern is not a regular expression, or the steps have another order.
    """

    pattern: str
    union: Union
    then: tuple[Operator, ...] = ()

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"{self.pattern!r} is not a regular expression: {error}") from None
        order = [_STEPS.index(type(one)) for one in self.then]
        if order != sorted(set(order)):
            steps = ", ".join(kind.name for kind in _STEPS)
            raise ValueError(f"the steps of {self} are not in the order {steps}, each once")

    def __str__(self) -> str:
        return " ".join([self.pattern, str(self.union), *map(str, self.then)])

    def place(
        self, fqn: str, shards: Shards, state: str | None = None
    ) -> tuple[Sizes, list[Placed]]:
        """Returns the sizes of the parameter without padding, and the boxes that form it.

        The shards are in the order of the ranks. ``state`` is the name of an optimizer state,
        ``None`` for the weights. Raises MismatchError if the shards overlap or the rule cannot
        unite them, and UnsupportedError if they are scaled, and the effect on the state is unknown.
        """
        sizes, placed = self.union.place(fqn, shards)
        check_cover(fqn, sizes, placed)
        scaled = [one.scale for one in placed if one.scale != 1]
        if scaled and state not in _SCALE_POWERS:
            raise UnsupportedError(
                f"cannot load {state!r} of {fqn!r}: the ranks have the weights scaled by "
                f"{scaled[0]}, and how that changes this state is unknown"
            )
        for step in self.then:
            if not isinstance(step, Padded):
                continue
            if not sizes or sizes[0] < step.to:
                raise MismatchError(f"{fqn!r} has sizes {sizes}, fewer rows than {step}")
            sizes = (step.to, *sizes[1:])
            cut = ((one, min(one.sizes[0], step.to - one.at[0])) for one in placed)
            placed = [
                dataclasses.replace(one, sizes=(rows, *one.sizes[1:]))
                for one, rows in cut
                if rows > 0
            ]
        return sizes, placed

    def changes(self, state: str | None = None) -> list[Transpose | Cast]:
        """Returns the steps that change the elements of the weights, or of a state."""
        return [
            step
            for step in self.then
            if isinstance(step, Transpose) or (isinstance(step, Cast) and state is None)
        ]

    def unite(
        self,
        fqn: str,
        shards: Shards,
        read: Callable[[int], torch.Tensor],
        state: str | None = None,
    ) -> torch.Tensor:
        """Returns the whole parameter, or one state of it, after all steps.

        Args:
            fqn: FQN of the parameter.
            shards: Its shards, in the order of the ranks.
            read: Returns the shard of a rank. Called once for each rank.
            state: Name of the optimizer state; ``None`` for the weights.

        Raises:
            CorruptionError: The parameter is replicated, and its elements differ between ranks.
            MismatchError: The rule cannot unite the shards.
            UnsupportedError: The shards are scaled, and the effect on the state is unknown.

        Example::

            whole = rule.unite("w", {rank: tuple(t.shape) for rank, t in parts.items()}, parts.get)
        """
        sizes, placed = self.place(fqn, shards, state)
        whole: torch.Tensor | None = None
        mean: torch.Tensor | None = None
        on_all_ranks = isinstance(self.union, Replicated | Average)
        for rank in shards if on_all_ranks else dict.fromkeys(one.rank for one in placed):
            shard = read(rank)
            self._check_shard(fqn, rank, shard, shards[rank], whole)
            if whole is None:
                whole = torch.empty(sizes, dtype=shard.dtype, device=shard.device)
            elif on_all_ranks:
                others = shard[: sizes[0]] if sizes else shard
                if isinstance(self.union, Average):
                    mean = (whole.double() if mean is None else mean) + others.double()
                elif not same_bits(others, whole):
                    raise CorruptionError(
                        f"cannot load {state or 'the weights'} of {fqn!r}: it is replicated, but "
                        f"rank {rank} has other values than rank {next(iter(shards))}"
                    )
            for one in placed:
                if one.rank == rank:
                    part = shard[slices(one.offsets, one.sizes)]
                    if one.scale != 1:
                        part = part / one.scale ** _SCALE_POWERS[state]
                    whole[slices(one.at, one.sizes)] = part
        if whole is None:  # It has no elements.
            shard = read(next(iter(shards)))
            whole = torch.empty(sizes, dtype=shard.dtype, device=shard.device)
        if mean is not None:
            whole = (mean / len(shards)).to(whole.dtype)
        return self.changed(fqn, whole, state)

    def changed(self, fqn: str, whole: torch.Tensor, state: str | None = None) -> torch.Tensor:
        """Returns the parameter, or a state of it, after the steps that change elements.

        Raises MismatchError if it lacks the dimensions that a step requires.
        """
        for step in self.changes(state):
            try:
                whole = step.apply(whole)
            except IndexError:
                sizes = tuple(whole.shape)
                raise MismatchError(
                    f"{fqn!r} of sizes {sizes} has no dimensions for {step}"
                ) from None
        return whole

    def _check_shard(
        self, fqn: str, rank: int, shard: torch.Tensor, sizes: Sizes, whole: torch.Tensor | None
    ) -> None:
        """Checks a loaded shard against its expected sizes and the other ranks' shards."""
        dtype = shard.dtype if whole is None else whole.dtype
        if tuple(shard.shape) != tuple(sizes) or shard.dtype != dtype:
            raise MismatchError(
                f"{fqn!r} is {shard.dtype} of {tuple(shard.shape)} on rank {rank}, and not {dtype} "
                f"of {tuple(sizes)}"
            )
        if isinstance(self.union, Average) and not shard.is_floating_point():
            raise MismatchError(f"{fqn!r} is {shard.dtype}, of which there is no average")

    def renamed(self, fqn: str) -> str:
        """Returns the FQN of the parameter after this rule."""
        for operator in self.then:
            if isinstance(operator, Rename):
                found = re.fullmatch(self.pattern, fqn)
                assert found is not None
                try:
                    return found.expand(operator.to)
                except re.error as error:
                    raise MismatchError(f"cannot rename {fqn!r} by {self}: {error}") from None
        return fqn


@dataclass(frozen=True)
class Rules:
    r"""Rules in the order in which they are tried. Prints as text that :meth:`parse` reads.

    Attributes:
        rules: The rules.

    Example::

        rules = Rules.parse(".*norm[.]weight replicated\n.* shard(0)")
        reader = FastReader("run/global_step100", rules=rules)
    """

    rules: tuple[Rule, ...]

    @classmethod
    def parse(cls, text: str) -> Rules:
        """Parses rules from text: one per line. Lines that start with ``#`` are comments.

        Raises:
            ValueError: A line is not a rule. The message states its number.
        """
        rules: list[Rule] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.strip()
            if not words or words.startswith("#"):
                continue
            try:
                rules.append(_parse(words))
            except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as error:
                raise ValueError(f"line {number} of the rules, {words!r}: {error}") from None
        return cls(tuple(rules))

    def __str__(self) -> str:
        return "\n".join(map(str, self.rules))

    def of(self, fqn: str) -> Rule | None:
        """Returns the first rule that matches an FQN."""
        return next((rule for rule in self.rules if re.fullmatch(rule.pattern, fqn)), None)

    def matches(self, fqns: Iterable[str]) -> dict[str, Rule]:
        """Returns the rule of each FQN.

        Raises a MismatchError that names FQNs without a rule, or rules without an FQN.
        """
        found = {fqn: self.of(fqn) for fqn in fqns}
        without = [fqn for fqn, rule in found.items() if rule is None]
        if without:
            raise MismatchError(f"no rule matches {_some(without)}")
        used = {id(rule) for rule in found.values()}
        unused = [rule.pattern for rule in self.rules if id(rule) not in used]
        if unused:
            raise MismatchError(
                f"no FQN is left for the patterns {_some(unused)}: they match none, or rules above "
                f"match theirs; FQNs are {_some(list(found))}"
            )
        return {fqn: rule for fqn, rule in found.items() if rule is not None}


def _parse(line: str) -> Rule:
    pattern, rest = (*line.split(maxsplit=1), "")[:2]
    operators = [_operator(node) for node in _calls(rest.replace("\\", "\\\\"))]
    if not operators or not isinstance(operators[0], Union):
        unions = [name for name, kind in _OPERATORS.items() if issubclass(kind, Union)]
        raise ValueError(f"the first operator is not one of {', '.join(unions)}")
    union, then = operators[0], operators[1:]
    if misplaced := [operator for operator in then if isinstance(operator, Union)]:
        raise ValueError(f"{misplaced[0]} is not the first operator")
    return Rule(pattern, union, tuple(then))


def _calls(text: str) -> list[ast.expr]:
    """Returns the operators of a line, as Python expressions separated by spaces."""
    found: list[ast.expr] = []
    words = text.split()
    while words:
        for count in range(1, len(words) + 1):  # An operator may contain spaces.
            try:
                found.append(ast.parse(" ".join(words[:count]), mode="eval").body)
            except SyntaxError:
                if count == len(words):
                    raise
                continue
            words = words[count:]
            break
    return found


def _operator(node: ast.expr) -> Operator:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name not in _OPERATORS:
        raise ValueError(f"{ast.unparse(node)} is not one of {', '.join(_OPERATORS)}")
    values = [_frozen(ast.literal_eval(value)) for value in call.args]
    named = {str(one.arg): _frozen(ast.literal_eval(one.value)) for one in call.keywords}
    kind = _OPERATORS[name]
    try:
        return kind(*values, **named)
    except TypeError as error:
        raise ValueError(str(error).replace(f"{kind.__name__}.__init__()", name)) from None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more
