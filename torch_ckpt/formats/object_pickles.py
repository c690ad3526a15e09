"""Unpickles what ``torch.save`` has pickled, without running anything that the pickle asks for.

Torch reads the archive, and the unpickler here its pickle. It allows what
``torch.load(weights_only=True)`` allows, the classes of ``torch.serialization.add_safe_globals``
included, and classes of plain data (``data_classes``) besides.
"""

from __future__ import annotations

import _compat_pickle
import collections
import functools
import io
import os
import pathlib
import pickle
import struct
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

import torch
from torch._weights_only_unpickler import _get_allowed_globals
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Buffer

from torch_ckpt._core import _native
from torch_ckpt.errors import CheckpointError
from torch_ckpt.formats.data_classes import DATA_CLASSES, NeedsState, class_named
from torch_ckpt.formats.pickles import ForbiddenPickleError

__all__ = ["HOW_TO_ALLOW", "load_object", "refused_classes", "warn_of_refused"]

HOW_TO_ALLOW = (
    "pass their classes to torch.serialization.add_safe_globals([...]), or load with "
    "trust_pickle=True"
)


def load_object(
    source: IO[bytes],
    *,
    trust_pickle: bool = False,
    map_location: str | None = None,
    mapped: pathlib.Path | None = None,
) -> object:
    """Unpickles what ``torch.save`` has written.

    Args:
        source: The bytes.
        trust_pickle: Whether to unpickle anything, which may run any code.
        map_location: As for ``torch.load``.
        mapped: The file that they are read from, if its storages are to be mapped into memory.

    Raises:
        ForbiddenPickleError: It asks for more than it may have. Names all classes and functions
            that are refused.
        Exception: Whatever else ``torch.load`` raises on damage.
    """
    if trust_pickle:
        file = source if mapped is None else mapped
        how: Any = {"map_location": map_location, "mmap": mapped is not None}
        return torch.load(file, weights_only=False, **how)
    storage: Any = None
    if mapped is not None:
        nbytes = source.seek(0, io.SEEK_END)
        source.seek(0)
        storage = torch.UntypedStorage.from_file(os.fspath(mapped), False, nbytes)
    return _load_stream(source, map_location, storage)


def _load_stream(
    stream: IO[bytes], map_location: str | None, storage: torch.UntypedStorage | None = None
) -> object:
    """What torch.load does once it has seen what a stream is.

    It is not called itself, for it hands TorchScript and files of torch before 1.6 over to others.
    """
    if stream.read(len(_ARCHIVE)) != _ARCHIVE:
        raise pickle.UnpicklingError("it is no archive of torch.save")
    stream.seek(0)
    load: Any = torch.serialization._load
    with torch.serialization._open_zipfile_reader(stream) as archive:
        try:
            return load(
                archive, map_location, _DATA_PICKLE, overall_storage=storage, encoding="utf-8"
            )
        except ForbiddenPickleError as error:
            try:
                refused = _refused(archive.get_record("data.pkl"))
            except CheckpointError as why:
                raise ForbiddenPickleError(str(why)) from error
            if not refused:
                raise
            named = ", ".join(f"GLOBAL {name}" for name in refused)
            raise ForbiddenPickleError(named) from error


_ARCHIVE = b"PK\3\4"

_MOST_NAMED = 20  # FQNs in a warning.


def refused_classes(archive: Buffer) -> list[str]:
    """What :func:`load_object` would refuse of an archive that ``torch.save`` has just written.

    Returns:
        Names of classes and functions, with their modules; none if it would load. None either for
        bytes that are no such archive: a planner's own, which its ``load_bytes`` is to read.
    """
    data = memoryview(archive)
    if len(data) < 30 or bytes(data[:4]) != _ARCHIVE:
        return []
    name_nbytes, extra_nbytes = struct.unpack_from("<HH", data, 26)
    name_end = 30 + name_nbytes
    if not bytes(data[30:name_end]).endswith(b"/data.pkl"):
        return []
    try:
        return _refused(data[name_end + extra_nbytes :])
    except CheckpointError as error:
        return [str(error)]


