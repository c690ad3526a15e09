"""RankState: state that each rank has of its own, and what becomes of it on other ranks.

DCP takes objects of the same name on several ranks for replicas and stores one of them. So what a
rank has of its own (a random state, a position in the data) needs a name of its own, and a loader
has to know which of these names a checkpoint holds. Here the names say by how many ranks they were
saved, and the load planner, which sees all names of the checkpoint, looks them up before it plans.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, Protocol, overload

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt.errors import MismatchError

__all__ = ["OnResize", "RankState", "check_rank_states", "find_rank_states"]

_KEY = re.compile(r"rank_(\d{5,})_of_(\d{5,})")

Merge = Callable[[list[Any], int, int], Any]
"""Makes a rank's state of those of all saved ranks, its own rank, and how many ranks there are."""

OnResize = Literal["error", "drop", "by_rank"] | Merge


class _HasState(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> object: ...


class RankState:
    """State of which each rank has its own, at the top of a state dict for DCP.

    Each rank's state is saved as one object, tensors in it included, named
    ``<key>.rank_00003_of_00008``. Loaded on as many ranks as saved it, each gets its own back, as
    ``get_state`` gave it. On another number of ranks ``on_resize`` says what happens:

    - ``"error"``: a :class:`MismatchError` on every rank, before anything is loaded;
    - ``"drop"``: nothing is read, and ``set_state`` is not called;
    - ``"by_rank"``: a rank whose number saved takes that state; the others as with ``"drop"``;
    - ``merge(states, rank, world_size)``: its result is set. Each rank reads the states of all
      ranks that saved, in their order, so these should be small.

    It is saved by any planner derived from DCP's default ones, and loaded by such a planner on as
    many ranks. On another number only :class:`FastLoadPlanner` finds what there is, which
    :func:`torch_ckpt.load` uses by default; DCP's own planner raises ``Missing key in checkpoint``
    with the name of this rank's state. Planners must flatten state dicts, as they do by default;
    DCP's own do not say so where they do not. DCP asks only what is at the top of a state dict for
    its state: a ``Stateful`` of yours that holds a ``RankState`` passes its ``state_dict()`` on,
    and gives it what is loaded there. What is loaded is set in the order of the keys at the top.

    Args:
        get_state: Returns what to save, or an object with ``state_dict`` and ``load_state_dict``.
        set_state: Takes over what was loaded. Not to be given with such an object.
        on_resize: What happens on another number of ranks.
        group: The ranks that are counted; all if ``None``. Where ranks of several groups have the
            same number in groups of the same size, what they save is one state, and one of them
            saves it. Without ``torch.distributed`` there is one rank.

    Raises:
        ValueError: ``on_resize`` is none of these, or this rank is not in ``group``.
        TypeError: ``get_state`` and ``set_state`` do not go together.

    Example::

        def deal_again(states: list[list[int]], rank: int, world_size: int) -> list[int]:
            left = sorted(sample for samples in states for sample in samples)
            return left[rank::world_size]

        state = {
            "rng": RankState(torch.get_rng_state, torch.set_rng_state, on_resize="drop"),
            "data": RankState(loader, on_resize=deal_again),  # Its state: the samples left.
        }
        dcp.save(state, checkpoint_id=path)
        dcp.load(state, checkpoint_id=path)  # Or later, on another number of ranks.
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
            raise TypeError(f"{get_state!r} is no function that returns a state")
        self._get_state: Callable[[], Any] = get_state
        self._set_state = set_state
        self.on_resize = on_resize
        self.group = group
        self._given: tuple[Any] | None = None
        self._place()  # Raises where this rank has none.

    def state_dict(self) -> dict[str, Any]:
        """This rank's state under its name; of a planner, what of the checkpoint it is to load."""
        rank, world_size = self._place()
        resize = "merge" if callable(self.on_resize) else self.on_resize
        # In a tuple, which no planner takes apart, or tensors in it would be saved by themselves.
        self._given = (self._get_state(),)
        return _Entries({_key(rank, world_size): self._given}, rank, world_size, resize)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets what was loaded, or what becomes of it.

        Args:
            state_dict: What ``state_dict`` returned, loaded; or all that was saved of this.

        Raises:
            MismatchError: It was saved by another number of ranks, and ``on_resize="error"``, or by
                ranks of which some are missing.
        """
        rank, world_size = self._place()
        entries = {key: entry for key, entry in state_dict.items() if entry is not None}
        own = entries.get(_key(rank, world_size))
        if own is None:
            if not entries:
                return  # Dropped; or not in the checkpoint, and the planner was content with that.
            resize = "merge" if callable(self.on_resize) else self.on_resize
            keys = _wanted("a state of each rank", entries, rank, world_size, resize)
            if callable(self.on_resize):
                states = [entries[key][0] for key in keys]
                own = (self.on_resize(states, rank, world_size),)
            elif keys:
                own = entries[keys[0]]
        # A planner that found nothing, and was content with that, has left what was given.
        if own is not None and not (self._given and own[0] is self._given[0]):
            self._set_state(own[0])
        self._given = None

    def _place(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        if not (dist.is_available() and dist.is_initialized()):
            return 0, 1
        rank = dist.get_rank(self.group)
        if rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the group of its RankState")
        return rank, dist.get_world_size(self.group)

    def __create_write_items__(self, fqn: str, _: object) -> Any:
        """For DCP to say so where it would save this as an object like any other."""
        raise ValueError(
            f"{fqn!r} is a RankState below the top of the state dict, where DCP asks nothing for "
            "its state: put it at the top, or pass on its state_dict() from a Stateful there"
        )


class _Entries(dict[str, Any]):
    """What a rank saves, or is to load: names below that of the `RankState`, and 1-tuples."""

    def __init__(self, entries: Mapping[str, Any], rank: int, world_size: int, resize: str) -> None:
        super().__init__(entries)
        self.rank = rank
        self.world_size = world_size
        self.resize = resize

    def find(self, fqn: str, stored: Collection[str]) -> None:
        """Asks for that of the checkpoint that this rank needs."""
        own = _key(self.rank, self.world_size)
        keys = [own]
        if f"{fqn}.{own}" not in stored:
            start = f"{fqn}."
            there = [name[len(start) :] for name in stored if name.startswith(start)]
            # Without any, the planner says that its key is missing, or is content.
            if any(_KEY.fullmatch(key) for key in there):
                keys = _wanted(repr(fqn), there, self.rank, self.world_size, self.resize)
        self.clear()
        self.update(dict.fromkeys(keys))


def _key(rank: int, world_size: int) -> str:
    return f"rank_{rank:05}_of_{world_size:05}"


def _wanted(what: str, keys: Collection[str], rank: int, world_size: int, resize: str) -> list[str]:
    """Which of the entries that there are a rank needs, where its own is not among them.

    Raises:
        MismatchError: They are not to be used on another number of ranks, or not all there.
    """
    found = [_KEY.fullmatch(key) for key in keys]
    ranks_of: dict[int, set[int]] = {}
    for match in found:
        if match is not None:
            ranks_of.setdefault(int(match[2]), set()).add(int(match[1]))
    if len(ranks_of) != 1:
        sizes = " and ".join(str(size) for size in sorted(ranks_of)) or "no"
        raise MismatchError(f"{what} was saved by {sizes} ranks: there is no telling whose it is")
    [(saved, ranks)] = ranks_of.items()
    if saved == world_size:
        raise MismatchError(f"{what} was saved by {saved} ranks, but not by rank {rank} of these")
    if resize == "error":
        raise MismatchError(
            f"{what} was saved by {saved} ranks and is to be loaded by {world_size}: "
            "RankState(on_resize=...) says what is to happen then"
        )
    if resize == "by_rank":
        return [_key(rank, saved)] if rank in ranks else []
    if resize == "drop":
        return []
    if len(ranks) != saved:
        missing = sorted(set(range(saved)) - ranks)
        raise MismatchError(
            f"{what} was saved by {saved} ranks, of which {len(missing)} are missing and cannot "
            f"be merged: ranks {missing[:8]}"
        )
    return [_key(each, saved) for each in range(saved)]


def find_rank_states(
    state_dict: dict[str, Any], metadata: Metadata | None, *, is_flattened: bool
) -> None:
    """Has each `RankState` of a state dict that is to be loaded ask for what there is.

    Args:
        state_dict: What DCP gives the planner; changed in place.
        metadata: Of the checkpoint.
        is_flattened: Whether the planner flattens state dicts.

    Raises:
        MismatchError: What is there is no use on as many ranks as there are.
        ValueError: The planner does not flatten state dicts.

    Example::

        find_rank_states(state_dict, metadata, is_flattened=self.flatten_state_dict)
    """
    check_rank_states(state_dict, is_flattened=is_flattened)
    if metadata is not None:
        for fqn, entries in _entries_in(state_dict, ""):
            entries.find(fqn, metadata.state_dict_metadata)


def check_rank_states(state_dict: dict[str, Any], *, is_flattened: bool) -> None:
    """Refuses a `RankState` where a planner would save it as one object, the same on all ranks.

    Args:
        state_dict: What DCP gives the planner.
        is_flattened: Whether the planner flattens state dicts.

    Raises:
        ValueError: It does not, and there is one.

    Example::

        check_rank_states(state_dict, is_flattened=self.flatten_state_dict)
    """
    if not is_flattened:
        for fqn, _ in _entries_in(state_dict, ""):
            raise ValueError(
                f"{fqn!r} is a RankState: it needs a planner with flatten_state_dict=True, "
                "or ranks would be taken for replicas"
            )


def _entries_in(container: Any, start: str) -> Iterator[tuple[str, _Entries]]:
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in pairs:
        if isinstance(value, _Entries):
            yield f"{start}{key}", value
        elif isinstance(value, dict | list):
            yield from _entries_in(value, f"{start}{key}.")
