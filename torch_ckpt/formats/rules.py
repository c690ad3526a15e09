r"""Rules: how the shards of model-parallel ranks make whole parameters.

A rule is a regular expression over the FQNs of parameters, and operators. The first rule that
matches the whole FQN applies, to the weights and to each state of the optimizer. The first operator
of a rule unites the shards; the others change the whole parameter. As text::

    # pattern                 operators
    .*embedding\.weight        shard(0) padded(50257)
    .*qkv\.weight              fused([4096, 1024, 1024], 0)
    .*dense\.weight            shard(1)
    .*norm\.(weight|bias)      replicated
    transformer\.(.*)          shard(0) rename("model.\1")

The idea is that of DeepSpeed's Universal Checkpointing (arXiv 2406.18820), where the operators are
called patterns.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from torch_ckpt.errors import MismatchError

__all__ = [
    "Average",
    "Boxes",
    "Cast",
    "Fused",
    "Operator",
    "Padded",
    "Placed",
    "Rename",
    "Replicated",
    "Rule",
    "Rules",
    "Shard",
    "Shards",
    "Transpose",
    "Union",
    "Unique",
    "check_cover",
    "fits",
    "listed",
]

Sizes = tuple[int, ...]
Shards = Mapping[int, Sizes]
"""Rank -> sizes of its shard of a parameter."""


@dataclass(frozen=True)
class Placed:
    """A box of a shard, and its place in the whole parameter.

    Attributes:
        rank: The rank of the shard.
        offsets: Offsets of the box in the shard.
        sizes: Its sizes.
        at: Its offsets in the whole parameter.
        scale: The shard has the elements multiplied by this.
    """

    rank: int
    offsets: Sizes
    sizes: Sizes
    at: Sizes
    scale: float = 1.0


@dataclass(frozen=True)
class Operator:
    """A step from shards to a parameter. Prints as in the text of a rule."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not _is_of(value, str(one.type)):
                kind = str(one.type).replace("int", "int from 0 on")
                raise ValueError(f"{one.name} of {self.name} is {_text(value)}, not {kind}")

    def __str__(self) -> str:
        values = [getattr(self, one.name) for one in fields(self)]
        while values and values[-1] is None:
            values.pop()
        return f"{self.name}({', '.join(map(_text, values))})" if values else self.name


class Union(Operator):
    """An operator that unites the shards of ranks."""

    def place(self, fqn: str, shards: Shards) -> tuple[Sizes, list[Placed]]:
        """Returns the sizes of the whole parameter, and the boxes that it consists of.

        Args:
            fqn: FQN of the parameter, for messages.
            shards: Its shards, in the order of the ranks.

        Raises:
            MismatchError: The shards cannot be united so.
        """
        raise NotImplementedError


def _whole(shards: Shards) -> tuple[Sizes, list[Placed]]:
    rank, sizes = next(iter(shards.items()))
    origin = (0,) * len(sizes)
    return sizes, [Placed(rank, origin, sizes, origin)]


@dataclass(frozen=True)
class Unique(Union):
    """One rank has the parameter."""

    name = "unique"

    def place(self, fqn: str, shards: Shards) -> tuple[Sizes, list[Placed]]:
        """See :class:`Union`."""
        if len(shards) > 1:
            raise MismatchError(f"{fqn!r} is unique, but ranks {listed(shards)} have it")
        return _whole(shards)


class _OfEqualSizes(Union):
    """All ranks have the whole parameter."""

    def place(self, fqn: str, shards: Shards) -> tuple[Sizes, list[Placed]]:
        """See :class:`Union`."""
        if len(set(shards.values())) > 1:
            raise MismatchError(
                f"{fqn!r} is {self.name}, but has sizes {_sizes_by_rank(shards)} on its ranks"
            )
        return _whole(shards)


@dataclass(frozen=True)
class Replicated(_OfEqualSizes):
    """All ranks have the same elements. A load of a small parameter checks that."""

    name = "replicated"


@dataclass(frozen=True)
class Average(_OfEqualSizes):
    """The parameter is the mean over the ranks."""

    name = "average"


@dataclass(frozen=True)
class Shard(Union):
    """The shards follow one another along a dimension.

    Attributes:
        dim: The dimension.
    """

    dim: int

    name = "shard"

    def place(self, fqn: str, shards: Shards) -> tuple[Sizes, list[Placed]]:
        """See :class:`Union`."""
        widths = _widths(fqn, shards, self.dim)
        first = next(iter(shards.values()))
        placed: list[Placed] = []
        end = 0
        for (rank, sizes), width in zip(shards.items(), widths, strict=True):
            placed.append(Placed(rank, (0,) * len(sizes), sizes, _at(sizes, self.dim, end)))
            end += width
        return _replaced(first, self.dim, end), placed


