"""Values of a state that objects of the program have, as modules and optimizers do."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.states import State

from torch_ckpt import RankState

FAILURE = "the object takes no state"
OLDER_DTYPES = torch.storage._dtype_to_storage_type_map()


@dataclass(frozen=True)
class Owners:
    """Which values of a state have an object in their place.

    Attributes:
        share: The share of mappings and lists, in tuples too.
        depth: How far below the top.
        of_ranks: Whether a ``RankState`` is in the place of some tensors and objects.
    """

    share: float = 0.0
    depth: int = 99
    of_ranks: bool = False


class Owner:
    """An object whose state dict is a mapping or list of the state.

    Attributes:
        state: The present one.
        path: The path of the state.
        is_loaded: Whether a load has set the state.
        fails: Whether a load is to fail.
    """

    is_loaded = fails = False

    def __init__(self, state: Any, path: tuple[Any, ...]) -> None:
        self.state, self.path = state, path

    def state_dict(self) -> Any:
        return type(self.state)(self.state)  # A load into it alone restores nothing.

    def load_state_dict(self, state: Any) -> None:
        if self.fails:
            raise LookupError(FAILURE)
        self.state, self.is_loaded = state, True


class OfRank(RankState):
    """As :class:`Owner`, of a value that each rank saves beside its number."""

    is_loaded = fails = False

    def __init__(self, state: Any, path: tuple[Any, ...]) -> None:
        super().__init__(self._get, self._set, on_resize=self._merge)
        self.state, self.path = state, path

    def _get(self) -> Any:
        return _rank(), self.state

    def _set(self, state: Any) -> None:
        self._fail()
        rank, self.state = state
        assert rank == _rank(), f"{self.path} has the state of rank {rank}"
        self.is_loaded = True

    def _merge(self, states: list[Any], rank: int, _: int) -> Any:
        self._fail()
        assert [number for number, _ in states] == list(range(len(states)))
        return rank, states[rank % len(states)][1]

    def _fail(self) -> None:
        if self.fails:
            raise LookupError(FAILURE)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def owned(state: State, like: State, seed: object, owners: Owners) -> State:
    """The state with objects in place of some values, at any depth.

    Whether a value has one depends on its path and on ``like`` alone, so that all ranks agree.

    Args:
        state: The state to save or to load into, with ``None`` for an object to load.
        like: The whole values. A value that it lacks stays as it is.
        seed: Of the choice.
        owners: What has an object.
    """

    def within(value: Any, like: Any, path: tuple[Any, ...], in_tuple: bool = False) -> Any:
        draws = random.Random(f"owner {seed} {path}").random()
        is_chosen = 0 < len(path) <= owners.depth and draws < owners.share
        made: Any = None
        if isinstance(like, dict | UserDict) and not hasattr(like, "shared"):
            source = dict.fromkeys(like) if value is None else value
            made = {
                k: within(each, like[k], (*path, k), in_tuple) if k in like else each
                for k, each in source.items()
            }
        elif type(like) in (list, tuple):
            source = [None] * len(like) if value is None else value
            in_tuple = in_tuple or type(like) is tuple
            pairs = enumerate(zip(source, like, strict=True))
            made = [within(one, other, (*path, at), in_tuple) for at, (one, other) in pairs]
        elif owners.of_ranks and path and not in_tuple and draws < owners.share / 2:
            # Torch cannot unpickle a tensor of a newer dtype that requires a gradient.
            is_newer = isinstance(like, torch.Tensor) and like.dtype not in OLDER_DTYPES
            return value if is_newer else OfRank(like, path)
        if made is None or (in_tuple and not is_chosen and not any(objects_in(made))):
            return value
        made = type(like)(made)
        return Owner(made, path) if is_chosen and type(like) is not tuple else made

    return within(state, like, ())  # type: ignore[no-any-return]


def objects_in(state: Any) -> Iterator[Owner | OfRank]:
    """The objects in a state."""
    if isinstance(state, Owner | OfRank):
        yield state
    inner = state.state if isinstance(state, Owner) else state
    if isinstance(inner, dict | UserDict | list | tuple):
        for each in inner.values() if isinstance(inner, dict | UserDict) else inner:
            yield from objects_in(each)


def unowned(state: Any) -> Any:
    """The state with the present values in place of the objects."""
    if isinstance(state, Owner | OfRank):
        return unowned(state.state)
    if type(state) in (list, tuple):
        return type(state)(unowned(each) for each in state)
    if isinstance(state, dict | UserDict) and not hasattr(state, "shared"):
        return type(state)({key: unowned(each) for key, each in state.items()})
    return state
