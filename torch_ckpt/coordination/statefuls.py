"""Replaces ``Stateful`` objects at any depth by their state dicts for a save, and restores them.

DCP's own functions replace them only at the top level of the state dict, and pickle objects below.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from copy import copy as shallow_copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.stateful import Stateful

from torch_ckpt.coordination.current_call import setting
from torch_ckpt.coordination.optimizer_states import create_state, lacks_state
from torch_ckpt.errors import MismatchError, UnsupportedError, naming, naming_cycle, text_of

__all__ = [
    "StateDicts",
    "StateOfRank",
    "is_loading",
    "is_stateful",
    "refuse_statefuls",
    "restore_pickled",
    "state_dicts_of",
]

_LEAVES = frozenset(
    {bool, bytes, complex, float, int, str, type(None), torch.dtype, torch.Tensor}
    | {torch.nn.Parameter}
)

_loading: ContextVar[bool] = ContextVar("torch_ckpt_loading", default=False)


class StateOfRank(dict[str, Any]):
    """A state dict of values that differ between ranks, each stored unchanged by its name."""


def is_stateful(value: Any) -> bool:
    """Returns whether a value is a ``Stateful``, without the 25 us of ``isinstance`` for others.

    Classes do not count, although they have the methods of their objects.
    """
    try:
        return (
            hasattr(value, "state_dict")
            and isinstance(value, Stateful)
            and not isinstance(value, type)
        )
    except Exception:  # A property of the object raised.
        return False


def is_loading() -> bool:
    """Returns whether the caller runs within a load, of this package or of DCP."""
    if _loading.get():
        return True
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "load" and frame.f_globals is vars(state_dict_loader):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def state_dicts_of(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict in which ``Stateful`` objects are replaced by their state dicts.

    Containers with such an object are copied. Objects in tuples are replaced as well, and stored
    with the tuple.
    """
    return StateDicts(state_dict).state


def refuse_statefuls(state_dict: Mapping[str, Any]) -> None:
    """Raises UnsupportedError if a flat state dict has a ``Stateful``, which DCP would pickle."""
    finder = _Finder()
    for fqn, value in state_dict.items():
        if finder.holds(value):
            path, found = finder.first(fqn, value)
            raise UnsupportedError(
                f"cannot save {path!r}: it is a Stateful ({type(found).__qualname__}) below the "
                "top level of the state dict. torch.distributed.checkpoint.save would pickle it on "
                "one rank, and a load would not restore it. Pass its state_dict(), move it to the "
                "top level, call torch_ckpt.save and torch_ckpt.load, or use installed()"
            )


def _is_object(value: Any) -> bool:
    """Returns whether a value below the top level is a ``Stateful`` that DCP would pickle."""
    return is_stateful(value) and not isinstance(value, Mapping | list | torch.Tensor)


def restore_pickled(live: Any, loaded: Any) -> bool:
    """Restores an object from one pickled by DCP, or by an older version of this package.

    Returns ``False``, and does nothing, unless both are ``Stateful``.
    """
    if not is_stateful(live) or not is_stateful(loaded):
        return False
    live.load_state_dict(loaded.state_dict())
    return True


@dataclass
class _Replaced:
    """A value of the program that is replaced: a ``Stateful``, or a container with one inside.

    For a container, ``inner`` maps keys to replaced values. For a ``Stateful``, it maps ``None`` to
    the result of ``state_dict()``, if values inside that are replaced.
    """

    live: Any
    fqn: str
    inner: dict[Any, _Replaced] = field(default_factory=dict)
    is_stateful: bool = False
    copy: Any = None  # The copy of a container without objects, which a load may replace.


