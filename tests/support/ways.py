"""Every way to save a state, and every way to load it again. A new way joins by one line of a list.

A way in has a name of each list of :data:`IN`, a way out of each list of :data:`OUT`; the first
name of a list is the plainest.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.cutting import CuttingLoadPlanner, CuttingSavePlanner, narrow
from support.exchanging import Exchanging
from support.owners import Owners, unowned
from support.places import PLACES, Place, downloaded, upload
from support.tensors import PACKED, Tagged
from support.tight import TightStager
from support.unsavable import (
    MAY_BE_SAVED,
    NOT_NAMED_BY_DCP,
    PICKLED_BY_TORCH,
    UNSAVABLE,
    WITH_STATE,
    Setter,
)
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.storage import WriteResult
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

import torch_ckpt
from torch_ckpt import (
    FastLoadPlanner,
    FastReader,
    FastSavePlanner,
    FastWriter,
    IoOptions,
    Run,
    SafetensorsWriter,
    SnapshotStager,
)
from torch_ckpt.agent import AgentOptions
from torch_ckpt.conversion.convert import convert
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.verify import examine

SAVE_TIMEOUT_S = 50
Way = Mapping[str, str]  # List -> name.
Wait = Callable[[], Any] | None


@dataclass
class Saving:
    """What the saves of one case have in common.

    Attributes:
        way: The way in.
        place: Of the checkpoints.
        is_alone: Whether this process saves by itself, without a process group.
        rng: Of what planners and options draw.
        stack: Closes what the saves have opened.
    """

    way: Way
    place: Place
    is_alone: bool
    rng: random.Random
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.stager: SnapshotStager | None = STAGERS[self.way["stager"]]()
        self.opened_run: Run | None = None
        self.last: Location | None = None  # The former checkpoint.

    def of(self, name: str) -> Any:
        """What the way has of this list."""
        return IN[name][self.way[name]]

    @property
    def ranks(self) -> dict[str, Any]:
        """Arguments for a call of all ranks."""
        return {"no_dist": True} if self.is_alone else {}

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the writer."""
        options = {"sync_files": False, **self.of("files")}
        return options if self.way["writer"] == "stock" else {**options, "io": self.of("io")}

    def writer(self, path: Location) -> Any:
        """A writer of this directory."""
        options = self.options
        if self.stager is not None:
            options["stager"] = self.stager
        if self.way["writer"] == "stock" and path.local_path is None:
            return _Uploading(path, self.place.scratch / path.name, **options)
        if self.way["writer"] == "safetensors" and self.of("quantize"):
            options["quantize"] = self.of("quantize")
        if self.of("base"):
            options["base"] = (self.last or path).checkpoint_id
        self.last = path
        return self.of("writer")(path.checkpoint_id, **options)

    def planner(self) -> Any:
        """A planner for one save."""
        return self.of("planner")(self)

    def save(self, state: Any, path: Location) -> Wait:
        """Saves, or begins to; then returns what waits for the end."""
        wait = self.of("call").function(self, state, path)
        if self.stager is not None and not self.stager.blocking:
            self.stager.wait_staged()
        return wait

    def run(self, **options: Any) -> Run:
        """The run of all saves."""
        if self.opened_run is None:
            if options.pop("agent", False):
                options["agent"] = AgentOptions(io=self.of("io"))
                writer: dict[str, Any] = {"sync_files": False}
            else:
                writer = self.options
            if options.pop("promoted", False):
                options["local"] = self.place.scratch / "local"
            if options.pop("machines", False) and not self.is_alone:
                options["local"] = self.place.scratch / f"local-{dist.get_rank()}"
                self._enter_machine(f"machine-{dist.get_rank()}")
            self.opened_run = self.stack.enter_context(
                Run(self.place.path, writer=writer, **options)
            )
        return self.opened_run

    def _enter_machine(self, name: str) -> None:
        """Gives this rank the shared memory of a machine of its own, until the saves have ended."""
        memory = Path(os.environ.get("TORCH_CKPT_MEMORY", "/dev/shm")) / name
        memory.mkdir(exist_ok=True)
        self.stack.enter_context(mock.patch.dict(os.environ, TORCH_CKPT_MEMORY=str(memory)))