def warn_of_refused(refused: Mapping[str, Sequence[str]]) -> None:
    """Warns of all values of a save that a load will refuse, in one warning.

    Args:
        refused: By FQN what :func:`refused_classes` returned.
    """
    if not refused:
        return
    fqns = [f"{fqn!r} ({', '.join(names)})" for fqn, names in refused.items()]
    if len(fqns) > _MOST_NAMED:
        fqns[_MOST_NAMED:] = [f"and {len(fqns) - _MOST_NAMED} more"]
    classes = sorted({name for names in refused.values() for name in names})
    warnings.warn(
        f"torch_ckpt saves {len(refused)} values that a load will refuse, because unpickling them "
        f"may run code: {', '.join(fqns)}. To load them, {HOW_TO_ALLOW}. All classes: "
        f"{', '.join(classes)}",
        stacklevel=2,
    )


def _refused(pickled: Buffer) -> list[str]:
    names = {_current_name(*name) for name in _native.pickle_globals(pickled)}
    unknown = {name for name in names if name not in _ALLOWED}
    if unknown:
        unknown -= {name for name in _allowed_by_user() if not _is_blocked(name)}
    return sorted(unknown)


def _is_blocked(name: str) -> bool:
    """Whether torch refuses the module whatever a user allows."""
    return name.rpartition(".")[0] in ("sys", "os", "posix", "nt")


def _current_name(module: str, name: str) -> str:
    """The full name in Python 3; protocol 2 stores names of Python 2."""
    module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"


def _allowed_by_user() -> dict[str, Any]:
    """What ``torch.serialization.add_safe_globals`` was given, by name."""
    named = {}
    for entry in torch.serialization.get_safe_globals():
        value, name = (
            entry
            if isinstance(entry, tuple)
            else (entry, f"{entry.__module__}.{entry.__qualname__}")
        )
        named[name] = value
    return named


_TORCHS = {
    name: value for name, value in _get_allowed_globals().items() if name not in DATA_CLASSES
}
_ALLOWED = _TORCHS.keys() | DATA_CLASSES.keys()

# What torch.save has a pickle call. Other names of torch's list are values: dtypes, and classes of
# tensors and storages, whose constructors allocate what a number says.
_REBUILDS = frozenset(id(v) for n, v in _TORCHS.items() if n.startswith("torch._utils._rebuild_"))
_CALLED = _REBUILDS | {
    id(_TORCHS[name])
    for name in (
        *("torch._tensor._rebuild_from_type_v2", "torch.nn.parameter.Parameter"),
        *("torch.Size", "torch.device", "torch.serialization._get_layout", "builtins.complex"),
    )
}

_MAX_DEPTH = 100
_BUDGET_PER_BYTE = 64
_LEAST_BUDGET = 1 << 20

_Base: Any = pickle._Unpickler