@dataclass(frozen=True)
class Fused(Union):
    """Several parameters in one, each of which is sharded: QKV, or gate and up.

    Attributes:
        sizes: Sizes of these parameters along ``dim``.
        dim: The dimension along which they follow one another, and are sharded.
        widths: For each of them, its size on each rank. By default, equal on all ranks.
    """

    sizes: tuple[int, ...]
    dim: int
    widths: tuple[tuple[int, ...], ...] | None = None

    name = "fused"

    def place(self, fqn: str, shards: Shards) -> tuple[Sizes, list[Placed]]:
        """See :class:`Union`."""
        count = len(shards)
        widths = self.widths
        if widths is None:
            if any(size % count for size in self.sizes):
                raise MismatchError(
                    f"{fqn!r} is {self}, but {count} ranks cannot have equal parts of it"
                )
            widths = tuple((size // count,) * count for size in self.sizes)
        found = _widths(fqn, shards, self.dim)
        asked = [sum(of_ranks) for of_ranks in zip(*widths, strict=True)]
        if asked != found or [sum(of_part) for of_part in widths] != list(self.sizes):
            raise MismatchError(
                f"{fqn!r} is {self}, but has sizes {_sizes_by_rank(shards)} on its ranks"
            )
        placed: list[Placed] = []
        begins, at = [0] * count, 0
        for of_part in widths:
            for number, (rank, sizes) in enumerate(shards.items()):
                box = _replaced(sizes, self.dim, of_part[number])
                offsets = _at(sizes, self.dim, begins[number])
                if of_part[number]:
                    placed.append(Placed(rank, offsets, box, _at(sizes, self.dim, at)))
                begins[number] += of_part[number]
                at += of_part[number]
        return _replaced(next(iter(shards.values())), self.dim, at), placed


@dataclass(frozen=True)
class Boxes(Union):
    """Any boxes.

    Attributes:
        sizes: Sizes of the whole parameter.
        boxes: For each box: rank, offsets in its shard, sizes, and offsets in the whole parameter.
            A fifth element is the factor by which the shard has its elements multiplied.
    """

    sizes: tuple[int, ...]
    boxes: tuple[tuple[Any, ...], ...]

    name = "boxes"

    def __post_init__(self) -> None:
        super().__post_init__()
        for box in self.boxes:
            sizes = "tuple[int, ...]"
            kinds = ["int", sizes, sizes, sizes]
            scale = box[4] if isinstance(box, tuple) and len(box) == 5 else 1.0
            is_box = isinstance(box, tuple) and len(box) in (4, 5)
            if (
                not is_box
                or not all(map(_is_of, box, kinds))
                or not isinstance(scale, float | int)
                or not scale
            ):
                raise ValueError(
                    f"{_text(box)} is not a box: rank, offsets, sizes, offsets in the whole, and "
                    "perhaps a factor"
                )

    def place(self, fqn: str, shards: Shards) -> tuple[Sizes, list[Placed]]:
        """See :class:`Union`."""
        placed = [one for box in self.boxes if math.prod((one := Placed(*box)).sizes)]
        for one in placed:
            inside = one.rank in shards and fits(one.offsets, one.sizes, shards[one.rank])
            if not inside or not fits(one.at, one.sizes, self.sizes):
                raise MismatchError(
                    f"{fqn!r} cannot be united: box {one.offsets} of {one.sizes} of rank "
                    f"{one.rank} at {one.at} exceeds its shard, {shards.get(one.rank)}, or the "
                    f"whole parameter, {self.sizes}"
                )
        return self.sizes, placed


@dataclass(frozen=True)
class Padded(Operator):
    """Only the first rows belong to the parameter, as in a padded vocabulary.

    Attributes:
        to: Number of rows without padding.
    """

    to: int

    name = "padded"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.to:
            raise ValueError("padded to 0 rows has no elements")


@dataclass(frozen=True)
class Transpose(Operator):
    """Two dimensions are exchanged.

    Attributes:
        dim0: One dimension.
        dim1: The other dimension.
    """

    dim0: int
    dim1: int

    name = "transpose"


@dataclass(frozen=True)
class Cast(Operator):
    """The weights are converted to a dtype. The states of the optimizer are not.

    Attributes:
        dtype: Name of the dtype, such as ``"bfloat16"``.
    """

    dtype: str

    name = "cast"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"{self.dtype!r} is not a dtype of torch")


@dataclass(frozen=True)
class Rename(Operator):
    r"""The parameter has another FQN.

    Attributes:
        to: The FQN; ``\1`` is the first group of the pattern.
    """

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


_STEPS: tuple[type[Operator], ...] = (Padded, Transpose, Cast, Rename)
"""The steps after the union, in the order in which they are taken."""


@dataclass(frozen=True)
class Rule:
    """A pattern, and what is done with the parameters whose FQN it matches.

    Attributes:
        pattern: Regular expression that matches a whole FQN.
        union: How the shards of ranks make the parameter.
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

    def renamed(self, fqn: str) -> str:
        """Returns the FQN that the parameter has after this rule."""
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
        """Reads rules from text: one in each line. Text after ``#`` at its start is a comment.

        Raises:
            ValueError: A line is not a rule. The message has its number.
        """
        rules: list[Rule] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.strip()
            if not words or words.startswith("#"):
                continue
            try:
                rules.append(_parse(words))
            except (SyntaxError, TypeError, ValueError) as error:
                raise ValueError(f"line {number} of the rules, {words!r}: {error}") from None
        return cls(tuple(rules))

    def __str__(self) -> str:
        return "\n".join(map(str, self.rules))

    def of(self, fqn: str) -> Rule | None:
        """Returns the first rule that matches an FQN."""
        return next((rule for rule in self.rules if re.fullmatch(rule.pattern, fqn)), None)

    def matches(self, fqns: Iterable[str]) -> dict[str, Rule]:
        """Returns the rule of each FQN.

        Raises:
            MismatchError: FQNs have no rule, or a rule has no FQN. The message names them.
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


def check_cover(fqn: str, sizes: Sizes, placed: Sequence[Placed]) -> None:
    """Checks that boxes cover each element of a parameter once.

    Raises:
        MismatchError: Two boxes overlap, or elements are in no box.
    """
    boxes = [one for one in placed if math.prod(one.sizes)]
    for number, one in enumerate(boxes):
        for other in boxes[:number]:
            apart = [
                a + n <= b or b + m <= a
                for a, n, b, m in zip(one.at, one.sizes, other.at, other.sizes, strict=True)
            ]
            if not any(apart):
                raise MismatchError(
                    f"{fqn!r} has elements of both rank {other.rank} and rank {one.rank}: boxes at "
                    f"{other.at} of {other.sizes} and at {one.at} of {one.sizes}"
                )
    covered = sum(math.prod(one.sizes) for one in boxes)
    if covered != math.prod(sizes):
        raise MismatchError(
            f"{fqn!r} of sizes {sizes} has {math.prod(sizes)} elements, and its ranks have "
            f"{covered} of them"
        )


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


def _is_of(value: Any, kind: str) -> bool:
    """Returns whether a value is of the annotated type of a field."""
    if kind == "int":
        return type(value) is int and value >= 0
    if kind == "str":
        return isinstance(value, str)
    if kind.endswith("| None"):
        return value is None or _is_of(value, kind.removesuffix(" | None"))
    if not isinstance(value, tuple):
        return False
    inner = kind.removeprefix("tuple[").removesuffix(", ...]")
    return inner.startswith("tuple[Any") or all(_is_of(one, inner) for one in value)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _widths(fqn: str, shards: Shards, dim: int) -> list[int]:
    """Returns the sizes along a dimension, if the other sizes are equal."""
    first = next(iter(shards.values()))
    if not 0 <= dim < len(first):
        raise MismatchError(f"{fqn!r} of sizes {first} has no dimension {dim}")
    if len({_replaced(sizes, dim, 0) for sizes in shards.values()}) > 1:
        raise MismatchError(
            f"{fqn!r} cannot be united along dimension {dim}: its ranks have sizes "
            f"{_sizes_by_rank(shards)}"
        )
    return [sizes[dim] for sizes in shards.values()]


def _replaced(sizes: Sizes, dim: int, size: int) -> Sizes:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def _at(sizes: Sizes, dim: int, offset: int) -> Sizes:
    return _replaced((0,) * len(sizes), dim, offset)


def fits(offsets: Sizes, sizes: Sizes, within: Sizes) -> bool:
    """Returns whether a box lies within a tensor of other sizes."""
    return len(offsets) == len(sizes) == len(within) and all(
        offset >= 0 and size >= 0 and offset + size <= end
        for offset, size, end in zip(offsets, sizes, within, strict=True)
    )


def _sizes_by_rank(shards: Shards) -> str:
    return ", ".join(f"{sizes} on rank {rank}" for rank, sizes in shards.items())


def listed(ranks: Iterable[int]) -> str:
    """Returns ranks as text."""
    return ", ".join(map(str, ranks))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more