class _Uploading(FileSystemWriter):
    """Stock's writer to a store, by way of files of this machine: it knows no store."""

    def __init__(self, path: Location, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self._target = path

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        upload(Path(self.path), self._target)


# ---- In ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A function that saves.

    Attributes:
        function: Saves a state to a path; returns what waits for the end, if it returns before.
        uses: The lists of which it uses a name.
    """

    function: Callable[[Saving, Any, Location], Wait]
    uses: str = "writer planner io files queue place then directory base fault owners quantize"


STAGED = f"{Call.uses} stager ends"
OWN_PLANNER = "io files queue place then directory fault owners quantize"  # And its own writer.


def _async_save(s: Saving, state: Any, path: Location) -> Wait:
    options = {"storage_writer": s.writer(path), "planner": s.planner()}
    begun = dcp.async_save(state, **options, **s.ranks)
    return getattr(begun, "upload_completion", begun).result


def _fast_async_save(s: Saving, state: Any, path: Location, **options: Any) -> Wait:
    options |= {"storage_writer": s.writer(path), "planner": s.planner()}
    begun = torch_ckpt.async_save(state, **options, **s.ranks, timeout_s=SAVE_TIMEOUT_S)
    return getattr(begun, "upload_completion", begun).result


def _save_by_process(s: Saving, state: Any, path: Location) -> Wait:
    """By a thread if torch does not send a tensor to another process as it is.

    It refuses quantized tensors, fails on subclasses of newer dtypes, leaves out the attributes of
    parameters, and does not send methods of a tensor.
    """
    tensors = [leaf for leaf in tree_leaves(unowned(state)) if isinstance(leaf, torch.Tensor)]
    is_sent = not any(
        t.is_quantized
        or isinstance(t, Tagged)
        or (type(t) is Parameter and vars(t))
        or "__get_tensor_shard__" in vars(t)
        for t in tensors
    )
    kind = AsyncCheckpointerType.PROCESS if is_sent else AsyncCheckpointerType.THREAD
    return _fast_async_save(s, state, path, async_checkpointer_type=kind)


def _save_staged(s: Saving, state: Any, path: Location) -> Wait:
    writer, planner = s.writer(path), s.planner()
    staged = writer.stage(state)
    writer.synchronize_staging()
    staged = staged if isinstance(staged, dict) else staged.result()
    held = [(staged, writer, planner)]
    del staged, writer, planner

    def save() -> None:
        state, storage_writer, planner = held.pop()  # Whoever keeps them keeps the memory in use.
        dcp.save(state, storage_writer=storage_writer, planner=planner, **s.ranks)

    return save


def _save_installed(save: Callable[..., Any], s: Saving, state: Any, path: Location) -> Any:
    """Saves by a function that the program has stored before the block."""
    with torch_ckpt.installed(timeout_s=SAVE_TIMEOUT_S):
        return save(state, checkpoint_id=path.checkpoint_id, **s.ranks)


def _step(path: Location) -> int:
    return int(path.name.removeprefix("step-"))


def _save_by_run(s: Saving, state: Any, path: Location, **options: Any) -> Wait:
    run = s.run(**options)
    run.save(_step(path), state)
    if "promoted" not in options:
        return run.wait if options else None
    if "asynchronous" in options:
        return functools.partial(run.wait, promoted=True)
    run.wait(promoted=True)
    return None


CALLS = {
    "dcp.save": Call(
        lambda s, state, path: (
            dcp.save(state, storage_writer=s.writer(path), planner=s.planner(), **s.ranks) and None
        )
    ),
    "torch_ckpt.save": Call(
        lambda s, state, path: (
            torch_ckpt.save(state, storage_writer=s.writer(path), planner=s.planner(), **s.ranks)
            and None
        )
    ),
    "dcp.async_save": Call(_async_save, STAGED),
    "torch_ckpt.async_save": Call(_fast_async_save, STAGED),
    "async_save by process": Call(_save_by_process, f"{Call.uses} ends"),
    "stage": Call(_save_staged, f"{Call.uses} stager"),
    "dcp.save, installed": Call(
        lambda *args: _save_installed(dcp.save, *args) and None,
        OWN_PLANNER.removeprefix("io files "),
    ),
    "dcp.async_save, installed": Call(
        lambda *args: _save_installed(dcp.async_save, *args).result,
        OWN_PLANNER.removeprefix("io files ") + " ends",
    ),
    "run": Call(_save_by_run, OWN_PLANNER),
    "run, async": Call(lambda *args: _save_by_run(*args, asynchronous=True), f"{OWN_PLANNER} ends"),
    "run, promoted": Call(lambda *args: _save_by_run(*args, promoted=True), OWN_PLANNER),
    "run, async, promoted": Call(
        lambda *args: _save_by_run(*args, asynchronous=True, promoted=True), f"{OWN_PLANNER} ends"
    ),
    "run, agent, promoted": Call(
        lambda *args: _save_by_run(*args, asynchronous=True, agent=True, promoted=True),
        f"{OWN_PLANNER} ends",
    ),
    "run, agents of machines, promoted": Call(
        lambda *args: _save_by_run(
            *args, asynchronous=True, agent=True, promoted=True, machines=True
        ),
        f"{OWN_PLANNER} ends",
    ),
    "run, agent": Call(
        lambda *args: _save_by_run(*args, asynchronous=True, agent=True), f"{OWN_PLANNER} ends"
    ),
}


class _Overriding:
    """Overrides what our planners then call for each item, and changes nothing."""

    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(index)  # type: ignore[misc]

    def resolve_data(self, write_item: WriteItem) -> Any:
        return super().resolve_data(write_item)  # type: ignore[misc]

    def create_local_plan(self) -> SavePlan:
        plan: SavePlan = super().create_local_plan()  # type: ignore[misc]
        plan.items.reverse()
        return plan


class _OverridingStock(_Overriding, DefaultSavePlanner):
    pass


class _OverridingFast(_Overriding, FastSavePlanner):
    pass


SAVE_PLANNERS: dict[str, Callable[[Saving], Any]] = {
    "stock": lambda s: DefaultSavePlanner(),
    "fast": lambda s: FastSavePlanner(),
    "stock, lowest rank": lambda s: DefaultSavePlanner(dedup_save_to_lowest_rank=True),
    "fast, lowest rank": lambda s: FastSavePlanner(dedup_save_to_lowest_rank=True),
    "stock, caching": lambda s: DefaultSavePlanner(enable_plan_caching=True),
    "fast, not caching": lambda s: FastSavePlanner(enable_plan_caching=False),
    "subclass of stock": lambda s: _OverridingStock(),
    "subclass of fast": lambda s: _OverridingFast(),
    "cutting": lambda s: CuttingSavePlanner(s.rng),
}

IOS = {
    "default": IoOptions(),
    "buffered": IoOptions(direct=False),
    "small": IoOptions(buffer_nbytes=512 << 10),
    "small, buffered": IoOptions(buffer_nbytes=512 << 10, direct=False),
    "odd": IoOptions(buffer_nbytes=777_777),
    "odd, buffered": IoOptions(buffer_nbytes=(1 << 20) + 1, direct=False),
    "large": IoOptions(buffer_nbytes=300_000_001),
    "nice": IoOptions(background_nice=19),
    "not nice": IoOptions(background_nice=0, direct=False),
}

FILES: dict[str, dict[str, Any]] = {
    "one": {},
    "three": {"thread_count": 3},
    "two, which copy little ahead": {"thread_count": 2, "per_thread_copy_ahead": 1},
    "one for each item": {"single_file_per_rank": False},
    "one for each item, by two threads": {"single_file_per_rank": False, "thread_count": 2},
    "synced": {"sync_files": True},
    "replicas where the planner puts them": {"share_replicas": False},
    "transformed": {"_extensions": [ZStandard()]},
    "of 100 KB": {"max_shard_nbytes": 100_000},
}


class _SlowStager(SnapshotStager):
    """Copies so late that training is not to go on for a while."""

    def _copy(self, *args: Any) -> None:
        time.sleep(0.005)
        super()._copy(*args)


STAGERS: dict[str, Callable[[], SnapshotStager | None]] = {
    "of the process": lambda: None,
    "in the background": lambda: _SlowStager(blocking=False),
    "without memory": TightStager,
}

NO_FAULT = "no fault"
BELOW_TOP = "an object below the top"
FAULTS = {NO_FAULT: None, BELOW_TOP: Setter}
FAULTS |= {name: make for name, make in UNSAVABLE.items() if name not in MAY_BE_SAVED}

OF_RANKS = "some, and states of ranks"
OWNERS = {
    "none": Owners(),
    "at the top": Owners(0.5, depth=1),
    "some": Owners(0.5),
    OF_RANKS: Owners(0.5, of_ranks=True),
}
# DCP calls `state_dict()` at the top alone. Nobody does for what a caller stages by the writer.
CALLED_BY_DCP = {"dcp.save": ("none", "at the top"), "dcp.async_save": ("none", "at the top")}
CALLED_BY_DCP |= {"stage": ("none",)}

IN: dict[str, Mapping[str, Any]] = {
    "call": CALLS,
    "writer": {"fast": FastWriter, "stock": FileSystemWriter, "safetensors": SafetensorsWriter},
    "planner": SAVE_PLANNERS,
    "io": IOS,
    "files": FILES,
    "queue": {"io_uring": "", "threads": "threads"},
    "stager": STAGERS,
    "place": dict.fromkeys(PLACES),
    "directory": {"one for each save": False, "the same": True},
    "base": {"none": False, "the former save": True},
    "ends": {"in turn": False, "all at the end": True},
    "owners": OWNERS,
    "fault": FAULTS,
    "then": {"": None, "convert to dcp": "dcp", "convert to safetensors": "safetensors"}
    | {"convert to torch": "torch"},
    "quantize": {"no": None, "FP8 blocks": "fp8-block-128"},
}
WEIGHTS = dict.fromkeys(FAULTS, 0.02) | {NO_FAULT: 1}
WEIGHTS |= {"async_save by process": 0.02, "synced": 0.2, "large": 0.2}
WEIGHTS |= {
    "run, agent": 0.2,
    "run, agent, promoted": 0.2,
    "run, agents of machines, promoted": 0.2,
}
WEIGHTS |= {"one for each item": 0.5, "one for each item, by two threads": 0.5, "one": 3}
WEIGHTS |= {"FP8 blocks": 9}
WEIGHTS |= {"convert to dcp": 0.2, "convert to safetensors": 0.2, "convert to torch": 0.2}
WRITERS_OWN = {
    "stock": {"one", "three", "one for each item", "transformed"},
    "safetensors": {"one", "three", "synced", "of 100 KB", "replicas where the planner puts them"},
    "fast": set(FILES) - {"of 100 KB"},
}


def fits(way: Way, *, is_alone: bool, content: str) -> bool:
    """Whether there is such a way in."""
    uses = CALLS[way["call"]].uses.split()
    if any(way[name] != next(iter(IN[name])) for name in IN if name not in [*uses, "call"]):
        return False
    has_model = way["writer"] == "safetensors" or "safetensors" in way["then"]
    is_ours = way["writer"] != "stock"
    return (
        way["files"] in WRITERS_OWN[way["writer"]]
        and (is_ours or way["io"] == "default")
        and (is_ours or way["queue"] == "io_uring")
        and (way["writer"] == "fast" or way["stager"] == "of the process")
        and (way["writer"] == "fast" or way["then"] == "")
        and (is_ours or way["base"] == "none")
        and (way["call"] != "stage" or (is_ours and way["stager"] != "without memory"))
        # Stock's stager fails for sparse tensors and some DTensors, and drops attributes.
        and (is_ours or "async" not in way["call"])
        and (is_alone or way["planner"] != "cutting")
        and ("agent" not in way["call"] or way["files"] in ("one", "three"))
        and (way["directory"] == "one for each save" or way["ends"] == "in turn")
        # DCP's own saves of ranks are not to overlap: they use one process group.
        and (is_alone or way["call"] != "dcp.async_save" or way["ends"] == "in turn")
        and (content in ("model", "weights") or not has_model)
        # A model is not replaced by one that is quantised in another way.
        and (
            not is_quantized(way)
            or (content == "weights" and has_model and way["directory"] == "one for each save")
        )
        and (not is_quantized(way) or way["base"] == "none")
        # Torch itself neither converts nor stages all of its own dtypes.
        and (content != "any" or (way["then"] != "convert to torch" and is_ours))
        and way["owners"] in CALLED_BY_DCP.get(way["call"], OWNERS)
        and not (way["owners"] == OF_RANKS and (has_model or way["then"]))
        and (way["fault"] == NO_FAULT or is_ours)
        and is_refused_by_name(way)
        and not is_refused(way)
        # With stock's cached plans: metadata have the old dtype where one changes, and saves that
        # overlap get plans of each other.
        and (
            way["planner"] != "stock, caching"
            or (way["then"] == "" and not has_model and way["ends"] == "in turn")
        )
    )


def is_refused_by_name(way: Way) -> bool:
    """Whether a save has no value that cannot be saved, or names it."""
    fault, is_by_dcp = way["fault"], way["call"] in CALLED_BY_DCP
    if way["planner"] == "cutting":  # It cuts plain tensors only.
        return fault == NO_FAULT
    if fault in NOT_NAMED_BY_DCP:
        return not is_by_dcp and not is_planned_by_stock(way)
    # A planner with functions of its own may save an object itself.
    is_subclass = "subclass" in way["planner"]
    if fault == BELOW_TOP:
        return is_by_dcp and not is_subclass
    if fault in PICKLED_BY_TORCH:
        return not is_subclass
    return not (fault in WITH_STATE and is_by_dcp and is_subclass)


def is_quantized(way: Way) -> bool:
    """Whether the files have FP8 numbers and scales."""
    return IN["quantize"][way["quantize"]] is not None


def is_planned_by_stock(way: Way) -> bool:
    """Whether DCP's functions plan the saves."""
    uses_planner = "planner" in CALLS[way["call"]].uses.split()
    return uses_planner and not way["planner"].startswith("fast")


def stores_one_replica(way: Way) -> bool:
    """Whether the first replica of a tensor is stored, and read, if the replicas differ."""
    return (
        way["writer"] != "stock"
        and way["files"] != "replicas where the planner puts them"
        and way["planner"] in ("stock", "fast", "stock, lowest rank", "fast, lowest rank")
        and "agent" not in way["call"]  # A restore from memory loads the rank's own replica.
    )


def is_refused(way: Way) -> bool:
    """Whether the product refuses a way in at its place."""
    is_replaced = way["directory"] == "the same" and way["then"] == "convert to torch"
    return way["place"] == "store" and is_replaced


def format_of(way: Way) -> str:
    """What the files of the way in are."""
    return IN["then"][way["then"]] or {"safetensors": "safetensors"}.get(way["writer"], "dcp")


def random_way(
    rng: random.Random, *, is_alone: bool, content: str, place: str | None
) -> dict[str, str]:
    """A way in that fits, at this place or any."""
    plainest = {name: next(iter(IN[name])) for name in IN}
    call = _one_of(rng, CALLS)
    while True:
        drawn = {name: _one_of(rng, IN[name]) for name in CALLS[call].uses.split()}
        way = {**plainest, "call": call, **drawn}
        if place is not None:
            way["place"] = place
        if fits(way, is_alone=is_alone, content=content):
            return way


def _one_of(rng: random.Random, names: Mapping[str, Any]) -> str:
    return rng.choices(list(names), [WEIGHTS.get(name, 1) for name in names])[0]


def final_path(way: Way, path: Location) -> Location:
    """Where the checkpoint is once it is in the format that the way ends with."""
    to = IN["then"][way["then"]]
    return path if to is None else path.with_name(f"{path.name} as {to}")


def committed(path: Location) -> dict[str, Any]:
    """What shows that a checkpoint is at a path, and which one."""
    with contextlib.suppress(NotFoundError):
        files = {name: path / name for name in path.names()}
        return {
            name: file.nbytes() if name.endswith(".safetensors") else file.read()
            for name, file in files.items()
            if name == ".metadata" or (".safetensors" in name and not name.startswith("."))
        }
    return {}


def convert_saved(way: Way, path: Location) -> None:
    """Puts a checkpoint into the format that the way ends with."""
    to, target = IN["then"][way["then"]], final_path(way, path)
    if to is not None:
        quantize = IN["quantize"][way["quantize"]]
        convert(path, target, to, overwrite=True, quantize=quantize)


@contextlib.contextmanager
def environment(way: Way, place: Place) -> Iterator[None]:
    """Forces the queue of the way, and names the store."""
    queue = {"TORCH_CKPT_IO": IN["queue"][way["queue"]]}
    with mock.patch.dict(os.environ, {**queue, **place.variables}):
        yield


# ---- Out -----------------------------------------------------------------------------------------


@dataclass
class Loading:
    """One load.

    Attributes:
        path: The checkpoint.
        planner: A load planner.
        ranks: Arguments for a call of all ranks.
        trust_pickle: Whether its pickles may be anything.
        run: The run that has saved it, if one has.
    """

    path: Location
    planner: Any
    ranks: dict[str, Any]
    trust_pickle: bool
    run: Run | None = None

    @contextlib.contextmanager
    def on_disk(self) -> Iterator[Path]:
        """The checkpoint as files of this machine, for a reader that knows no store."""
        if self.path.local_path is not None:
            yield self.path.local_path
            return
        with tempfile.TemporaryDirectory(prefix="torch_ckpt-crossed-") as folder:
            yield downloaded(self.path, Path(folder))


@dataclass(frozen=True)
class Reader:
    """A function that loads.

    Attributes:
        load: Loads into a state.
        formats: What it reads.
        needs: ``"run"``, ``"ranks"``, or nothing.
        gives: What it puts into an empty dict, whoever calls: whole tensors by ``"FQN"``, or
            ``"nested"``. ``None`` if it loads into what is there.
    """

    load: Callable[[Loading, dict[str, Any]], Any]
    formats: tuple[str, ...] = ("dcp", "safetensors", "torch")
    needs: str = ""
    gives: str | None = None


def _by(make: Callable[[Loading], Any], *formats: str, needs: str = "") -> Reader:
    return Reader(
        lambda on, state: dcp.load(state, storage_reader=make(on), planner=on.planner, **on.ranks),
        formats or Reader.formats,
        needs,
    )


def _fast(kind: type[FastReader] = FastReader, **options: Any) -> Callable[[Loading], FastReader]:
    def make(on: Loading) -> FastReader:
        io = {key: options[key] for key in options if key in vars(IoOptions())}
        others = {key: options[key] for key in options if key not in io}
        return kind(
            on.path.checkpoint_id, trust_pickle=on.trust_pickle, io=IoOptions(**io), **others
        )

    return make


def _stock(loading: Loading, state: dict[str, Any]) -> None:
    with loading.on_disk() as path:
        reader = FileSystemReader(path)
        dcp.load(state, storage_reader=reader, planner=loading.planner, **loading.ranks)


def _slices(loading: Loading, state: dict[str, Any]) -> None:
    """Has ``torch.load`` read each stored slice, and puts boxes together.

    The slices have the dtypes of the tensors. With stock's cached plans, metadata may have others.
    """
    with loading.on_disk() as path:
        metadata = FileSystemReader(path).read_metadata()
        for index, info in metadata.storage_data.items():
            with open(path / info.relative_path, "rb") as file:
                file.seek(info.offset)
                data = file.read(info.length)
            found = torch.load(io.BytesIO(data), weights_only=False)
            stored = metadata.state_dict_metadata[index.fqn]
            if not isinstance(stored, TensorStorageMetadata):
                state[index.fqn] = found
                continue
            if index.fqn not in state:
                flat = torch.empty(stored.size.numel() * found.itemsize, dtype=torch.uint8)
                state[index.fqn] = flat.view(found.dtype).view(stored.size)
            box = narrow(state[index.fqn], index.offset or [0] * found.dim(), found.shape)
            as_bytes = found.dtype in PACKED
            (box.view(torch.uint8) if as_bytes else box).copy_(
                found.view(torch.uint8) if as_bytes else found
            )


def _verify(loading: Loading, state: dict[str, Any]) -> None:
    """Checks every byte, and loads."""
    report = examine(loading.path, trust_pickle=loading.trust_pickle)
    assert not report.damage, report.damage
    dcp.load(state, storage_reader=_fast()(loading), planner=loading.planner, **loading.ranks)


def _library(loading: Loading, state: dict[str, Any]) -> None:
    """Has the library of safetensors read each file."""
    with loading.on_disk() as path:
        for file in path.glob("*.safetensors"):
            state |= load_file(file)


def _torch_load(loading: Loading, state: dict[str, Any]) -> None:
    with loading.on_disk() as path:
        state |= torch.load(path, weights_only=False)


DEQUANTIZING = "fast, dequantizing"
READERS = {
    "fast": _by(_fast()),
    "stock": Reader(_stock, ("dcp",)),
    "fast, buffered": _by(_fast(direct=False)),
    "fast, unverified": _by(_fast(verify=False)),
    "fast, small": _by(_fast(buffer_nbytes=512 << 10)),
    "fast, odd": _by(_fast(buffer_nbytes=777_777, direct=False, verify=False)),
    "fast, exchanging": _by(_fast(Exchanging), needs="ranks"),
    "fast, exchanging little": _by(
        _fast(Exchanging, buffer_nbytes=1 << 20, exchange_nbytes=4 << 20), needs="ranks"
    ),
    "fast, not exchanging": _by(_fast(exchange="off"), needs="ranks"),
    "torch_ckpt.load": Reader(
        lambda on, state: torch_ckpt.load(
            state,
            checkpoint_id=on.path.checkpoint_id,
            trust_pickle=on.trust_pickle,
            planner=on.planner,
            **on.ranks,
        )
    ),
    "torch_ckpt.async_load": Reader(
        lambda on, state: torch_ckpt.async_load(
            state,
            checkpoint_id=on.path.checkpoint_id,
            trust_pickle=on.trust_pickle,
            **on.ranks,
        ).result()
    ),
    DEQUANTIZING: _by(_fast(dequantize=True), "safetensors"),
    "verify": Reader(_verify),
    "restore": Reader(
        lambda on, state: on.run.restore(state, step=_step(on.path)), ("dcp",), needs="run"
    ),
    "torch.load of slices": Reader(_slices, ("dcp",), gives="FQN"),
    "library": Reader(_library, ("safetensors",), gives="FQN"),
    "torch.load": Reader(_torch_load, ("torch",), gives="nested"),
}


class _OverridingLoader(FastLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return super().resolve_tensor(read_item)


LOAD_PLANNERS: dict[str, Callable[[random.Random], Any]] = {
    "stock": lambda rng: DefaultLoadPlanner(),
    "fast": lambda rng: FastLoadPlanner(),
    "subclass of fast": lambda rng: _OverridingLoader(),
    "cutting": CuttingLoadPlanner,
}

OUT: dict[str, Mapping[str, Any]] = {
    "reader": READERS,
    "planner": LOAD_PLANNERS,
    "keys": {"all": 1.0, "some": 0.3},
    "owners": OWNERS,
    "fault": {NO_FAULT: False, "an object that takes no state": True},
    "memory": {"of each": False, "one of several": True},
    "trust": {"none": False, "full": True},
    "elements": {"of the state": False, "as they are stored": True},
    "times": {"once": 1, "twice into the same tensors": 2},
    "ranks": {"the same": None, "each for itself": 0, "one": 1, "two": 2, "three": 3},
}


def _is_run(way: Way) -> bool:
    return way["call"].startswith("run") and way["then"] == ""


def is_read_by_stock(way: Way, out: Way) -> bool:
    """Whether a way out reads the files that stock's reader does, and in the same order."""
    is_from_files = format_of(way) == "dcp" and READERS[out["reader"]].needs != "run"
    # A load sorts the keys beside objects.
    return is_from_files and out["owners"] in CALLED_BY_DCP["dcp.save"]


def fits_out(out: Way, way: Way, ranks: int) -> bool:
    """Whether a checkpoint of a way in has this way out."""
    reader, count = READERS[out["reader"]], OUT["ranks"][out["ranks"]]
    is_plain = out["keys"] == "all" and out["times"] == "once" and out["ranks"] == "the same"
    loads_objects = out["reader"] in ("torch_ckpt.load", "torch_ckpt.async_load", "restore")
    is_alone = (ranks if count is None else count) == 0
    return (
        format_of(way) in reader.formats
        and (reader.gives is None or (is_plain and out["memory"] == "of each"))
        and (loads_objects or out["owners"] in CALLED_BY_DCP["dcp.save"])
        and (reader.gives is None or out["owners"] == "none")
        and (out["owners"] == OF_RANKS) == (way["owners"] == OF_RANKS)
        # A tensor of several ranks is in several files, so none needs to be last as a whole.
        and (out["memory"] == "of each" or ranks == 0 or is_read_by_stock(way, out))
        # Only FastLoadPlanner finds the states of another number of ranks.
        and (out["owners"] != OF_RANKS or count in (None, 0) or "fast" in out["planner"])
        and (out["fault"] == NO_FAULT or (loads_objects and out["owners"] != "none"))
        # The order of these reads is random.
        and (out["memory"] == "of each" or out["planner"] != "cutting")
        and (out["memory"] == "of each" or out["owners"] != OF_RANKS)
        and (out["reader"] != "torch.load of slices" or way["files"] != "transformed")
        and (reader.needs != "run" or (_is_run(way) and is_plain))
        and (
            out["elements"] == "of the state"
            or (is_quantized(way) and reader.gives is None and out["reader"] != DEQUANTIZING)
        )
        and (reader.needs != "ranks" or not is_alone)
        and (ranks > 0 or count is None)
        and (out["planner"] != "cutting" or is_alone or count == 1)
    )


def random_out(rng: random.Random, way: Way, ranks: int) -> dict[str, str]:
    """A way out that fits."""
    while True:
        out = {name: rng.choice(list(OUT[name])) for name in OUT}
        if fits_out(out, way, ranks):
            return out