class _DataUnpickler(_Base):  # type: ignore[misc]
    """Python's unpickler, restricted as torch's weights-only unpickler is. Knows data classes too.

    Values that Python hashes or frees by recursion are nested to a bounded depth. Their sizes, as
    often as a walk would visit them, and the bytes that are made, are linear in the pickle.
    Torch gives it ``persistent_load``, which makes the storages of tensors.
    """

    def __init__(self, file: io.BytesIO, **how: Any) -> None:
        super().__init__(file, **how)
        self._data_classes: dict[int, str] = {}  # Names, by id of what they name.
        self._without_state = 0  # How many objects still lack their state.
        self._budget = _LEAST_BUDGET + _BUDGET_PER_BYTE * len(file.getbuffer())
        # Depth and weight of tuples and their like, by id; the value keeps the id.
        self._measured: dict[int, tuple[int, int, object]] = {}
        self._closed: set[int] = set()  # Ids of deques that may be part of others.

    def load(self) -> object:
        """The object that is pickled."""
        value = super().load()
        if self._without_state:
            raise ForbiddenPickleError("an object without its state")
        return value

    def find_class(self, module: str, name: str) -> object:
        """What a name stands for, if it is allowed."""
        full_name = _current_name(module, name)
        if full_name in DATA_CLASSES:
            value = class_named(full_name)
            self._data_classes[id(value)] = full_name
            return value
        if full_name in _TORCHS:
            return _TORCHS[full_name]
        if not _is_blocked(full_name) and full_name in self._users:
            return self._users[full_name]
        raise ForbiddenPickleError(f"GLOBAL {full_name}")

    @functools.cached_property
    def _users(self) -> dict[str, Any]:
        named = _allowed_by_user()
        return {name: value for name, value in named.items() if name not in DATA_CLASSES}

    def _is_users(self, value: Any) -> bool:
        return id(value) not in self._data_classes and any(
            value is one for one in self._users.values()
        )

    def _load_reduce(self) -> None:
        arguments, function = self._pop_call()
        if self._make_data(function, arguments):
            return
        is_allowed = id(function) in _CALLED or self._is_users(function)
        if not is_allowed or function is DeviceMesh:  # Which would start a process group.
            raise ForbiddenPickleError(f"Trying to call {_name_of(function)}")
        if function is torch._tensor._rebuild_from_type_v2:
            self._check_rebuild(*arguments)
        self.append(function(*arguments))

    def _check_rebuild(self, function: Any, kind: Any, arguments: Any, _: Any) -> None:
        """Checks the function that ``_rebuild_from_type_v2`` calls, and the class that it makes."""
        is_tensor = isinstance(kind, type) and issubclass(kind, torch.Tensor)
        if id(function) not in _REBUILDS or not is_tensor or type(arguments) is not tuple:
            raise ForbiddenPickleError(f"Trying to call {_name_of(function)}")

    def _load_newobj(self) -> None:
        arguments, kind = self._pop_call()
        if self._make_data(kind, arguments):
            return
        if kind is torch.nn.Parameter:
            self.append(kind(*arguments))
        elif self._is_users(kind):
            self.append(kind.__new__(kind, *arguments))
        else:
            raise ForbiddenPickleError(f"Trying to make a {_name_of(kind)}")

    def _pop_call(self) -> tuple[tuple[Any, ...], Any]:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple:
            raise ForbiddenPickleError("a call without a tuple of arguments")
        return arguments, function

    def _make_data(self, function: Any, arguments: tuple[Any, ...]) -> bool:
        """Makes an object if the function is a data class; returns whether it is one."""
        name = self._data_classes.get(id(function))
        if name is None:
            return False
        for argument in arguments:
            if isinstance(argument, list | tuple):
                self._charge_walk(argument)
        value = _make(name, DATA_CLASSES[name], arguments)
        if type(value) is NeedsState:
            value.name = name
            self._without_state += 1
        else:
            self._measure(value, value if type(value) in (set, frozenset) else arguments)
        self.append(value)
        return True

    def _load_build(self) -> None:
        state, value = self.stack.pop(), self.stack[-1]
        if type(value) is NeedsState:
            made = _make(value.name, value.make, (state,))
            self._measure(made, _parts_of(state))
            self.stack[-1] = made
            self._without_state -= 1
            if value.key is not None:
                self.memo[value.key] = made
        elif type(value) is collections.OrderedDict and type(state) is dict:
            vars(value).update(state)
        elif type(value) is torch.nn.Parameter or self._is_users(type(value)):
            self.append(state)
            self.load_build()
        else:
            raise ForbiddenPickleError(f"Can only build what is allowed, not a {type(value)}")

    def _charge(self, cost: int) -> None:
        self._budget -= cost
        if self._budget < 0:
            raise ForbiddenPickleError("few bytes that stand for very many")

    def _charge_walk(self, parts: Iterable[Any]) -> None:
        for part in parts:
            known = self._measured.get(id(part))
            self._charge(1 if known is None else known[1])

    def _measure(self, value: Any, parts: Iterable[Any]) -> None:
        """Notes how deep a value is, and how many values a walk of it visits."""
        depth, weight, _ = self._measured.get(id(value), (1, 1, None))  # A deque grows.
        for part in parts:
            known = self._measured.get(id(part))
            if known is not None:
                depth = max(depth, known[0] + 1)
                weight += known[1]
            else:
                weight += 1
        if depth > _MAX_DEPTH:
            raise ForbiddenPickleError("values that are nested too deeply")
        if weight > _LEAST_BUDGET + self._budget:
            raise ForbiddenPickleError("few bytes that stand for very many")
        if isinstance(value, bytes | bytearray):
            self._charge(len(value))
        elif not isinstance(value, torch.Tensor):
            self._charge(int(getattr(value, "nbytes", 0)))  # An array has some.
        if depth > 1 or weight > 1:
            self._measured[id(value)] = depth, weight, value

    def _make_tuple(self, parts: list[Any]) -> None:
        value = tuple(parts)
        self._measure(value, value)
        self.append(value)

    def _load_short_tuple(self, length: int) -> None:
        parts = self.stack[-length:]
        del self.stack[-length:]
        self._make_tuple(parts)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        kind = type(target)
        is_dict = kind in (dict, collections.OrderedDict, collections.Counter)
        if not is_dict and not self._is_users(kind):
            raise ForbiddenPickleError(f"Can only set items of dicts, not of a {kind}")
        self._charge_walk(items[::2])  # To hash them.
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key] = value

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _extend(self, elements: list[Any]) -> None:
        target = self.stack[-1]
        kind = type(target)
        if kind is collections.deque and id(target) not in self._closed:
            self._measure(target, elements)
        elif kind is not list and not self._is_users(kind):
            raise ForbiddenPickleError(f"Can only append to lists, not to a {kind}")
        target.extend(elements)

    def _load_append(self) -> None:
        self._extend([self.stack.pop()])

    def _load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _remember(self, nbytes: int) -> None:
        key, value = int.from_bytes(self.read(nbytes), "little"), self.stack[-1]
        if type(value) is NeedsState:
            value.key = key
        self.memo[key] = value

    def _recall(self, nbytes: int) -> None:
        value = self.memo[int.from_bytes(self.read(nbytes), "little")]
        if type(value) is NeedsState:
            raise ForbiddenPickleError("an object that is part of its own state")
        if type(value) is collections.deque:
            self._closed.add(id(value))
        self.append(value)

    def _refuse(self) -> None:
        raise ForbiddenPickleError("an opcode that torch.save does not write")

    dispatch = {  # noqa: RUF012
        **dict.fromkeys(range(256), _refuse),
        **{
            code[0]: _Base.dispatch[code[0]]
            for code in (
                *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.BINPERSID),
                *(pickle.EMPTY_TUPLE, pickle.EMPTY_LIST, pickle.EMPTY_DICT),
                *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT, pickle.BINUNICODE),
                *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4),
            )
        },
        pickle.REDUCE[0]: _load_reduce,
        pickle.NEWOBJ[0]: _load_newobj,
        pickle.BUILD[0]: _load_build,
        pickle.TUPLE1[0]: lambda self: self._load_short_tuple(1),
        pickle.TUPLE2[0]: lambda self: self._load_short_tuple(2),
        pickle.TUPLE3[0]: lambda self: self._load_short_tuple(3),
        pickle.TUPLE[0]: lambda self: self._make_tuple(self.pop_mark()),
        pickle.SETITEM[0]: _load_setitem,
        pickle.SETITEMS[0]: _load_setitems,
        pickle.APPEND[0]: _load_append,
        pickle.APPENDS[0]: _load_appends,
        pickle.BINPUT[0]: lambda self: self._remember(1),
        pickle.LONG_BINPUT[0]: lambda self: self._remember(4),
        pickle.BINGET[0]: lambda self: self._recall(1),
        pickle.LONG_BINGET[0]: lambda self: self._recall(4),
    }


def _name_of(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _parts_of(state: Any) -> Iterable[Any]:
    """What a state holds, that an array or dtype made of it holds too."""
    for part in state if isinstance(state, tuple) else ():
        yield part
        if isinstance(part, dict):
            yield from (one for field in part.values() if type(field) is tuple for one in field)
        elif isinstance(part, list | tuple):
            yield from part


def _make(name: str, make: Callable[..., Any], arguments: Any) -> Any:
    try:
        return make(*arguments)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise pickle.UnpicklingError(f"{name}: {error}") from error


_DATA_PICKLE = types.SimpleNamespace(__name__=__name__, Unpickler=_DataUnpickler)
"""The ``pickle_module`` of ``torch.load``."""
