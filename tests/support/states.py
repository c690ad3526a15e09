"""Random nested state dicts of all that DCP takes, their changes between saves, and comparison.

A state is a function of its generator alone. So a case that failed is made again from its seed.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import random
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from support.tensors import (
    DTYPES,
    LAYOUTS,
    NUMBER_MASKS,
    ONES,
    OVERLAPS,
    PACKED,
    Sizes,
    Tagged,
    copied,
    defined_bits,
    laid_out,
    mask_of,
    randomise,
)

from torch_ckpt.planning.local_shards import LocalShards

State = dict[Any, Any]

KEYS = ["w", "b", "", ".", "a.b", "a", "ü", "模型", " ", "0", "1", "\n", "x" * 300]
EDGES = [4096, 128 << 10, 256 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20]
"""Lengths in bytes at which the engine decides otherwise."""


@dataclass
class Plain:
    """An object of the user's own."""

    number: int
    text: str


class Cased(UserDict[Any, Any]):
    """A mapping that is no dict."""


SAFE_GLOBALS = [Tagged, Plain]


def _parts(whole: torch.Tensor) -> Any:
    """Parts of a storage, in a tuple. Some of them overlap, and one has gaps."""
    return whole[1:5], (whole[3:11], whole[::7]), whole[-2]


def _columns(table: torch.Tensor) -> Any:
    """Columns of a table, of which two have common elements, and one has none."""
    return table[:, 1], (table[:, 3:5], table[:, 4]), table[2:2]


def _sparse(rng: random.Random) -> torch.Tensor:
    """A sparse tensor. Its values or its indices may be expanded."""
    length = rng.randint(1, 5000)
    indices, values = torch.arange(length)[None], torch.arange(float(length))
    if rng.random() < 0.5:
        values = torch.ones(1).expand(length)
    if rng.random() < 0.5:
        indices = indices.expand(2, length)
    sizes = (5000,) * len(indices)
    return torch.sparse_coo_tensor(indices, values, sizes, check_invariants=True)


def _with_shared(values: Iterable[Any]) -> list[Any]:
    """The values, with one attribute, as modules share their metadata."""
    made, shared = [*values], OrderedDict((f"key {i}", {"version": 1}) for i in range(99))
    for value in made:
        value.shared = shared
    return made


def _object_array(values: list[Any]) -> Any:
    made = np.empty(len(values), object)
    made[:] = values
    return made


OBJECTS: list[Callable[[random.Random], Any]] = [
    lambda rng: None,
    lambda rng: rng.randrange(1 << 70),
    lambda rng: rng.random(),
    lambda rng: "text" * rng.randrange(2000),
    lambda rng: b"\0" * rng.randrange(9),
    lambda rng: (),
    lambda rng: (1, "two", torch.ones(2)),
    lambda rng: _parts(torch.arange(rng.randint(20, 3000))),
    lambda rng: _columns(torch.arange(float(rng.randint(9, 99) * 7)).view(-1, 7)),
    lambda rng: [],
    lambda rng: [1, [2, "three"], None],
    lambda rng: {1, 2},
    lambda rng: Plain(rng.randrange(9), "dataclass"),
    lambda rng: np.float32(rng.random()),
    lambda rng: torch.Size((1, 2)),
    lambda rng: torch.float32,
    lambda rng: range(3),
    lambda rng: (_sparse(rng), torch.ones(1).expand(rng.randint(1, 5000))),
    lambda rng: (torch.quantize_per_tensor(torch.arange(9.0), 0.1, 3, torch.quint4x2),),
    lambda rng: (_with_shared(torch.nn.Parameter(torch.ones(2)) for _ in range(300)),),
    lambda rng: (_with_shared(OrderedDict(a=1) for _ in range(300)),),
    lambda rng: Counter(f"key {rng.randrange(9)}" for _ in range(rng.randint(1, 99))),
    lambda rng: (deque([tuple(range(99)), [1]] * rng.randrange(99), maxlen=rng.randint(1, 99)),),
    lambda rng: _object_array([{"a": 1}, [2], "three", None] * rng.randrange(9)),
    lambda rng: {(i, "key" * 99) for i in range(rng.randrange(300))},
    lambda rng: ({"a": [1, {"b": {2}}]}, [Plain(rng.randrange(9), "in a tuple")]),
]


# ---- Tensors of a state --------------------------------------------------------------------------


