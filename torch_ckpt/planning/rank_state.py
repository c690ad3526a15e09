"""RankState: state that differs between ranks, and its loading on another number of ranks.

DCP treats objects with the same FQN on several ranks as replicas, and stores one of them. So state
that differs between ranks, such as a random state or a position in the data, needs an FQN per rank.
These FQNs contain the rank and the number of ranks that saved. Before it plans, the load planner
finds in the checkpoint's metadata the FQNs that this rank must load.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, Protocol, overload

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt.coordination.statefuls import StateOfRank, is_loading
from torch_ckpt.errors import MismatchError, naming

__all__ = ["OnResize", "RankState", "check_rank_states", "find_rank_states"]

_KEY = re.compile(r"rank_(\d{5,})_of_(\d{5,})")

Merge = Callable[[list[Any], int, int], Any]
"""Computes a rank's state from the states of all saved ranks, its rank, and the world size."""

OnResize = Literal["error", "drop", "by_rank"] | Merge


class _HasState(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> object: ...


class RankState:
    """A value of a state dict that differs between ranks, such as a random state.

    Each rank saves its state, including any tensors, as one object with the FQN
    ``<key>.rank_00003_of_00008``. If the number of ranks is the same, each rank loads its own
    state. If it differs, ``on_resize`` decides:

    - ``"error"``: every rank raises a :class:`MismatchError` before it loads any value.
    - ``"drop"``: nothing is loaded, and ``set_state`` is not called.
    - ``"by_rank"``: each rank loads the state with its own rank number. A rank without such a state
      loads nothing, as with ``"drop"``.
    - A function ``merge(states, rank, world_size)`` that returns the state of this rank. Each rank
      loads the states of all saved ranks, in rank order, so the states should be small.

    Requirements:

    - If you call DCP's own functions, put the ``RankState`` at the top level of the state dict,
      because they call ``state_dict()`` only there. :func:`torch_ckpt.save`,
      :func:`torch_ckpt.load`, :class:`Run` and :func:`installed` also find it in dicts and lists.
      A ``RankState`` in a tuple or another object is an error. A ``Stateful`` that contains a
      ``RankState`` must include the ``state_dict()`` of the ``RankState`` in its state dict, and
      pass the loaded value to the ``load_state_dict()`` of the ``RankState``.
    - Use planners that flatten state dicts, as all do by default. DCP's own planners report no
      error if they do not flatten.
    - To load on another number of ranks, use :class:`FastLoadPlanner`, as
      :func:`torch_ckpt.load` does by default. DCP's own planner raises ``Missing key in
      checkpoint``. All other saves and loads work with any planner derived from DCP's defaults.

    States are set in the alphabetical order of the keys at the top level, as in DCP.

    Args:
        get_state: Function that returns the state to save, or an object with ``state_dict`` and
            ``load_state_dict``.
        set_state: Function that receives the loaded state. Omit it if ``get_state`` is an object.
        on_resize: What a load on another number of ranks does: ``"error"``, ``"drop"``,
            ``"by_rank"`` or a function.
        group: Process group that defines the rank number and the number of ranks. Defaults to all
            ranks; one rank without ``torch.distributed``. If several groups have the same size,
            ranks with the same number share one state, and one of them saves it.

    Raises:
        ValueError: ``on_resize`` is not one of these values, or this rank is not in ``group``.
        TypeError: ``set_state`` is given and ``get_state`` is not callable; or it is not given, and
            ``get_state`` has no ``state_dict`` and ``load_state_dict``.

    Example::

        def redistribute(states: list[list[int]], rank: int, world_size: int) -> list[int]:
            samples = sorted(sample for state in states for sample in state)
            return samples[rank::world_size]

        state = {
            "rng": RankState(torch.get_rng_state, torch.set_rng_state, on_resize="drop"),
            "data": RankState(loader, on_resize=redistribute),  # Its state: remaining samples.
        }
        dcp.save(state, checkpoint_id=path)
        dcp.load(state, checkpoint_id=path)  # On another number of ranks: torch_ckpt.load.
    """

    @overload
    def __init__(
        self,
        get_state: _HasState,
        *,
        on_resize: OnResize = "error",
        group: dist.ProcessGroup | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        get_state: Callable[[], Any],
        set_state: Callable[[Any], object],
        *,
        on_resize: OnResize = "error",
        group: dist.ProcessGroup | None = None,
    ) -> None: ...
    def __init__(
        self,
        get_state: Any,
        set_state: Callable[[Any], object] | None = None,
        *,
        on_resize: OnResize = "error",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not callable(on_resize) and on_resize not in ("error", "drop", "by_rank"):
            raise ValueError(f"{on_resize=} is neither 'error', 'drop', 'by_rank' nor a function")
        if set_state is None:
            if not (hasattr(get_state, "state_dict") and hasattr(get_state, "load_state_dict")):
                raise TypeError(f"{get_state!r} has no state_dict and load_state_dict")
            get_state, set_state = get_state.state_dict, get_state.load_state_dict
        elif not callable(get_state):
            raise TypeError(f"{get_state!r} is not a function that returns a state")
        self._get_state: Callable[[], Any] = get_state
        self._set_state = set_state
        self.on_resize = on_resize
        self.group = group
        self._current: tuple[Any] | None = None
        self._rank_and_world_size()  # Raises if this rank is not in the group.

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state, by its key.

        In a load, does not call the getter, because getters, such as that of a data loader, may
        have side effects. The planner replaces the keys by the keys of the stored states to load.
        """
        rank, world_size = self._rank_and_world_size()
        resize = "merge" if callable(self.on_resize) else self.on_resize
        # No planner flattens a tuple, so tensors in the state are not saved separately.
        self._current = None if is_loading() else (self._get_state(),)
        return _Entries({_key(rank, world_size): self._current}, rank, world_size, resize)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets the loaded state of this rank, after applying ``on_resize`` if necessary.

        Args:
            state_dict: The loaded result of ``state_dict``, or the stored states of all ranks.

        Raises:
            MismatchError: Another number of ranks saved the states, and ``on_resize="error"``. Or
                the states of some ranks are missing.
        """
        fqn = state_dict.fqn if isinstance(state_dict, _Entries) else ""
        with naming("load", fqn) if fqn else contextlib.nullcontext():
            self._load(state_dict)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        rank, world_size = self._rank_and_world_size()
        entries = {key: entry for key, entry in state_dict.items() if entry is not None}
        own = entries.get(_key(rank, world_size))
        if own is None:
            if not entries:
                return  # Dropped, or missing in a partial load.
            resize = "merge" if callable(self.on_resize) else self.on_resize
            keys = _keys_to_load("a RankState", entries, rank, world_size, resize)
            if callable(self.on_resize):
                states = [entries[key][0] for key in keys]
                own = (self.on_resize(states, rank, world_size),)
            elif keys:
                own = entries[keys[0]]
        # A partial load leaves the current state unchanged if the checkpoint lacks it.
        if own is not None and not (self._current and own[0] is self._current[0]):
            self._set_state(own[0])
        self._current = None

    def _rank_and_world_size(self) -> tuple[int, int]:
        if not (dist.is_available() and dist.is_initialized()):
            return 0, 1
        rank = dist.get_rank(self.group)
        if rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the group of its RankState")
        return rank, dist.get_world_size(self.group)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a RankState in an object cannot be pickled, because its states on several ranks would "
            "be treated as replicas: put it into a dict or list of the state dict"
        )

    def __create_write_items__(self, fqn: str, _: object) -> Any:
        """Raises an error if DCP would save the ``RankState`` itself as an object."""
        raise ValueError(
            f"{fqn!r} is a RankState below the top level of the state dict, where DCP does not "
            "call its state_dict(): move it to the top level, or return its state_dict() from the "
            "state_dict() of a Stateful there"
        )


class _Entries(StateOfRank):
    """The entries of a ``RankState`` that a rank saves or loads: 1-tuples by key.

    ``fqn`` is the FQN of the ``RankState``; empty unless a planner of this package loads it.
    """

    def __init__(self, entries: Mapping[str, Any], rank: int, world_size: int, resize: str) -> None:
        super().__init__(entries)
        self.rank = rank
        self.world_size = world_size
        self.resize = resize
        self.fqn = ""

    def find(self, fqn: str, stored: Collection[str]) -> None:
        """Replaces the entries by those of all ``stored`` FQNs that this rank must load."""
        self.fqn = fqn
        own = _key(self.rank, self.world_size)
        keys = [own]
        if f"{fqn}.{own}" not in stored:
            prefix = f"{fqn}."
            found = [name[len(prefix) :] for name in stored if name.startswith(prefix)]
            # If none matches, the planner reports the missing key, unless the load is partial.
            if any(_KEY.fullmatch(key) for key in found):
                keys = _keys_to_load(repr(fqn), found, self.rank, self.world_size, self.resize)
        self.clear()
        self.update(dict.fromkeys(keys))


def _key(rank: int, world_size: int) -> str:
    return f"rank_{rank:05}_of_{world_size:05}"


def _keys_to_load(
    name: str, keys: Collection[str], rank: int, world_size: int, resize: str
) -> list[str]:
    """Returns the stored keys that a rank loads if its own key is not stored.

    Raises MismatchError if ``resize`` forbids a load on another number of ranks, or keys are
    missing.
    """
    ranks_of: dict[int, set[int]] = {}
    for match in map(_KEY.fullmatch, keys):
        if match is not None:
            ranks_of.setdefault(int(match[2]), set()).add(int(match[1]))
    if len(ranks_of) != 1:
        sizes = " and ".join(str(size) for size in sorted(ranks_of)) or "no"
        raise MismatchError(
            f"cannot load {name}: it was saved by {sizes} ranks, expected one number of ranks"
        )
    [(saved, ranks)] = ranks_of.items()
    if saved == world_size:
        raise MismatchError(
            f"cannot load {name}: it was saved by {saved} ranks, but the state of rank {rank} is "
            "missing"
        )
    if resize == "error":
        raise MismatchError(
            f"cannot load {name} on {world_size} ranks: it was saved by {saved} ranks; "
            "RankState(on_resize=...) selects what to do in this case"
        )
    if resize == "by_rank":
        return [_key(rank, saved)] if rank in ranks else []
    if resize == "drop":
        return []
    if len(ranks) != saved:
        missing = sorted(set(range(saved)) - ranks)
        raise MismatchError(
            f"cannot merge {name}: it was saved by {saved} ranks, and the states of "
            f"{len(missing)} are missing: ranks {missing[:8]}"
        )
    return [_key(each, saved) for each in range(saved)]


def find_rank_states(
    state_dict: dict[str, Any], metadata: Metadata | None, *, is_flattened: bool
) -> list[str]:
    """Selects the stored states that each ``RankState`` of a state dict loads on this rank.

    Changes the state dict that DCP passes to the planner, and returns the FQN of each
    ``RankState``. Raises MismatchError if the stored states cannot be loaded on this number of
    ranks, and ValueError if the state dict has a ``RankState`` and the planner does not flatten.
    """
    check_rank_states(state_dict, is_flattened=is_flattened)
    if metadata is None:
        return []
    found = list(_entries_in(state_dict, ""))
    for fqn, entries in found:
        entries.find(fqn, metadata.state_dict_metadata)
    return [fqn for fqn, _ in found]


def check_rank_states(state_dict: dict[str, Any], *, is_flattened: bool) -> None:
    """Raises ValueError for a ``RankState`` if the planner does not flatten state dicts.

    Such a planner would save it as one object, as if all ranks had the same state.
    """
    if not is_flattened:
        for fqn, _ in _entries_in(state_dict, ""):
            raise ValueError(
                f"{fqn!r} is a RankState: it needs a planner with flatten_state_dict=True, "
                "otherwise the states of the ranks would be treated as replicas"
            )


def _entries_in(container: Any, prefix: str) -> Iterator[tuple[str, _Entries]]:
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in pairs:
        if isinstance(value, _Entries):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict | list):
            yield from _entries_in(value, f"{prefix}{key}.")