class StateDicts:
    """A state dict whose ``Stateful`` objects are replaced by their state dicts, at any depth.

    Args:
        state_dict: The state dict of the program, unchanged until :meth:`restore`.
        for_load: Whether the objects will be loaded. Objects in the same container are then called
            in alphabetical order of their keys, as in DCP, so that all ranks use the same order.
        copies_all: Whether all dicts and lists are copied, also those without an object, and those
            of the objects. Loaded values then appear in them only by :meth:`restore`.

    Attributes:
        state: The state dict to save, or to load into.

    Raises:
        ValueError: A tuple contains a ``RankState``, or the state dict of an object contains it.
            Or a dict or list contains itself: its copy would remain in staging memory.
        Exception: A ``state_dict()`` raised. The message names its FQN.
    """

    def __init__(
        self, state_dict: dict[str, Any], *, for_load: bool = False, copies_all: bool = False
    ) -> None:
        self._finder = _Finder(refuses_cycles=True)
        self._for_load, self._copies_all = for_load, copies_all
        self._action = "load" if for_load else "save"
        self.state: dict[str, Any]
        self._objects: list[tuple[Any, Any, str]] = []  # Container, key and FQN below the top.
        self._within: list[tuple[Any, str]] = []  # Objects whose state dicts are being replaced.
        # Optimizers without states, their state dicts and FQNs.
        self._stateless: list[tuple[torch.optim.Optimizer, dict[str, Any], str]] = []
        with setting(_loading, for_load), naming_cycle(self._action, state_dict):
            self.state, self._root = self._replaced_in(state_dict, None, in_tuple=False)

    def use_stored(self, metadata: Metadata) -> None:
        """Requests what the checkpoint has of objects.

        These are whole objects if DCP, or an older version, has pickled them, and the states of
        optimizers that have none yet.
        """
        for optimizer, state, fqn in self._stateless:
            create_state(optimizer, state, fqn, metadata)
        for container, key, fqn in self._objects:
            stored = metadata.state_dict_metadata.get(fqn)
            if isinstance(stored, BytesStorageMetadata) and isinstance(container[key], Mapping):
                container[key] = None

    def restore(self) -> None:
        """Sets the loaded states of all objects, and stores other values in the state dict.

        Raises:
            Exception: A ``load_state_dict()`` raised. The message names its FQN.
            MismatchError: A stored tuple has another length.
            ValueError: A container cannot be changed.
        """
        _restore(self._root, self.state)

    def _replace(self, value: Any, fqn: str, *, in_tuple: bool) -> tuple[Any, _Replaced]:
        """Returns the state dict of an object, and the record for its restore."""
        action = self._action
        for outer, outer_fqn in self._within:
            if outer is value:
                raise ValueError(
                    f"cannot {action} {fqn!r}: it is the {type(value).__qualname__} of "
                    f"{outer_fqn!r}, whose state_dict() must not contain the object itself"
                )
        with naming(action, fqn):
            state = value.state_dict()
        if in_tuple:
            _refuse_rank_state(state, fqn)
        node = _Replaced(value, fqn, is_stateful=True)
        is_container = _entries_of(state) is not None and not isinstance(state, StateOfRank)
        with naming_cycle(action, {fqn: state}):
            if is_container and self._finder.holds(state):
                self._within.append((value, fqn))
                state, node.inner[None] = self._replaced_in(state, fqn, in_tuple=in_tuple)
                self._within.pop()
            elif self._copies_all and is_container and not isinstance(state, tuple):
                # It may be the object's own.
                state, _ = self._copied(state, fqn, keeps_types=True)
        if self._for_load and lacks_state(value):
            self._stateless.append((value, state, fqn))
        return state, node

    def _replaced_in(self, live: Any, fqn: str | None, *, in_tuple: bool) -> tuple[Any, _Replaced]:
        """Returns a copy of a container, and the record for its restore. The top has no FQN."""
        node = _Replaced(live, fqn or "")
        is_mapping = isinstance(live, Mapping)
        copy: Any = dict(live.items()) if is_mapping else list(live)
        if is_mapping and self._for_load:
            copy = {key: copy[key] for key in sorted(copy, key=str)}
        keys: Iterable[Any] = list(copy) if is_mapping else range(len(copy))
        in_tuple = in_tuple or isinstance(live, tuple)
        for key in keys:
            value, inner = copy[key], str(key) if fqn is None else f"{fqn}.{key}"
            if type(value) in _LEAVES:
                continue
            if _is_object(value) or (fqn is None and is_stateful(value)):
                copy[key], node.inner[key] = self._replace(value, inner, in_tuple=in_tuple)
                if fqn is not None and not in_tuple:
                    self._objects.append((copy, key, inner))
            elif isinstance(value, StateOfRank):
                if in_tuple:
                    _refuse_rank_state(value, inner)
            elif self._finder.holds(value):
                copy[key], node.inner[key] = self._replaced_in(value, inner, in_tuple=in_tuple)
            elif self._copies_all and isinstance(value, Mapping | list) and not in_tuple:
                copy[key], node.inner[key] = self._copied(value, inner)
        if isinstance(live, tuple):
            copy = live._make(copy) if hasattr(live, "_make") else tuple(copy)
        return copy, node

    def _copied(self, live: Any, fqn: str, *, keeps_types: bool = False) -> tuple[Any, _Replaced]:
        """Returns a copy of a dict or list without objects, and the record for its restore.

        With ``keeps_types``, types and attributes remain: ``load_state_dict()`` reads an attribute
        of torch's state dict.
        """
        node = _Replaced(live, fqn)
        copy: Any
        if keeps_types and isinstance(live, dict | list):
            copy = shallow_copy(live)
        else:
            copy = dict(live.items()) if isinstance(live, Mapping) else list(live)
        for key in list(copy) if isinstance(copy, dict) else range(len(copy)):
            if isinstance(copy[key], Mapping | list):
                copy[key], node.inner[key] = self._copied(
                    copy[key], f"{fqn}.{key}", keeps_types=keeps_types
                )
        node.copy = copy
        return copy, node