def random_sizes(rng: random.Random, numel: int) -> Sizes:
    """Sizes of about so many elements, of just so many where they are of one dimension."""
    if numel == 0:
        return rng.choice([(0,), (0, 3), (3, 0, 2)])
    if numel == 1:
        return rng.choice([(), (1,), (1, 1)])
    sizes: list[int] = []
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3, 5])):
        sizes.append(min(numel, rng.choice([1, 2, 3, 5, 7, 131, math.isqrt(numel)])))
        numel //= sizes[-1]
    sizes.append(numel)
    rng.shuffle(sizes)
    return tuple(sizes)


def _wrapped(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or it as a parameter, as a subclass, or with a gradient to come."""
    kind = rng.random()
    has_gradient = (tensor.is_floating_point() or tensor.is_complex()) and rng.random() < 0.7
    if kind < 0.1:
        return torch.nn.Parameter(tensor, requires_grad=has_gradient)
    if kind < 0.13:
        return tensor.as_subclass(Tagged)
    if kind < 0.18 and has_gradient and tensor.is_leaf:
        return tensor.requires_grad_()
    return tensor


def random_of_length(
    rng: random.Random,
    nbytes: int,
    dtypes: list[torch.dtype] = DTYPES,
    seed: int | None = None,
) -> torch.Tensor:
    """A tensor of about so many bytes, in any layout."""
    dtype = rng.choice(dtypes)
    layout = "contiguous" if rng.random() < 0.3 else rng.choice([*LAYOUTS, *OVERLAPS])
    sizes = random_sizes(rng, max(nbytes // dtype.itemsize, min(nbytes, 1)))
    if dtype in PACKED and not sizes:  # Safetensors count numbers, of which it has two.
        sizes = (1,)
    return laid_out(layout, sizes, dtype, rng.getrandbits(60) if seed is None else seed)


def _quantised(rng: random.Random) -> torch.Tensor:
    values = torch.randn(rng.randint(1, 5), 6)
    if rng.random() < 0.5:
        return torch.quantize_per_tensor(values, 0.1, 3, torch.quint8)
    scales = torch.rand(values.size(0)) + 0.1
    points = torch.zeros(values.size(0), dtype=torch.int64)
    return torch.quantize_per_channel(values, scales, points, 0, torch.qint8)


def small_tensor(rng: random.Random) -> torch.Tensor:
    """A tensor of at most 1 KiB, of any kind that torch stores."""
    if rng.random() < 0.1:
        return _quantised(rng)
    if rng.random() < 0.1:
        return torch.randn(7, requires_grad=True) * 2
    return _wrapped(rng, random_of_length(rng, rng.randint(0, 1024)))


@dataclass(frozen=True)
class Lengths:
    """How many bytes the tensors of a state have. The next tensor is of one of three kinds.

    Attributes:
        small: Weight of at most 5 KB.
        edge: Weight of about one of the lengths in :data:`EDGES`.
        large: Weight of up to 20 MiB.
        budget: Of all tensors; those that come later are small.
    """

    small: float
    edge: float
    large: float
    budget: int


LENGTHS = {
    "many small": Lengths(1, 0.02, 0, 2 << 20),
    "mixed": Lengths(0.6, 0.4, 0, 2 << 20),
    "long": Lengths(0.2, 0.8, 0, 6 << 20),
    "large": Lengths(0.3, 0.4, 0.3, 30 << 20),
}


# ---- States --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Content:
    """What a state may have.

    Attributes:
        dtypes: Dtypes of its tensors.
        has_objects: Whether it has values that are no tensors, and tensors that only torch stores.
        has_ties: Whether tensors share memory.
        has_weights: Whether it has matrices of whole blocks of 128 rows and columns, and names of
            weights; floats are finite then.
    """

    dtypes: list[torch.dtype]
    has_objects: bool = True
    has_ties: bool = True
    has_weights: bool = False


CONTENTS = {
    "any": Content([*DTYPES, *PACKED]),
    "the engine's dtypes": Content([*DTYPES, *PACKED]),
    # What safetensors have.
    "model": Content(
        [d for d in [*DTYPES, *PACKED] if d not in (torch.complex32, torch.complex128)],
        has_objects=False,
        has_ties=False,
    ),
    # A model that may be quantised.
    "weights": Content(
        [*NUMBER_MASKS, torch.int64],
        has_objects=False,
        has_ties=False,
        has_weights=True,
    ),
}


def random_state(
    rng: random.Random,
    *,
    depth: int = 3,
    width: int = 10,
    odd: Callable[[random.Random], Any] | None = None,
    tensor: Callable[[random.Random], torch.Tensor] = small_tensor,
    key: Callable[[random.Random], Any] | None = None,
    mappings: tuple[type, ...] = (dict, dict, OrderedDict, Cased),
    may_be_empty: bool = True,
    content: Content = CONTENTS["any"],
) -> State:
    """A nested state dict.

    Args:
        rng: Of the test.
        depth: Of the nesting.
        width: The most values at the top.
        odd: Makes values of another kind, of which one in ten is.
        tensor: Makes tensors.
        key: Makes keys. By default, they may clash once they are flattened.
        mappings: Classes of mappings within.
        may_be_empty: Whether these may have no keys. Stock does not load all such states.
        content: What the state may have.
    """
    tensors: list[torch.Tensor] = []
    key = key or (lambda rng: rng.randrange(3) if rng.random() < 0.1 else rng.choice(KEYS))

    def value(left: int) -> Any:
        kind = rng.random()
        if odd is not None and rng.random() < 0.1:
            return odd(rng)
        if kind < 0.5 or (not content.has_objects and (kind < 0.75 or left == 0)):
            if content.has_ties and tensors and rng.random() < 0.15:
                return _tied(rng, rng.choice(tensors))
            tensors.append(tensor(rng))
            return tensors[-1]
        if kind < 0.75 or left == 0:
            return rng.choice(OBJECTS)(rng)
        if kind < 0.9 or not content.has_objects:
            return mapping(left - 1)
        return [value(left - 1) for _ in range(rng.randint(0, 3))]

    def mapping(left: int) -> Any:
        made = {key(rng): value(left) for _ in range(rng.randint(0 if may_be_empty else 1, 6))}
        return rng.choice(mappings)(made)

    return {key(rng): value(depth) for _ in range(rng.randint(1, width))}


def _tied(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor for another name, or some rows of it."""
    if tensor.dim() == 0 or tensor.is_quantized or rng.random() < 0.5:
        return tensor
    begin, end = sorted((rng.randint(0, len(tensor)), rng.randint(0, len(tensor))))
    return tensor.detach()[begin : end : rng.choice([1, 1, 2, 5])]


class Leaf(NamedTuple):
    """A tensor or object of a state.

    Attributes:
        path: Keys that lead to it.
        container: The mapping or list that has it, under the last of them.
        value: It.
    """

    path: tuple[Any, ...]
    container: Any
    value: Any

    def put(self, value: Any) -> None:
        """Puts another value in its place."""
        self.container[self.path[-1]] = value


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[Leaf]:
    """All tensors and objects, in order."""
    pairs = state.items() if isinstance(state, dict | UserDict) else enumerate(state)
    for key, value in list(pairs):
        if isinstance(value, dict | UserDict | list):
            yield from leaves(value, (*path, key))
        else:
            yield Leaf((*path, key), state, value)


def mapped(function: Callable[[tuple[Any, ...], Any], Any], state: Any, *path: Any) -> Any:
    """The same structure of the values that ``function`` makes of paths and values.

    A value of ``...`` leaves its key out, and a mapping of which nothing is left.
    """
    if isinstance(state, dict | UserDict):
        made = {key: mapped(function, value, *path, key) for key, value in state.items()}
        left = {key: value for key, value in made.items() if value is not ...}
        return type(state)(left) if left or not state or not path else ...
    if isinstance(state, list):
        made_list = [mapped(function, value, *path, key) for key, value in enumerate(state)]
        return [value for value in made_list if value is not ...]
    return function(path, state)


def at_path(state: Any, path: tuple[Any, ...]) -> Any:
    """The value at a path."""
    return functools.reduce(lambda container, key: container[key], path, state)


def put(state: State, path: tuple[Any, ...], value: Any) -> State:
    """The same structure with a value at a path, with mappings on the way where there are none."""
    made = container = mapped(lambda _, v: v, state)
    for key in path[:-1]:
        container = container[key] if isinstance(container, list) else container.setdefault(key, {})
    container[path[-1]] = value
    return made


def is_in_list(path: tuple[Any, ...]) -> bool:
    """Whether a value is in a list, whose other values have other names without it."""
    return any(isinstance(key, int) for key in path)


def snapshot(state: Any) -> Any:
    """The present values: contiguous tensors and copies of objects."""
    return mapped(lambda _, v: copied(v) if isinstance(v, torch.Tensor) else _copy_of(v), state)


def _copy_of(value: Any) -> Any:
    """A copy. Unlike ``copy.deepcopy``, it has the attributes of parameters."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


# ---- Changes between saves -----------------------------------------------------------------------


class Evolving:
    """A state of one process, as it is at one save after another.

    Args:
        seed: Of everything.
        content: Of :data:`CONTENTS`.
    """

    def __init__(self, seed: int, content: str) -> None:
        self.rng = random.Random(seed)
        self.content = CONTENTS[content]
        self.numbers = itertools.count()
        lengths = self.rng.choices(list(LENGTHS), [0.25, 0.59, 0.15, 0.01])[0]
        self._lengths, self._left = LENGTHS[lengths], LENGTHS[lengths].budget
        self.state = random_state(
            self.rng,
            depth=self.rng.choice([0, 1, 3]),
            width=50 if lengths == "many small" else 12,
            tensor=self.tensor,
            key=self._key,
            mappings=(dict, dict, OrderedDict),
            may_be_empty=False,
            content=self.content,
        )
        self._refill()

    def _key(self, rng: random.Random) -> str:
        """A key that is never the same."""
        end = ".weight" if self.content.has_weights and rng.random() < 0.7 else ""
        return f"{rng.choice(KEYS)}{next(self.numbers)}{end}"

    def tensor(self, rng: random.Random) -> torch.Tensor:
        """A new tensor, of a length that the budget allows."""
        if self.content.has_weights and rng.random() < 0.5 and self._left > 1 << 20:
            sizes = rng.choice([128, 256, 384]), rng.choice([128, 256, 512])
            made = laid_out(rng.choice(list(LAYOUTS)), sizes, rng.choice(self.content.dtypes), ONES)
            self._left -= made.nbytes
            return made
        lengths = self._lengths
        kind = rng.choices("sel", [lengths.small, lengths.edge, lengths.large])[0]
        nbytes = {
            "s": rng.choice([0, 1, rng.randint(1, 64), rng.randint(64, 5000)]),
            "e": max(1, rng.choice(EDGES) + rng.randint(-70, 140)),
            "l": rng.randint(1 << 20, 20 << 20),
        }[kind]
        if nbytes > self._left:
            nbytes %= 5000
        self._left -= nbytes
        made = random_of_length(rng, nbytes, self.content.dtypes, ONES)
        return _wrapped(rng, made) if self.content.has_objects else made

    def change(self) -> None:
        """Some changes, or none, and other values in the same memory, as training makes them.

        At times in all memory, and at times in some of it, or in one bit alone.
        """
        rng = self.rng
        self._left = self._lengths.budget // 2
        for _ in range(rng.choice([0, 0, 0, 1, 1, 2, 5])):
            found = [leaf for leaf in leaves(self.state) if isinstance(leaf.value, torch.Tensor)]
            if found:
                CHANGES[rng.choice(list(CHANGES))](self, rng.choice(found), found)
        rng = random.Random(rng.getrandbits(60))
        found = [pair for pair in self._memories() if len(pair[0])]
        kind = rng.choice(["all", "all", "some", "bit", "bit", "bit"])
        if kind == "bit" and found:
            # Within a long tensor, only the digest of all of it shows such a change.
            longest = max(found, key=lambda pair: len(pair[0]))
            memory, mask = rng.choice([rng.choice(found), longest, longest])
            within = rng.randrange(len(memory))
            at = rng.choice([0, len(memory) - 1, within, within])
            bits = 255 if mask is None else mask[at % len(mask)]
            memory[at] ^= bits & -bits  # The lowest one that may change.
            return
        for memory, mask in found:
            if kind == "all" or rng.random() < 0.3:
                randomise(memory, rng.getrandbits(60), mask=mask)

    def _memories(self) -> list[tuple[torch.Tensor, list[int] | None]]:
        return memories(self.state, NUMBER_MASKS if self.content.has_weights else {})

    def _refill(self) -> None:
        for memory, mask in self._memories():
            randomise(memory, self.rng.getrandbits(60), mask=mask)


def _laid_out_anew(of: Evolving, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return laid_out(of.rng.choice([*LAYOUTS, *OVERLAPS]), tensor.shape, dtype, ONES)


def _goes(of: Evolving, leaf: Leaf, others: list[Leaf]) -> None:
    if len(leaf.container) > 1:
        del leaf.container[leaf.path[-1]]


def _comes(of: Evolving, leaf: Leaf, others: list[Leaf]) -> None:
    of.state[f"new {next(of.numbers)}"] = of.tensor(of.rng)


def _swap(of: Evolving, leaf: Leaf, others: list[Leaf]) -> None:
    other = of.rng.choice(others)
    leaf.put(other.value)
    other.put(leaf.value)


def _is_offloaded_and_reloaded(of: Evolving, leaf: Leaf, others: list[Leaf]) -> None:
    storage = leaf.value.untyped_storage()
    if storage.resizable() and not storage.is_shared():
        values = storage.clone()
        storage.resize_(0)
        storage.resize_(values.nbytes())
        storage.copy_(values)


def _gets_other_memory(of: Evolving, leaf: Leaf, others: list[Leaf]) -> None:
    if type(leaf.value) is not Tagged:
        leaf.value.data = leaf.value.data.clone()


def _becomes_an_object(of: Evolving, leaf: Leaf, others: list[Leaf]) -> None:
    if of.content.has_objects:
        leaf.put(of.rng.choice(OBJECTS)(of.rng))


# What may happen to a tensor between two saves. A new change joins by one line.
CHANGES: dict[str, Callable[[Evolving, Leaf, list[Leaf]], None]] = {
    "moves": lambda of, leaf, _: leaf.put(leaf.value.detach().clone()),
    "another layout": lambda of, leaf, _: leaf.put(
        _laid_out_anew(of, leaf.value, leaf.value.dtype)
    ),
    "another dtype": lambda of, leaf, _: leaf.put(
        _laid_out_anew(
            of,
            leaf.value,
            of.rng.choice([d for d in of.content.dtypes if leaf.value.dim() or d not in PACKED]),
        )
    ),
    "replaced": lambda of, leaf, _: leaf.put(of.tensor(of.rng)),
    "goes": _goes,
    "comes": _comes,
    "swaps": _swap,
    "offloaded and reloaded": _is_offloaded_and_reloaded,
    "other memory": _gets_other_memory,
    "becomes an object": _becomes_an_object,
}


def memories(
    state: Any, masks: Mapping[torch.dtype, list[int]] = MappingProxyType({})
) -> list[tuple[torch.Tensor, list[int] | None]]:
    """The bytes of each storage in a state, and the mask of their bits, which ``masks`` adds to."""
    found: dict[int, tuple[torch.Tensor, list[int] | None]] = {}

    def note(value: Any) -> None:
        if isinstance(value, LocalShards):
            note([tensor for _, tensor in value.boxes])
        elif isinstance(value, torch.Tensor):
            value = getattr(value, "_local_tensor", value)
            if value.is_sparse:
                value = value._values()  # Other indices might be invalid.
            storage = value.untyped_storage()
            if storage.nbytes():
                memory = torch.tensor([], dtype=torch.uint8).set_(storage)
                _, mask = found.get(storage.data_ptr(), (None, None))
                mask = mask_of(value) or masks.get(value.dtype) or mask
                found[storage.data_ptr()] = memory, mask
        elif isinstance(value, tuple | list):
            for each in value:
                note(each)

    for leaf in leaves(state):
        note(leaf.value)
    return list(found.values())


def change_memory(state: Any) -> None:
    """Changes every tensor in place."""
    for memory, _ in memories(state):
        memory ^= 1


def spoil(state: Any) -> None:
    """Changes everything in place, as the next step of training may: tensors and objects."""
    change_memory(state)
    _spoil_object(state, set())


def _spoil_object(value: Any, seen: set[int]) -> None:
    """Empties containers at any depth, and changes the objects in them, each once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict | UserDict | list | tuple | deque):
        for each in [*value.values()] if isinstance(value, dict | UserDict) else [*value]:
            _spoil_object(each, seen)
    if isinstance(value, dict | UserDict | list | set | deque):
        value.clear()
    elif isinstance(value, np.ndarray):
        value.fill(None)
    elif isinstance(value, Plain):
        value.number += 1
    if isinstance(value, torch.nn.Parameter | OrderedDict):
        vars(value).clear()


