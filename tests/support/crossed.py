"""Crosses random states with every way to save and to load them; each case is made from its seed.

The expected values are those at the time of the call: all tensors change right after an
asynchronous call returns. Each case is read by stock's reader too, where it can be. A case that
fails is made smaller until nothing can be left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support import ways
from support.aliases import share_memory
from support.owners import OfRank, objects_in, owned, unowned
from support.places import Place, Places
from support.placing import Placing, boxes_like, local
from support.quantized import exported
from support.states import (
    CONTENTS,
    SAFE_GLOBALS,
    Evolving,
    at_path,
    change_memory,
    differences,
    is_in_list,
    leaves,
    mapped,
    put,
    snapshot,
    spoil,
    target_for,
)
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import SavePlanner

from torch_ckpt.filesystems.location import Location
from torch_ckpt.planning.plan_cache import plan_cache
from torch_ckpt.process_state import PROCESS
from torch_ckpt.staging.stager import SnapshotStager

COMMAND = "python tests/crossed.py"
TIMEOUT_S = 60  # For a case.
SHRINKING_S = 60
PARTS = 7  # Tests of one process, and tests of ranks. A check without --full runs the first.
FULL_S = 250  # Seconds of cases of one part in a full check.
PART_S, PART_CASES = 8, 4  # In each check: as many cases, in so many seconds at most.
PART_TIMEOUT_S = FULL_S + 2 * TIMEOUT_S + SHRINKING_S
EXPECTED = "expected.pt"


@dataclass(frozen=True)
class Case:
    """States, a way in and ways out.

    Attributes:
        seed: Of everything.
        ranks: How many save; 0 for a process without a process group.
        content: Of the states.
        way: The way in.
        outs: Ways out.
        saves: Which of the states are saved.
        dropped: Values that are left out of the states.
        place: The one place of a campaign; any if ``None``.
    """

    seed: int
    ranks: int
    content: str
    way: dict[str, str]
    outs: tuple[dict[str, str], ...]
    saves: tuple[int, ...]
    dropped: frozenset[str] = frozenset()
    place: str | None = None

    @classmethod
    def of(cls, seed: int, *, with_ranks: bool, place: str | None = None) -> Case:
        """The case of a seed, at this place or any."""
        rng = random.Random(f"case {seed}")
        ranks = rng.choice([1, 2, 2, 2, 3, 3, 3, 4]) if with_ranks else 0
        content = rng.choice(list(CONTENTS))
        way = ways.random_way(rng, is_alone=not ranks, content=content, place=place)
        count = rng.choice([1, 1, 2, 2, 3, 4])
        outs = [ways.random_out(rng, way, ranks) for _ in range(rng.choice([1, 2]))]
        stock = {name: next(iter(names)) for name, names in ways.OUT.items()} | {"reader": "stock"}
        outs += [stock] if ways.fits_out(stock, way, ranks) else []
        return cls(seed, ranks, content, way, tuple(outs), tuple(range(count)), place=place)

    def __str__(self) -> str:
        plainest = {name: next(iter(names)) for name, names in (ways.IN | ways.OUT).items()}
        way = {n: w for n, w in self.way.items() if w != plainest[n] or n == "call"}
        outs = [{n: o for n, o in out.items() if o != plainest[n]} for out in self.outs]
        lines = [f"in: {way} on {self.ranks or 'no'} ranks, content: {self.content}"]
        lines += [f"out: {out or 'plain'}" for out in outs]
        evolving = Evolving(self.seed, self.content)
        for number in range(self.saves[-1] + 1):
            if number:
                evolving.change()
            if number in self.saves:
                lines.append(f"state {number}:")
                lines += [f"  {_described(*leaf)}" for leaf in leaves(self.kept(evolving.state))]
        return "\n".join(lines)

    def kept(self, state: Any) -> Any:
        """The state without the values that are dropped."""
        return mapped(lambda path, v: ... if str(path) in self.dropped else v, state)

    def but(self, **changes: Any) -> Case:
        """The case with some of it changed."""
        return dataclasses.replace(self, **changes)

    @property
    def fits(self) -> bool:
        """Whether there is such a case."""
        fits_in = ways.fits(self.way, is_alone=not self.ranks, content=self.content)
        return fits_in and all(ways.fits_out(out, self.way, self.ranks) for out in self.outs)

    def is_by_same_ranks(self, out: dict[str, str]) -> bool:
        """Whether the ranks that save are those of a way out."""
        return ways.OUT["ranks"][out["ranks"]] in (None, 0, self.ranks)

    @property
    def command(self) -> str:
        """Runs the case again."""
        place = f" --place {self.place}" if self.place else ""
        return f"{COMMAND} --seed {self.seed}{' --ranks' if self.ranks else ''}{place}"


def _described(path: Any, _: Any, value: Any) -> str:
    name = ".".join(map(str, path))[:40]
    if not isinstance(value, torch.Tensor):
        return f"{name!r}: {str(value)[:60]!r}"
    facts = [type(value).__name__, str(value.dtype), list(value.shape), f"{value.nbytes} bytes"]
    facts += [f"strides {value.stride()}", f"address {value.data_ptr() % 4096} of a page"]
    return f"{name!r}: " + ", ".join(map(str, facts))


# ---- Running a case ------------------------------------------------------------------------------


def run_case(case: Case, places: Places, worlds: Any) -> list[str]:
    """What is wrong in a case; nothing if all is well.

    Args:
        case: The case.
        places: File systems, and a store.
        worlds: Of ranks; ``None`` if there is no case of ranks.
    """
    try:
        with places.place(case.way["place"]) as place:
            if not case.ranks:
                return carry_out(case, place)
            found = worlds.run(case.ranks, carry_out, case, place, timeout_s=TIMEOUT_S)
            for out in case.outs:
                if not case.is_by_same_ranks(out):
                    arguments = load_elsewhere, case, place, out
                    count = ways.OUT["ranks"][out["ranks"]]
                    found += worlds.run(count, *arguments, timeout_s=TIMEOUT_S)
            return [each for of_rank in found for each in of_rank]
    except (Exception, CheckpointException) as error:
        return ["".join(traceback.format_exception(error))[-2500:]]


@contextlib.contextmanager
def _fresh_process(case: Case, place: Place) -> Iterator[None]:
    """Nothing that former cases have left in the process, and a memory for the agent."""
    plan_cache().forget()
    PROCESS.stager = SnapshotStager()
    for name in [name for name in vars(SavePlanner) if name.startswith("_cached_")]:
        getattr(SavePlanner, name).clear()
    log, level = logging.getLogger("torch_ckpt"), logging.getLogger("torch_ckpt").level
    log.setLevel(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            ways.environment(case.way, place),
            mock.patch.object(PROCESS, "file_systems", {}),  # Clients of stores.
            torch.serialization.safe_globals(SAFE_GLOBALS),
        ):
            yield
    finally:
        log.setLevel(level)


def carry_out(case: Case, place: Place) -> list[str]:
    """Saves and loads on this rank; returns what is wrong."""
    problems: list[str] = []
    rng = random.Random(f"way {case.seed}")
    is_alone = not case.ranks
    evolving = Evolving(case.seed, case.content)
    owners = 0 if case.way["owners"] == ways.OF_RANKS else rng.choice([0, 6])
    may_be_empty = not ways.is_planned_by_stock(case.way)
    options = {
        "may_be_empty": may_be_empty,
        "drifts": rng.random() < 0.3 and ways.stores_one_replica(case.way),
    }
    placing = None if is_alone else Placing(case.seed, owners=owners, **options)
    saving = ways.Saving(case.way, place, is_alone, rng)
    begun: list[tuple[ways.Wait, Location, int, Any]] = []
    with _fresh_process(case, place), saving.stack:
        folder = Location(place.path)
        for number in range(case.saves[-1] + 1):
            if number:
                evolving.change()
            if number not in case.saves:
                continue
            whole = case.kept(evolving.state)
            expected = snapshot(whole)
            state = placing.place(whole) if placing else whole
            path = folder / f"step-{0 if saving.of('directory') else number}"
            if saving.of("fault") is not None:
                problems += _refused(case, saving, whole, state, path, number)
            wait = saving.save(owned(state, whole, case.seed, saving.of("owners")), path)
            if wait is not None:
                spoil([state, whole])  # An object may be in the state of another rank only.
            else:
                problems += [f"changed by the save: {d}" for d in _changed(whole, expected)]
            begun.append((wait, path, number, expected))
            del wait
            if not saving.of("ends") or number == case.saves[-1]:
                for wait, *_ in begun:
                    if wait is not None:
                        wait()
                if wait is not None and not saving.of("ends"):
                    change_memory(whole)  # Back: the next save may find values unchanged.
                for _, *saved in begun:
                    problems += _check(case, saving, *saved)
                begun.clear()
    return problems


def _refused(
    case: Case, saving: ways.Saving, whole: Any, state: Any, path: Location, number: int
) -> Iterator[str]:
    """Saves a state with a value that cannot be saved; what is wrong in the end of that save."""
    rng = random.Random(f"fault {case.seed} {number}")
    mappings = [leaf.path[:-1] for leaf in leaves(whole) if isinstance(leaf.container, dict)]
    at = (*(rng.choice([*mappings, ()]) or ("more",)), "faulty")
    # DCP's asynchronous save of the other ranks would wait for the one whose staging fails.
    is_everywhere = case.way["call"] in ("dcp.async_save", "stage") or rng.random() < 0.5
    if saving.is_alone or is_everywhere or dist.get_rank() == rng.randrange(case.ranks):
        state = put(state, at, saving.of("fault")())
    before, last = ways.committed(path), saving.last
    name = f"save {number} of {case.way['fault']} at {at}"
    try:
        wait = saving.save(owned(state, whole, case.seed, saving.of("owners")), path)
        if wait is not None:
            wait()
        yield f"{name} did not fail"
    except (Exception, CheckpointException) as error:
        if not _names(error, at):
            yield f"{name} failed without the name: {error!r} {error}"
    saving.last = last
    if ways.committed(path) != before:
        yield f"{name} has committed a checkpoint"


def _names(error: BaseException, path: Sequence[Any]) -> bool:
    """Whether an error names the value at a path."""
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    fqn = ".".join(map(str, path))
    return fqn in text or repr(fqn)[1:-1] in text


def _changed(state: Any, expected: Any) -> list[str]:
    return differences(expected, snapshot(state))


def _check(
    case: Case, saving: ways.Saving, path: Location, number: int, expected: Any
) -> Iterator[str]:
    """What the ways out of the same ranks find wrong in a save."""
    if not saving.is_alone:
        dist.barrier()
    final = ways.final_path(case.way, path)
    if saving.is_alone or dist.get_rank() == 0:
        ways.convert_saved(case.way, path)
        if number == case.saves[-1] and case.ranks:
            torch.save((str(final), expected), saving.place.scratch / EXPECTED)
    if not saving.is_alone:
        dist.barrier()
    for out in case.outs:
        if case.is_by_same_ranks(out):
            for problem in load(case, final, expected, out, saving.opened_run):
                yield f"save {number}, {out}: {problem}"


def load_elsewhere(case: Case, place: Place, out: dict[str, str]) -> list[str]:
    """What is wrong in the last save, if this rank is one of others than those that saved."""
    path, expected = torch.load(place.scratch / EXPECTED, weights_only=False)
    with _fresh_process(case, place):
        found = load(case, Location(path), expected, out, None)
        return [f"{out}: {problem}" for problem in found]


def load(case: Case, path: Location, expected: Any, out: dict[str, str], run: Any) -> list[str]:
    """What a way out gives, other than the expected values."""
    rng = random.Random(f"out {case.seed} {sorted(out.items())}")
    reader = ways.READERS[out["reader"]]
    is_alone = not case.ranks or out["ranks"] == "each for itself"
    loading = ways.Loading(
        path,
        ways.LOAD_PLANNERS[out["planner"]](rng),
        {"no_dist": True} if is_alone else {},
        ways.OUT["trust"][out["trust"]],
        run,
    )
    if ways.format_of(case.way) == "safetensors" or reader.gives == "FQN":
        expected = flatten_state_dict(expected)[0]
    if ways.is_quantized(case.way):
        is_stored = ways.OUT["elements"][out["elements"]] or reader.gives is not None
        expected = exported(expected, is_stored=is_stored)
    if reader.gives is not None:
        found: dict[str, Any] = {}
        reader.load(loading, found)
        return differences(expected, found)
    share = ways.OUT["keys"][out["keys"]]
    expected = mapped(
        lambda path, v: ... if rng.random() > share and not is_in_list(path) else v, expected
    )
    target = target_for(rng, expected)
    wanted = expected
    owners = ways.OUT["owners"][out["owners"]]
    if case.ranks:
        whole = target
        target = Placing(rng.getrandbits(30)).place(whole)
        for each in objects_in(owned(whole, expected, case.seed, owners)):
            if isinstance(each, OfRank):  # Each rank has all of it.
                target = put(target, each.path, at_path(whole, each.path))
        wanted = boxes_like(target, expected)
    aliases = share_memory(rng, target) if ways.OUT["memory"][out["memory"]] else None
    outcomes = []
    if aliases and ways.is_read_by_stock(case.way, out):
        by_stock = dataclasses.replace(loading, planner=DefaultLoadPlanner())
        ways.READERS["stock"].load(by_stock, mapped(lambda _, v: v, target))
        outcomes.append(aliases.present(local(target), wanted))
        aliases.spoil()
        change_memory(target)
    problems = []
    if ways.OUT["fault"][out["fault"]]:
        owner = owned(target, expected, case.seed, owners)
        problems += _refused_load(rng, owner, lambda: reader.load(loading, owner), is_alone)
    for time_ in range(ways.OUT["times"][out["times"]]):
        if time_:
            change_memory(target)
        owner = owned(target, expected, case.seed, owners)
        objects = [*objects_in(owner)]
        reader.load(loading, owner)
        problems += [f"{each.path} is not restored" for each in objects if not each.is_loaded]
        target = unowned(owner)
        found = local(target)
        if aliases:
            live, found = found, snapshot(found)
            either = [
                differences(each, found) for each in outcomes or aliases.outcomes(live, wanted)
            ]
            problems += min(either, key=len)
        else:
            problems += differences(wanted, found)
    return problems


def _refused_load(
    rng: random.Random, owner: Any, load: Callable[[], Any], is_alone: bool
) -> Iterator[str]:
    """Loads while an object takes no state; what is wrong in the end of that load."""
    objects = [*objects_in(owner)]
    if not objects:
        return
    one, is_everywhere = rng.choice(objects), rng.random() < 0.5
    one.fails = is_alone or is_everywhere or dist.get_rank() == 0
    try:
        load()
        yield f"{one.path} was loaded, although it takes no state"
    except (Exception, CheckpointException) as error:
        if not _names(error, one.path):
            yield f"{one.path} failed without the name: {error!r} {error}"


# ---- Campaigns -----------------------------------------------------------------------------------


def shrunk(case: Case, fails: Callable[[Case], bool], seconds: float = SHRINKING_S) -> Case:
    """The smallest case found that fails as well: of fewer saves, ways and values.

    Args:
        case: A case that fails.
        fails: Whether another one does.
        seconds: For how long to try.
    """
    end, before = time.monotonic() + seconds, None

    def smaller(simpler: Case) -> bool:
        nonlocal case
        if simpler == case or time.monotonic() > end or not simpler.fits or not fails(simpler):
            return False
        case = simpler
        return True

    while case != before and time.monotonic() < end:
        before = case
        for number in case.saves:
            if len(case.saves) > 1 and not smaller(case.but(saves=(number,))):
                smaller(case.but(saves=tuple(n for n in case.saves if n != number)))
        for out in case.outs:
            if len(case.outs) > 1:
                smaller(case.but(outs=(out,)))
        for name, choices in ways.IN.items():
            smaller(case.but(way={**case.way, name: next(iter(choices))}))
        for name, choices in ways.OUT.items():
            smaller(case.but(outs=tuple({**o, name: next(iter(choices))} for o in case.outs)))
        if case.ranks > 1:
            smaller(case.but(ranks=case.ranks - 1))
        names = _paths(case)
        size = len(names) // 2
        while size:
            for begin in range(0, len(names), size):
                smaller(case.but(dropped=case.dropped | set(names[begin : begin + size])))
            size //= 2
    return case


def _paths(case: Case) -> list[str]:
    """Paths of all values of the states that are saved."""
    evolving, names = Evolving(case.seed, case.content), {}
    for number in range(case.saves[-1] + 1):
        if number:
            evolving.change()
        if number in case.saves:
            names |= {str(leaf.path): None for leaf in leaves(case.kept(evolving.state))}
    return list(names)


def check(case: Case, places: Places, worlds: Any, *, shrinks: bool = True) -> None:
    """Runs a case.

    Args:
        case: The case.
        places: File systems, and a store.
        worlds: Of ranks; ``None`` if there is no case of ranks.
        shrinks: Whether to look for a smaller case that fails as well.

    Raises:
        AssertionError: It fails. The message has the smallest case that does, and how to repeat it.
    """
    problems = run_case(case, places, worlds)
    if not problems:
        return
    smallest, found = case, problems
    if shrinks:
        smallest = shrunk(case, lambda other: bool(run_case(other, places, worlds)))
        found = run_case(smallest, places, worlds)
    raise AssertionError(
        "\n".join(
            [
                f"{case.command}  # repeats it; the smallest case found:",
                str(smallest),
                *(found or ["(which fails at times only)", *problems])[:5],
            ]
        )
    )


def campaign(seed: int, full: bool, places: Places, worlds: Any = None) -> int:
    """Runs the cases of one part, of one seed after another; returns how many.

    Raises:
        AssertionError: One fails.
    """
    end = time.monotonic() + (FULL_S if full else PART_S)
    for number in itertools.count():
        if time.monotonic() > end or (not full and number == PART_CASES):
            break
        check(Case.of(seed + number, with_ranks=worlds is not None), places, worlds)
    return number