class _Finder:
    """Finds the containers with a ``Stateful`` inside. Inspects each container once.

    With ``refuses_cycles``, raises RecursionError for a dict or list that contains itself, except
    in a tuple, which counts as one object.
    """

    def __init__(self, *, refuses_cycles: bool = False) -> None:
        self._known: dict[int, tuple[Any, bool | None]] = {}  # `None` while it is inspected.
        self._depth_in_tuple = 0 if refuses_cycles else 1

    def holds(self, value: Any) -> bool:
        """Returns whether a value is or contains a ``Stateful`` or the state of a ``RankState``."""
        if type(value) in _LEAVES:
            return False
        if isinstance(value, StateOfRank) or _is_object(value):
            return True
        entries = _entries_of(value)
        if entries is None or _LEAVES.issuperset(map(type, entries)):
            return False
        if id(value) not in self._known:
            self._known[id(value)] = value, None
            self._depth_in_tuple += isinstance(value, tuple)
            self._known[id(value)] = value, any(map(self.holds, entries))
            self._depth_in_tuple -= isinstance(value, tuple)
        found = self._known[id(value)][1]
        if found is None and not self._depth_in_tuple:
            raise RecursionError("a container contains itself")
        return bool(found)

    def first(self, fqn: str, value: Any) -> tuple[str, Any]:
        """Returns FQN and object of the first ``Stateful`` in a value that contains one."""
        while not isinstance(value, StateOfRank) and not _is_object(value):
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            key, value = next((key, entry) for key, entry in pairs if self.holds(entry))
            fqn = f"{fqn}.{key}"
        return fqn, value


def _entries_of(value: Any) -> Any:
    """Returns the values in a container; ``None`` for another value."""
    if isinstance(value, list | tuple):
        return value
    return value.values() if isinstance(value, Mapping) else None


def _refuse_rank_state(state: object, fqn: str) -> None:
    if isinstance(state, StateOfRank):
        raise ValueError(
            f"{fqn!r} is a RankState in a tuple, which is stored as one object for all ranks: use "
            "a list or a dict"
        )


def _restore(node: _Replaced, loaded: Any) -> Any:
    """Sets the states of the objects in a value. Returns the value for the program's state dict."""
    if node.is_stateful:
        if None in node.inner:
            loaded = _restore(node.inner[None], loaded)
        with naming("load", node.fqn):
            if not restore_pickled(node.live, loaded):
                node.live.load_state_dict(loaded)
        return node.live
    if node.copy is not None and loaded is not node.copy:
        return loaded
    _check_matches(node, loaded)
    live: Any = node.live
    values = dict(loaded.items() if isinstance(live, Mapping) else enumerate(loaded))
    for key, inner in node.inner.items():
        values[key] = _restore(inner, values[key])
    if isinstance(live, tuple):
        entries = values.values()
        return live._make(entries) if hasattr(live, "_make") else tuple(entries)
    present = live if isinstance(live, Mapping) else range(len(live))
    changed = {
        key: value for key, value in values.items() if key not in present or live[key] is not value
    }
    try:
        for key, value in changed.items():
            live[key] = value
    except TypeError as error:
        raise ValueError(
            f"cannot load {node.fqn!r}: its container cannot be changed ({text_of(error)}); pass a "
            "dict or list"
        ) from error
    return live


def _check_matches(node: _Replaced, loaded: Any) -> None:
    """Raises MismatchError if a loaded value is not a container like the program's."""
    if isinstance(node.live, Mapping):
        matches = isinstance(loaded, Mapping) and node.inner.keys() <= loaded.keys()
    else:
        matches = isinstance(loaded, list | tuple) and len(loaded) == len(node.live)
    if not matches:
        count = f" of {len(loaded)} values" if isinstance(loaded, Mapping | list | tuple) else ""
        raise MismatchError(
            f"cannot load {node.fqn!r}: the checkpoint has a {type(loaded).__qualname__}{count}, "
            f"expected a {type(node.live).__qualname__} of {len(node.live)} values"
        )