# ---- Targets and comparison ----------------------------------------------------------------------


def target_for(rng: random.Random, expected: Any) -> Any:
    """The same structure to load into: tensors of any layout, and ``None`` for objects."""

    def blank(_: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        # Torch copies no negated complex32 to a conjugated one.
        is_simple = rng.random() < 0.4 or value.dtype in (torch.complex32, *PACKED)
        layout = "contiguous" if is_simple else rng.choice(list(LAYOUTS))
        made = laid_out(layout, value.shape, value.dtype, ONES)
        if mask_of(made) and value.isnan().any():
            return torch.zeros_like(value)
        return made

    return mapped(blank, expected)


def blanked(value: Any) -> Any:
    """The same structure to load into: tensors of zeros, and ``None`` for objects."""

    def blank(_: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        if value.is_quantized:
            return value.clone().copy_(torch.zeros(value.shape))
        zeros = torch.zeros(value.shape, dtype=value.dtype)
        return zeros.as_subclass(Tagged) if isinstance(value, Tagged) else zeros

    return mapped(blank, value)


def differences(
    expected: Any,
    actual: Any,
    at: str = "",
    *,
    is_strict: bool = False,
    in_order: bool = False,
    equal: set[tuple[int, int]] | None = None,
) -> list[str]:
    """Where two nested values differ; tensors by dtype, shape and bits.

    Args:
        expected: One.
        actual: The other.
        at: Where they are.
        is_strict: Whether mappings and lists are to be of the same classes.
        in_order: Whether keys of mappings are to be in the same order.
        equal: Ids of mappings that were found equal: hundreds of values may share an attribute.
    """
    known = set() if equal is None else equal

    def within(*pair: Any) -> list[str]:
        return differences(*pair, is_strict=is_strict, in_order=in_order, equal=known)

    is_tensor = isinstance(expected, torch.Tensor)
    if is_strict and not is_tensor and type(expected) is not type(actual):
        return [f"{at}: {type(actual)} instead of {type(expected)}"]
    if is_tensor:
        if not isinstance(actual, torch.Tensor):
            return [f"{at}: {type(actual).__name__} instead of a tensor"]
        if expected.dtype != actual.dtype or expected.shape != actual.shape:
            return [
                f"{at}: {actual.dtype} {list(actual.shape)} instead of "
                f"{expected.dtype} {list(expected.shape)}"
            ]
        if defined_bits(expected) != defined_bits(actual):
            return [f"{at}: other bits"]
        if isinstance(expected, torch.nn.Parameter):
            return within(vars(expected), vars(actual), f"attributes of {at}")
        return []
    if isinstance(expected, dict | UserDict):
        if (id(expected), id(actual)) in known:
            return []
        is_dict = isinstance(actual, dict | UserDict)
        if not is_dict or expected.keys() != actual.keys():
            return [f"{at}: {actual!r} instead of keys {list(expected)}"]
        if in_order and list(expected) != list(actual):
            return [f"{at}: keys {list(actual)} instead of {list(expected)}"]
        if getattr(expected, "shared", None) != getattr(actual, "shared", None):
            return [f"{at}: other attributes"]
        found = [d for k in expected for d in within(expected[k], actual[k], f"{at}[{k!r}]")]
        if not found:
            known.add((id(expected), id(actual)))
        return found
    if isinstance(expected, list | tuple | deque):
        # Stock stages a torch.Size as a tuple.
        kind = next(kind for kind in (list, tuple, deque) if isinstance(expected, kind))
        if not isinstance(actual, kind) or len(expected) != len(actual):
            return [f"{at}: {actual!r} instead of {len(expected)} elements"]
        if isinstance(expected, tuple) and not _sharing(expected) <= _sharing(actual):
            return [f"{at}: tensors that share no memory any more"]
        pairs = enumerate(zip(expected, actual, strict=True))
        return [d for i, (a, b) in pairs for d in within(a, b, f"{at}[{i}]")]
    is_same = type(expected) is type(actual) and bool(np.all(expected == actual))
    return [] if is_same else [f"{at}: {actual!r} instead of {expected!r}"]


def _sharing(values: tuple[Any, ...]) -> set[tuple[int, int]]:
    """The numbers of the tensors in tuples that have a common element."""
    elements: list[set[int]] = []
    ahead = [*values]
    while ahead:
        value = ahead.pop(0)
        if isinstance(value, tuple):
            ahead += value
        elif type(value) is torch.Tensor and value.layout == torch.strided:
            elements.append(set() if value.is_quantized else _addresses(value))
    pairs = itertools.combinations(range(len(elements)), 2)
    return {(i, j) for i, j in pairs if elements[i] & elements[j]}


def _addresses(tensor: torch.Tensor) -> set[int]:
    addresses = torch.tensor([tensor.data_ptr()])
    for length, stride in zip(tensor.size(), tensor.stride(), strict=True):
        steps = torch.arange(length) * stride * tensor.itemsize
        addresses = (addresses[:, None] + steps).reshape(-1)
    return set(addresses.tolist())


def same(a: Any, b: Any, *, any_order: bool = False) -> bool:
    """Whether two nested values are of the same types and values; tensors bit for bit."""
    return not differences(a, b, is_strict=True, in_order=not any_order)
