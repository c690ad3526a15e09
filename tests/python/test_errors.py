"""What happens when something is missing, damaged, full or wrong: the right error, and no harm."""

from __future__ import annotations

import copy
import dataclasses
import errno
import os
import pickle
import random
import resource
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    CuttingLoadPlanner,
    blank,
    commit_without_index,
    data_files,
    differences,
    failure_of,
    files,
    load,
    loads,
    random_tensor,
    save,
)
from support.flips import flip, flip_value
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)

from torch_ckpt import CheckpointError, FastReader, FastWriter, IoOptions, __version__
from torch_ckpt.commits import late_names
from torch_ckpt.errors import (
    CancelledError,
    CorruptionError,
    MismatchError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)

BLOCK = 64 << 10  # What is checked at a time.
SMALL = 1000  # float32 elements: read whole, frame and all.
LARGE = 500_000  # Its frame is read first.


@pytest.fixture
def state(rng: random.Random) -> dict[str, Any]:
    return {
        "large": random_tensor([LARGE // 500, 500], torch.float32),
        "small": random_tensor([SMALL], torch.float32),
        "step": 5,
    }


@pytest.fixture
def saved(state: dict[str, Any], tmp_path: Path) -> Path:
    """The directory of a checkpoint of ``state``."""
    save(state, FastWriter(tmp_path / "saved"))
    return tmp_path / "saved"


def edit_metadata(path: Path, edit: Callable[[str, Any], Any]) -> None:
    """Rewrites where items are stored: ``edit`` maps an FQN and its place to another place.

    As in a checkpoint that has no index, which would tell that its metadata were changed.
    """
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.storage_data = {
        index: edit(index.fqn, info) for index, info in metadata.storage_data.items()
    }
    commit_without_index(metadata, path)


def place_of(path: Path, fqn: str) -> Any:
    """Where an item with one chunk is stored."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == fqn)
    return info


@pytest.mark.parametrize("missing", ["directory", "metadata"])
def test_no_checkpoint_is_not_found(missing: str, tmp_path: Path) -> None:
    path = tmp_path if missing == "metadata" else tmp_path / "nowhere"
    (tmp_path / "__0_0_0123456789abcdef.distcp").write_bytes(b"of a save that did not commit")

    with pytest.raises(NotFoundError, match="no checkpoint is committed in") as caught:
        FastReader(path).read_metadata()
    error = failure_of(load, {"t": torch.zeros(1)}, FastReader(path))

    assert caught.value.errno == errno.ENOENT
    assert isinstance(caught.value, FileNotFoundError)
    if torch.__version__ >= "2.13":  # Before, DCP does not keep even the message.
        assert "no checkpoint is committed in" in str(error)
        assert str(path) in str(error)


def test_metadata_that_are_none_or_truncated_are_corruption(
    saved: Path, rng: random.Random
) -> None:
    whole = (saved / ".metadata").read_bytes()
    others = [b"", b"garbage", pickle.dumps({"not": "metadata"}), b"\x80\x05."]
    for content in [*others, *(whole[: rng.randrange(len(whole))] for _ in range(50))]:
        (saved / ".metadata").write_bytes(content)
        with pytest.raises(CorruptionError, match=r"\.metadata"):
            FastReader(saved).read_metadata()


@pytest.mark.parametrize(
    ("fqn", "folder", "kind", "number"),
    [
        ("large", False, NotFoundError, errno.ENOENT),
        ("small", False, NotFoundError, errno.ENOENT),
        ("step", False, NotFoundError, errno.ENOENT),
        ("large", True, StorageError, errno.EISDIR),
    ],
)
def test_a_data_file_that_is_none_is_an_error_and_named(
    fqn: str, folder: bool, kind: type, number: int, saved: Path, state: dict[str, Any]
) -> None:
    (file,) = data_files(saved)
    file.unlink()
    if folder:
        file.mkdir()

    error = failure_of(load, blank(state if folder else {fqn: state[fqn]}), FastReader(saved))

    assert isinstance(error, kind)
    assert error.errno == number
    assert file.name in str(error)
    assert fqn in str(error)


def test_a_truncated_data_file_is_corruption_and_leaves_targets_untouched(
    saved: Path, state: dict[str, Any], rng: random.Random
) -> None:
    (file,) = data_files(saved)
    whole = file.read_bytes()
    last = {fqn: place_of(saved, fqn) for fqn in state}
    end = max(info.offset + info.length for info in last.values())
    for length in [0, 1, end - 1, *(rng.randrange(end) for _ in range(20))]:
        file.write_bytes(whole[:length])
        targets = blank(state)
        error = failure_of(load, targets, FastReader(saved))
        assert isinstance(error, CorruptionError), length
        assert file.name in str(error)
        assert differences(blank(state), targets) == [], f"cut to {length} bytes of {end}"


@pytest.mark.parametrize("fqn", ["large", "small"])
@pytest.mark.parametrize("direct", [True, False])
def test_a_flipped_payload_bit_is_corruption_and_named(
    direct: bool, fqn: str, saved: Path, state: dict[str, Any], rng: random.Random
) -> None:
    (file,) = data_files(saved)
    payload = file.read_bytes().index(state[fqn].numpy().tobytes())
    for _ in range(10):
        position = payload + rng.randrange(state[fqn].nbytes)
        bit = rng.randrange(8)
        flip(file, position, bit)
        error = failure_of(load, blank({fqn: state[fqn]}), FastReader(saved))
        assert isinstance(error, CorruptionError), position
        for word in (file.name, repr(fqn), f"at {position // BLOCK * BLOCK} of"):
            assert word in str(error)
        flip(file, position, bit)
    assert loads(saved, state) == []


def test_verification_can_be_turned_off(
    saved: Path, state: dict[str, Any], rng: random.Random
) -> None:
    (file,) = data_files(saved)
    for fqn in ("large", "small"):
        flip_value(file, state[fqn], 100)

    assert loads(saved, state, verify=False) == ["['large']: other bits", "['small']: other bits"]


def errors_of_flips(
    path: Path, state: dict[str, Any], flips: Iterable[tuple[int, int]]
) -> list[BaseException]:
    """Loads with each of these bits flipped: right values, or an error."""
    (file,) = data_files(path)
    errors = []
    for position, bit in flips:
        flip(file, position, bit)
        try:
            # Where there is no error, it is a bit that nobody reads.
            assert loads(path, state) == [], (position, bit)
        except CheckpointException as caught:
            errors.append(caught.failures[0][0])
        flip(file, position, bit)
    return errors


@pytest.mark.parametrize("damage", ["bytes", "length"])
def test_an_error_that_is_kept_keeps_no_buffers_and_no_data_files(
    damage: str, saved: Path, state: dict[str, Any]
) -> None:
    def rss_nbytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    (file,) = data_files(saved)
    if damage == "bytes":
        flip_value(file, state["small"])
    else:
        os.truncate(file, file.stat().st_size - 1)
    kept = [failure_of(loads, saved, {"small": state["small"]})]
    nbytes = rss_nbytes()
    kept += [failure_of(loads, saved, {"small": state["small"]}) for _ in range(16)]
    assert all(error.__traceback__ is not None for error in kept)
    assert rss_nbytes() - nbytes < 32 << 20  # One has buffers of 8 MiB.
    open_files = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    assert str(file) not in open_files


@pytest.mark.parametrize("fqn", ["large", "small", "step"])
def test_no_flipped_bit_of_a_zip_directory_changes_a_value(
    fqn: str, saved: Path, state: dict[str, Any], full: bool
) -> None:
    # Every bit of the directory's last entries and of the end record, or some: a method, a size, an
    # attribute that torch would act on without a word.
    info = place_of(saved, fqn)
    end = info.offset + info.length
    bits = [
        (position, bit)
        for position in range(end - 160, end, 1 if full else 3)
        for bit in (range(8) if full else [position % 8])
    ]
    errors = errors_of_flips(saved, {fqn: state[fqn]}, bits)
    for error in errors:
        assert isinstance(error, CorruptionError), repr(error)
        assert fqn in str(error)
    assert len(errors) > (500 if full else 15)


def test_no_flipped_bit_of_a_tensor_goes_unnoticed(
    saved: Path, state: dict[str, Any], rng: random.Random, full: bool
) -> None:
    tensors = {fqn: state[fqn] for fqn in ("large", "small")}
    errors: list[BaseException] = []
    for fqn in tensors:
        info = place_of(saved, fqn)
        # Mostly in the frame, which is at both ends.
        ends = [range(700), range(info.length - 700, info.length), range(info.length)]
        bits = [
            (info.offset + rng.choice(rng.choice(ends)), rng.randrange(8))
            for _ in range(150 if full else 25)
        ]
        errors += errors_of_flips(saved, tensors, bits)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert len(errors) > (100 if full else 15)


def test_no_flipped_bit_of_an_object_goes_unnoticed_and_each_is_corruption(
    tmp_path: Path, rng: random.Random
) -> None:
    state = {"object": list(range(1000))}
    save(state, FastWriter(tmp_path))
    info = place_of(tmp_path, "object")
    bits = [(info.offset + rng.randrange(info.length), rng.randrange(8)) for _ in range(60)]
    errors = errors_of_flips(tmp_path, state, bits)
    assert errors
    for error in errors:
        assert isinstance(error, CorruptionError), repr(error)
        assert "object" in str(error)


def test_damage_elsewhere_does_not_matter(saved: Path, state: dict[str, Any]) -> None:
    (file,) = data_files(saved)
    flip_value(file, state["large"])

    assert loads(saved, {"small": state["small"]}) == []


def test_swapped_slices_of_other_shapes_are_a_mismatch_or_corruption(
    saved: Path, state: dict[str, Any]
) -> None:
    places = {"large": place_of(saved, "small"), "small": place_of(saved, "large")}
    edit_metadata(saved, lambda fqn, info: places.get(fqn, info))

    for fqn in ("large", "small"):
        error = failure_of(load, blank({fqn: state[fqn]}), FastReader(saved))
        assert isinstance(error, MismatchError | CorruptionError)
        assert fqn in str(error)


@pytest.mark.parametrize("fqn", ["large", "small", "step"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset", -1),
        ("offset", -(1 << 62)),
        ("offset", 1),
        ("offset", 1 << 40),
        ("offset", (1 << 63) - 1),
        ("length", 0),
        ("length", 1),
        ("length", 21),
        ("length", -1),
        ("length", 1 << 60),
        ("length", (1 << 63) - 1),
    ],
)
def test_impossible_extents_are_an_error_before_memory_is_allocated(
    field: str, value: int, fqn: str, saved: Path, state: dict[str, Any]
) -> None:
    edit_metadata(
        saved, lambda f, info: dataclasses.replace(info, **{field: value}) if f == fqn else info
    )

    targets = blank(state)
    error = failure_of(load, targets, FastReader(saved))

    assert isinstance(error, CorruptionError), repr(error)
    assert fqn in str(error)
    inside_the_file = value in (0, 1, 21)
    if fqn == "large" or not inside_the_file:  # Smaller slices are opened when they are read.
        assert differences(blank(state), targets) == []


@pytest.mark.parametrize("fqn", ["large", "small", "step"])
@pytest.mark.parametrize(
    "path",
    [
        "../outside.distcp",
        "sub/../../outside.distcp",
        "..",
        "{absolute}",
        "",
        ".",
        "a\0b",
    ],
)
def test_metadata_that_leads_out_of_the_directory_is_refused(
    path: str, fqn: str, saved: Path, state: dict[str, Any]
) -> None:
    (file,) = data_files(saved)
    outside = saved.parent / "outside.distcp"
    outside.write_bytes(file.read_bytes())
    (saved / "sub").mkdir()
    path = path.format(absolute=outside)
    edit_metadata(
        saved, lambda f, info: dataclasses.replace(info, relative_path=path) if f == fqn else info
    )

    error = failure_of(load, blank(state), FastReader(saved))

    assert isinstance(error, CheckpointError), repr(error)
    if "outside" in path:
        assert isinstance(error, CorruptionError)


@pytest.mark.parametrize(
    "wanted",
    [
        {"small": torch.zeros(SMALL + 1)},
        {"small": torch.zeros(SMALL - 1)},
        {"small": torch.zeros(1, SMALL)},
        {"large": torch.zeros(LARGE)},
        {"absent": torch.zeros(1)},
        {"absent": None},
    ],
    ids=["longer", "shorter", "other rank", "flat", "absent tensor", "absent object"],
)
def test_wrong_shapes_and_missing_names_fail_as_with_the_stock_reader(
    wanted: dict[str, Any], saved: Path
) -> None:
    ours = failure_of(load, copy.deepcopy(wanted), FastReader(saved))
    stock = failure_of(load, copy.deepcopy(wanted), FileSystemReader(saved))

    assert type(ours) is type(stock)
    assert str(ours) == str(stock)


class Careless(DefaultLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return super().resolve_tensor(read_item)[1:]


class Shifted(DefaultLoadPlanner):
    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.storage_offsets:
                shift = torch.Size([1, *item.storage_offsets[1:]])
                object.__setattr__(item, "storage_offsets", shift)
        return plan


@pytest.mark.parametrize("planner", [Careless, Shifted])
@pytest.mark.parametrize("fqn", ["large", "small"])
def test_a_target_of_another_shape_and_elements_that_are_not_stored_are_a_mismatch(
    fqn: str, planner: type[DefaultLoadPlanner], saved: Path, state: dict[str, Any]
) -> None:
    error = failure_of(load, blank({fqn: state[fqn]}), FastReader(saved), planner=planner())

    assert isinstance(error, MismatchError)
    assert fqn in str(error)


class Breaks(DefaultSavePlanner):
    """Fails at the ``last``-th item; until then, finds the directory's old files as they were."""

    def __init__(self, path: Path, last: int, error: BaseException) -> None:
        super().__init__()
        self.path = path
        self.before = files(path)
        self.left = last
        self.error = error
        self.lock = threading.Lock()

    def resolve_data(self, write_item: Any) -> Any:
        with self.lock:
            now = files(self.path)
            assert {name: now.get(name) for name in self.before} == self.before
            self.left -= 1
            if self.left < 0:
                raise self.error
        return super().resolve_data(write_item)


@pytest.mark.parametrize("first", [FastWriter, FileSystemWriter])
@pytest.mark.parametrize("last", [0, 3, 6, 8])
@pytest.mark.parametrize(
    "options",
    [{}, {"thread_count": 3}, {"single_file_per_rank": False, "thread_count": 2}],
    ids=str,
)
def test_a_save_that_fails_midway_leaves_the_old_checkpoint_and_nothing_else(
    options: dict[str, Any], last: int, first: type, state: dict[str, Any], tmp_path: Path
) -> None:
    save(state, first(tmp_path))
    before = files(tmp_path)
    new = {str(i): torch.randn(1 << i) for i in range(8)} | {"object": "x" * 1000}
    planner = Breaks(tmp_path, last, RuntimeError("the planner broke"))

    error = failure_of(save, new, FastWriter(tmp_path, **options), planner=planner)

    assert str(error) in ("the planner broke", "cannot save 'object': the planner broke")
    assert files(tmp_path) == before
    assert loads(tmp_path, state) == []


@pytest.mark.parametrize("thread_count", [1, 3])
def test_an_interrupted_save_leaves_the_old_checkpoint_and_nothing_else(
    thread_count: int, saved: Path, state: dict[str, Any]
) -> None:
    before = files(saved)
    writer = FastWriter(saved, thread_count=thread_count)

    error = failure_of(save, state, writer, planner=Breaks(saved, 1, KeyboardInterrupt()))

    assert isinstance(error, KeyboardInterrupt)
    assert files(saved) == before
    save(state, writer, planner=Breaks(saved, 100, RuntimeError()))  # Which looks at them.
    assert loads(saved, state) == []


@pytest.mark.parametrize("thread", [0, 1, 2])
def test_one_failing_thread_of_three_fails_the_save(thread: int, tmp_path: Path) -> None:
    class OneThreadBreaks(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == str(thread):
                raise RuntimeError(f"no data for {write_item.index.fqn}")
            return super().resolve_data(write_item)

    state = {str(i): torch.randn(100_000 - i) for i in range(3)}  # One for each thread.
    writer = FastWriter(tmp_path, thread_count=3)

    error = failure_of(save, state, writer, planner=OneThreadBreaks())

    assert str(error) == f"no data for {thread}"
    assert files(tmp_path) == {}
    save(state, writer)
    assert loads(tmp_path, state) == []


SAVE_AGAIN_WHILE_HANDLING = """
import faulthandler, sys, torch
from pathlib import Path
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from checkpoints import data_files, loads, save
from torch_ckpt import FastWriter, IoOptions

faulthandler.dump_traceback_later(30, exit=True)  # A hang in the engine hears no signal.

class Breaks(DefaultSavePlanner):
    def resolve_data(self, item):
        if item.index.fqn == "3":
            raise RuntimeError("broke")
        return super().resolve_data(item).clone()  # A temporary: written in small batches.

path, threads = Path(sys.argv[1]), int(sys.argv[2])
small = IoOptions(buffer_nbytes=512 << 10)
writer = FastWriter(path, thread_count=threads, io=small)
state = {str(i): torch.randn(1 << 14) for i in range(8)}
held = []
for _ in range(4):
    try:
        save(state, writer, planner=Breaks())
    except CheckpointException as error:
        held.append(error)
save(state, writer)
print("differences:", loads(path, state), "files:", len(data_files(path)))
"""


@pytest.mark.thin("2")
@pytest.mark.parametrize("thread_count", [1, 2])
def test_a_failed_save_can_be_tried_again_while_its_error_is_held(
    thread_count: int, run_python: Callable[..., str], tmp_path: Path
) -> None:
    printed = run_python(SAVE_AGAIN_WHILE_HANDLING, tmp_path / "c", thread_count)

    assert printed == f"differences: [] files: {thread_count}\n"


def test_data_files_that_vanish_before_the_commit_fail_it(
    saved: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_names, "APPEARS_S", 0.1)
    metadata = (saved / ".metadata").read_bytes()

    class Robbed(FastWriter):
        def finish(self, **arguments: Any) -> None:
            for file in data_files(saved):
                if self.file_id in file.name:
                    file.unlink()
            super().finish(**arguments)

    error = failure_of(save, state, Robbed(saved))

    assert isinstance(error, StorageError)
    assert (saved / ".metadata").read_bytes() == metadata
    assert loads(saved, state) == []


SAVE_ABOVE_THE_LIMIT = """
import errno, resource, sys, torch
from pathlib import Path
from checkpoints import failure_of, files, loads, save
from torch_ckpt import FastWriter
from torch_ckpt.errors import StorageError

path = Path(sys.argv[1])
old = {"t": torch.arange(1000)}
save(old, FastWriter(path))
before = files(path)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
for kind in (bytes, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)):
    for thread_count in (1, 3):
        new = {str(i): kind(3 << 20) for i in range(3)}
        error = failure_of(save, new, FastWriter(path, thread_count=thread_count))
        assert isinstance(error, StorageError), repr(error)
        assert error.errno == errno.EFBIG, repr(error)
        assert not error.retriable
        assert ".distcp" in str(error), str(error)
        assert loads(path, old) == []
        assert {name: files(path).get(name) for name in before} == before
        assert len(files(path)) == len(before), f"left behind {sorted(files(path))}"
print("held:", error)
"""


@pytest.mark.thin("any")
@pytest.mark.parametrize("queue", ["threads", "any"])
def test_a_file_above_the_size_limit_is_a_storage_error(
    queue: str, run_python: Callable[..., str], tmp_path: Path
) -> None:
    printed = run_python(SAVE_ABOVE_THE_LIMIT, tmp_path / "c", TORCH_CKPT_IO=queue)

    assert "held: " in printed


@pytest.mark.parametrize("kind", ["tensor", "tensors", "object", "metadata"])
@pytest.mark.parametrize("direct", [True, False])
def test_a_full_disk_is_a_storage_error_and_the_old_checkpoint_loads(
    direct: bool, kind: str, state: dict[str, Any], small_disk: Path
) -> None:
    save(state, FastWriter(small_disk))
    before = files(small_disk)
    new: dict[str, Any] = {
        "tensor": {"t": torch.zeros(16 << 20, dtype=torch.uint8)},
        "tensors": {str(i): torch.zeros(1 << 20, dtype=torch.uint8) for i in range(16)},
        "object": {"t": bytes(16 << 20)},
        "metadata": {"x" * (8 << 20): torch.zeros(3)},
    }[kind]

    error = failure_of(save, new, FastWriter(small_disk, io=IoOptions(direct=direct)))

    assert isinstance(error, StorageError), repr(error)
    assert error.errno == errno.ENOSPC
    assert not error.retriable
    assert str(small_disk) in str(error)
    assert files(small_disk) == before
    assert loads(small_disk, state) == []


@pytest.mark.parametrize("path", ["", "new"])
def test_a_read_only_disk_is_a_storage_error(path: str, read_only_disk: Path) -> None:
    error = failure_of(save, {"t": torch.zeros(3)}, FastWriter(read_only_disk / path))

    assert isinstance(error, StorageError)
    assert error.errno == errno.EROFS
    assert str(read_only_disk) in str(error)


def test_a_file_in_place_of_the_directory_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        error = failure_of(save, {"t": torch.zeros(3)}, FastWriter(path))
        assert isinstance(error, OSError)
        assert error.errno in (errno.ENOTDIR, errno.EEXIST)
        with pytest.raises(CheckpointError):
            FastReader(path).read_metadata()


def test_errors_of_partial_reads_name_the_tensor_too(
    saved: Path, state: dict[str, Any], rng: random.Random
) -> None:
    (file,) = data_files(saved)
    with open(file, "r+b") as stream:
        stream.truncate(place_of(saved, "large").offset + 100)

    targets = {"large": torch.zeros(LARGE // 500, 500)}
    error = failure_of(load, targets, FastReader(saved), planner=CuttingLoadPlanner(rng))

    assert isinstance(error, CorruptionError)
    assert "large" in str(error)


ERRORS = [
    CheckpointError("a bug"),
    CancelledError("stopped"),
    CorruptionError("damaged"),
    MismatchError("other"),
    UnsupportedError("not here"),
    NotFoundError("gone"),
    NotFoundError("gone", errno.ENOTDIR),
    StorageError("full", errno.ENOSPC),
    StorageError("busy", errno.EBUSY),
    StorageError("without errno"),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_errors_pickle_with_all_they_say_and_are_also_what_python_would_raise(error: Any) -> None:
    assert isinstance(error, CheckpointError)
    assert isinstance(error, RuntimeError)
    assert issubclass(NotFoundError, FileNotFoundError)
    assert issubclass(StorageError, OSError)
    assert issubclass(UnsupportedError, NotImplementedError)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert other.args == error.args
        assert getattr(other, "errno", None) == getattr(error, "errno", None)
        assert getattr(other, "retriable", None) == getattr(error, "retriable", None)


def test_errors_from_the_engine_pickle_inside_dcps_exception(saved: Path) -> None:
    (file,) = data_files(saved)
    file.unlink()
    with pytest.raises(CheckpointException) as caught:
        load({"small": torch.zeros(SMALL)}, FastReader(saved))

    error = pickle.loads(pickle.dumps(caught.value)).failures[0][0]

    assert isinstance(error, NotFoundError)
    assert error.errno == errno.ENOENT
    assert str(error) == str(caught.value.failures[0][0])


def test_storage_errors_say_whether_to_try_again() -> None:
    for number in (errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ETIMEDOUT):
        assert StorageError("failed", number).retriable is True
    for number in (errno.ENOSPC, errno.EIO, None):
        assert StorageError("failed", number).retriable is False


def test_a_torch_that_the_module_cannot_read_is_named_with_both_versions_and_the_remedy(
    run_python: Callable[..., str],
) -> None:
    script = """
import sys
import torch
for name in [name for name in sys.modules if name.partition(".")[0] == "torch_ckpt"]:
    del sys.modules[name]
CHANGE
import torch_ckpt
try:
    torch_ckpt.FastWriter
except ImportError as error:
    print(error)
"""
    cases = {
        # As if the linker refused it.
        'sys.modules["torch_ckpt._core._tensor_view"] = None': "import of torch_ckpt",
        # As with a torch whose views of complex tensors differ.
        "torch.Tensor.conj = torch.Tensor.clone": "it reads wrong facts of tensors: ['PLAIN', 'PLA",
    }
    for change, reason in cases.items():
        printed = run_python(script.replace("CHANGE", change))
        begin = f"torch_ckpt {__version__} does not work with torch {torch.__version__}: "
        assert printed.startswith(begin + reason), printed
        assert "pip install --upgrade torch torch-ckpt" in printed
        assert printed.count("\n") == 1
