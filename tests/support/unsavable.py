"""Values that cannot be saved, of every kind: a save that has one names it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from torch_ckpt import RankState
from torch_ckpt.planning.local_shards import LocalShards


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(4)
    return tensor


class Setter:
    """Cannot load what it has saved."""

    def state_dict(self) -> Any:
        return {"x": 1}

    def load_state_dict(self, _: Any) -> None:
        raise ValueError("no")


class Raises:
    """Raises wherever Python copies or pickles it."""

    def __reduce__(self) -> Any:
        raise ValueError("no")


class Getter:
    def state_dict(self) -> Any:
        raise ValueError("no")

    def load_state_dict(self, _: Any) -> None: ...


def getter() -> Any:
    raise ValueError("no")


def local_object() -> Any:
    class Local:
        pass

    return Local()


def endless(kind: type) -> Any:
    """A container that contains itself."""
    value = kind({"w": torch.ones(2)})
    if isinstance(value, dict):
        value["again"] = [value]
    else:
        value.append(value)
    return value


class Endless(Setter):
    def state_dict(self) -> Any:
        return endless(dict)


UNSAVABLE: dict[str, Callable[[], Any]] = {
    "a storage too short": lambda: without_memory(torch.ones(64)),
    "a storage too short with a stride": lambda: without_memory(torch.ones(8, 8).t()),
    "a storage too short in a tuple": lambda: (1, without_memory(torch.ones(64))),
    "a storage too short of a shard": lambda: LocalShards(
        (64,), [((0,), without_memory(torch.ones(64)))]
    ),
    "a lambda": lambda: lambda: 1,
    "a lambda in a tuple": lambda: (1, lambda: 1),
    "a lambda in a list": lambda: [1, lambda: 1],
    "a lock": threading.Lock,
    "a lock in a tuple": lambda: (threading.Lock(),),
    "a generator": lambda: (number for number in range(3)),
    "an object of a local class": local_object,
    "an object that raises": Raises,
    "a getter that raises": Getter,
    "a getter of a rank that raises": lambda: RankState(getter, print),
    "a state of a rank with a lambda": lambda: RankState(lambda: {"f": lambda: 1}, print),
    "a state of a rank with a lock": lambda: RankState(lambda: {"f": threading.Lock()}, print),
    "quint4x2": lambda: torch.quantize_per_channel(
        torch.ones(2, 4), torch.ones(2), torch.zeros(2), 0, torch.quint4x2
    ),
    "int4": lambda: torch.empty(2, dtype=torch.int4),
    "bits16": lambda: torch.empty(2, dtype=torch.bits16),
    "a float8 that requires a gradient, in a tuple": lambda: (
        torch.ones(2).to(torch.float8_e5m2).requires_grad_(),
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.ones(2, device="meta"),
    "a list that contains itself": lambda: endless(list),
    "a dict that contains itself": lambda: endless(dict),
    "a state that contains itself": Endless,
    "a state of a rank in a tuple": lambda: (RankState(lambda: 1, print),),
}


MAY_BE_SAVED = {"quint4x2", "bits16"}
"""Torch pickles them. A load names a ``quint4x2``, because torch cannot copy it to a target."""

NOT_NAMED_BY_DCP = {
    "nested",
    "bits16",
    "a list that contains itself",
    "a dict that contains itself",
}
"""DCP's planner raises before our writer is called."""

WITH_STATE = {"a getter that raises", "a state that contains itself"}
"""Objects that only refuse the call of their ``state_dict()``."""

PICKLED_BY_TORCH = {"a float8 that requires a gradient, in a tuple"}
"""Torch itself pickles these, and cannot load them."""
