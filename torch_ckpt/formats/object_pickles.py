"""Unpickles files of ``torch.save`` without running code that the pickle requests.

Torch reads the archive, and the unpickler in this module reads its pickle. The unpickler allows the
globals of ``torch.load(weights_only=True)``, including ``torch.serialization.add_safe_globals``. It
also allows plain data classes (``data_classes``).
"""

from __future__ import annotations

import collections
import functools
import io
import itertools
import os
import pathlib
import pickle
import types
from collections.abc import Callable, Iterable
from typing import IO, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import cpu_as_default
from torch_ckpt._core.unpickling import MAIN_OF_SPAWNED, allowed_by_user, main_module
from torch_ckpt.errors import CheckpointError, text_of
from torch_ckpt.formats.allowed_classes import (
    ARCHIVE,
    NO_STAND_INS,
    TORCH_GLOBALS,
    StandIns,
    current_name,
    is_blocked,
    refused_names,
)
from torch_ckpt.formats.data_classes import (
    DATA_CLASSES,
    WITH_ATTRIBUTES,
    NeedsState,
    class_named,
    set_attributes,
)
from torch_ckpt.formats.expansion import OBJECTS_NBYTES, Expansion, ExpansionError
from torch_ckpt.formats.pickle_budget import Budget
from torch_ckpt.formats.pickles import ForbiddenPickleError

__all__ = ["Refused", "load_object"]


class Refused:
    """Replaces a value whose class or function is forbidden, or that cannot be created.

    ``number`` is the number of the value in its pickle, so that keys of a dict have different
    texts. ``parts`` are the arguments and state in the pickle. ``error`` is the reason why a value
    of an allowed class cannot be created.
    """

    def __init__(
        self, name: str, number: int, *parts: object, error: Exception | None = None
    ) -> None:
        self.name = name
        self.number = number
        self.parts = [*parts]
        self.error = error

    def __repr__(self) -> str:
        why = "is not allowed" if self.error is None else "cannot be made"
        return f"<{self.name} {self.number}, which {why}>"


def load_object(
    source: IO[bytes],
    *,
    trust_pickle: bool = False,
    stand_ins: StandIns = NO_STAND_INS,
    refuse_later: bool = False,
    storages: dict[int, str] | None = None,
    map_location: str | None = None,
    mapped: pathlib.Path | None = None,
    expansion: Expansion | None = None,
) -> object:
    """Unpickles an archive of ``torch.save``. On damage, raises the errors of ``torch.load``.

    Raises ForbiddenPickleError, which names all forbidden classes and functions, and ExpansionError
    if the pickle expands to more than its bytes justify.

    Args:
        source: The archive.
        trust_pickle: Whether the pickle may contain any class and run any code.
        stand_ins: Further classes that the pickle may contain. They are not imported, unless
            ``trust_pickle`` is set.
        refuse_later: Whether to replace each forbidden, too large or invalid value by
            :class:`Refused`, so that the others can be used.
        storages: Receives the address of each non-empty storage -> key of its record. Remains empty
            with ``trust_pickle``.
        map_location: As for ``torch.load``.
        mapped: Path of the archive, to map its storages into memory.
        expansion: The budget shared by several pickles of a load.
    """
    if trust_pickle:
        file = source if mapped is None else mapped
        options: Any = {"map_location": map_location, "mmap": mapped is not None}
        with cpu_as_default():  # Torch rebuilds some kinds of tensors on the default device.
            try:
                return torch.load(file, weights_only=False, **options)
            except ModuleNotFoundError as error:
                if error.name != MAIN_OF_SPAWNED:
                    raise
            source.seek(0)
            return torch.load(file, weights_only=False, pickle_module=_TRUSTING, **options)
    storage: Any = None
    if mapped is not None:
        nbytes = source.seek(0, io.SEEK_END)
        source.seek(0)
        storage = torch.UntypedStorage.from_file(os.fspath(mapped), False, nbytes)
    pickle_module = _pickle_module(
        stand_ins=stand_ins,
        refuse_later=refuse_later,
        storages={} if storages is None else storages,
        expansion=Expansion(OBJECTS_NBYTES) if expansion is None else expansion,
    )
    return _load_stream(source, map_location, storage, stand_ins, pickle_module)


class _TrustingUnpickler(pickle.Unpickler):
    """Python's unpickler, which also finds classes of the main script of a spawned process."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(main_module(module), name)


_TRUSTING: Any = types.SimpleNamespace(
    __name__=__name__, Unpickler=_TrustingUnpickler, load=pickle.load
)
"""The ``pickle_module`` of ``torch.load`` for trusted files."""


def _load_stream(
    stream: IO[bytes],
    map_location: str | None,
    storage: torch.UntypedStorage | None,
    stand_ins: StandIns,
    pickle_module: Any,
) -> object:
    """Loads an archive as ``torch.load`` loads one.

    ``torch.load`` itself would pass TorchScript files and legacy files to other unpicklers.
    """
    if stream.read(len(ARCHIVE)) != ARCHIVE:
        raise pickle.UnpicklingError("it is not an archive of torch.save")
    _check_records(stream)
    stream.seek(0)
    load: Any = torch.serialization._load
    with torch.serialization._open_zipfile_reader(stream) as archive:
        try:
            return load(
                archive,
                map_location,
                pickle_module,
                overall_storage=storage,
                encoding="utf-8",
            )
        except ForbiddenPickleError as error:
            try:
                refused = refused_names(archive.get_record("data.pkl"), stand_ins)
            except CheckpointError as why:
                raise ForbiddenPickleError(str(why)) from error
            if not refused:
                raise
            names = ", ".join(f"GLOBAL {name}" for name in refused)
            raise ForbiddenPickleError(names) from error


def _check_records(stream: IO[bytes]) -> None:
    """Raises UnsupportedError if a record of an archive is compressed: torch writes none.

    Torch would expand a record to up to a thousand times its length.
    """
    stream.seek(0, io.SEEK_END)
    end = stream.tell()
    begin, offset = end, max(end - _TAIL_NBYTES, 0)
    while offset < begin:
        stream.seek(offset)
        begin, offset = offset, _native.check_archive(stream.read(), end)


_TAIL_NBYTES = 64 << 10
"""Bytes at the end of an archive that usually contain its directory."""

# Ids of the functions that pickles of torch.save call. The other globals of torch are values, such
# as dtypes and classes of storages, whose constructors would allocate any number of bytes.
_REBUILDS = frozenset(
    id(value) for name, value in TORCH_GLOBALS.items() if name.startswith("torch._utils._rebuild_")
)
_CALLABLE = _REBUILDS | {
    id(TORCH_GLOBALS[name])
    for name in (
        *("torch._tensor._rebuild_from_type_v2", "torch.nn.parameter.Parameter"),
        *("torch.device", "torch.serialization._get_layout", "builtins.complex"),
    )
}

_NOT_MADE = (ExpansionError, pickle.UnpicklingError)
"""Errors raised if a value of an allowed class cannot be created."""

_Base: Any = pickle._Unpickler


class _DataUnpickler(_Base):  # type: ignore[misc]
    """Python's unpickler, restricted to data classes and to torch's weights-only globals.

    Torch sets ``persistent_load``, which makes the storages of tensors.

    The nesting of values that Python hashes or frees recursively is bounded. The bytes that a call
    copies, hashes and allocates are charged before the call, and are linear in the length of the
    pickle.
    """

    stand_ins: StandIns = NO_STAND_INS
    refuse_later = False
    storages: dict[int, str]
    expansion: Expansion

    def __init__(self, file: io.BytesIO, **options: Any) -> None:
        super().__init__(file, **options)
        self._data_classes: dict[int, str] = {}  # Id of a class or function -> its name.
        self._without_state = 0  # Number of objects still without their state.
        self.expansion.justify(len(file.getbuffer()))
        self._budget = Budget(self.expansion)
        self._fixed_deques: set[int] = set()  # Ids of deques that other values may contain.
        self._first_refused: Exception | None = None
        self._numbers = itertools.count()  # For refused values.

    def load(self) -> object:
        try:
            value = super().load()
        except ExpansionError:
            raise
        except Exception as error:
            if self._first_refused is None:
                raise
            # An allowed function may need the refused value.
            raise self._first_refused from error
        if self._without_state:
            raise ForbiddenPickleError("an object without its state")
        return value

    def find_class(self, module: str, name: str) -> object:
        """Returns the class or function of a name, or raises ForbiddenPickleError."""
        full_name = current_name(module, name)
        if full_name in DATA_CLASSES:
            try:
                value = class_named(full_name)
            except ImportError as error:
                return self._not_made(error, full_name)
            self._data_classes[id(value)] = full_name
            return value
        if full_name in self.stand_ins:
            make = self.stand_ins[full_name]  # Replaces the class, which is not imported.
            self._data_classes[id(make)] = full_name
            return make
        if full_name in TORCH_GLOBALS:
            return TORCH_GLOBALS[full_name]
        if not is_blocked(full_name) and full_name in self._user_globals:
            return self._user_globals[full_name]
        forbidden = ForbiddenPickleError(f"GLOBAL {full_name}")
        if not self.refuse_later:
            raise forbidden
        self._first_refused = self._first_refused or forbidden
        return Refused(full_name, next(self._numbers))

    @functools.cached_property
    def _user_globals(self) -> dict[str, Any]:
        allowed = allowed_by_user()
        return {name: value for name, value in allowed.items() if name not in DATA_CLASSES}

    def _is_user_global(self, value: Any) -> bool:
        return id(value) not in self._data_classes and any(
            value is allowed for allowed in self._user_globals.values()
        )

    def _load_reduce(self) -> None:
        arguments, function = self._pop_call()
        if self._refuse_call(function, arguments) or self._make_data(function, arguments):
            return
        is_allowed = id(function) in _CALLABLE or self._is_user_global(function)
        if not is_allowed or function is DeviceMesh:  # A mesh starts a process group.
            raise ForbiddenPickleError(f"Trying to call {_name_of(function)}")
        if function is torch._tensor._rebuild_from_type_v2:
            _check_rebuild(*arguments)
        if self._pay(function, arguments):
            self.append(function(*arguments))

    def _load_newobj(self) -> None:
        arguments, kind = self._pop_call()
        if self._refuse_call(kind, arguments) or self._make_data(kind, arguments):
            return
        if kind is not torch.nn.Parameter and not self._is_user_global(kind):
            raise ForbiddenPickleError(f"Trying to make a {_name_of(kind)}")
        if self._pay(kind, arguments):
            made = (
                kind(*arguments) if kind is torch.nn.Parameter else kind.__new__(kind, *arguments)
            )
            self.append(made)

    def _pay(self, function: Any, arguments: tuple[Any, ...]) -> bool:
        """Charges a call; returns whether it is affordable. If not, pushes a refused value.

        Calls of other classes that the user allows are not charged.
        """
        name = self._data_classes.get(id(function)) or _full_name_of(function)
        try:
            if name in DATA_CLASSES or name in self.stand_ins or id(function) in _CALLABLE:
                _make(name, self._budget.charge_call, (name, arguments))
            elif _is_container_class(function):
                self._budget.charge_any_call(arguments)
        except _NOT_MADE as error:
            self.append(self._not_made(error, name, *arguments))
            return False
        return True

    def _not_made(self, error: Exception, name: str, *parts: object) -> Refused:
        """Returns the replacement of a value of an allowed class that cannot be created."""
        if not self.refuse_later:
            raise error
        self._first_refused = self._first_refused or error
        return Refused(name, next(self._numbers), *parts, error=error)

    def _refuse_call(self, function: Any, arguments: tuple[Any, ...]) -> bool:
        """Pushes a refused value if a call needs one, and returns whether it does."""
        first = next((one for one in (function, *arguments) if type(one) is Refused), None)
        if first is not None:
            self._budget.charge(len(arguments))
            number = next(self._numbers)
            self.append(Refused(first.name, number, *arguments, error=first.error))
        return first is not None

    def _pop_call(self) -> tuple[tuple[Any, ...], Any]:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple:
            raise ForbiddenPickleError("a call without a tuple of arguments")
        return arguments, function

    def _make_data(self, function: Any, arguments: tuple[Any, ...]) -> bool:
        """Pushes a new object if the function is a data class, and returns whether it is one."""
        name = self._data_classes.get(id(function))
        if name is None:
            return False
        if not self._pay(function, arguments):
            return True
        make = DATA_CLASSES[name] if name in DATA_CLASSES else self.stand_ins[name]
        try:
            value = _make(name, make, arguments)
        except pickle.UnpicklingError as error:
            value = self._not_made(error, name, *arguments)
        if type(value) is NeedsState:
            value.name = name
            self._without_state += 1
        else:
            elements = value if type(value) in (set, frozenset) else arguments
            texts = sum(len(one) for one in arguments if isinstance(one, str | bytes))
            self._budget.measure(value, elements, texts)
        self.append(value)
        return True

    def _load_build(self) -> None:
        state, value = self.stack.pop(), self.stack[-1]
        kind = type(value)
        if kind is NeedsState:
            self._build(value, state)
        elif kind is Refused:
            value.parts.append(state)
        elif kind in WITH_ATTRIBUTES:
            self._set_attributes(value, state)
        elif kind is torch.nn.Parameter or self._is_user_global(kind):
            self._budget.charge_call("", (state,))
            self.append(state)
            self.load_build()
        else:
            raise ForbiddenPickleError(f"Can only build allowed classes, not a {kind}")

    def _set_attributes(self, value: Any, state: Any) -> None:
        self._budget.charge_call("", (state,))
        name = _full_name_of(type(value))
        try:
            _make(name, set_attributes, (value, state))
        except pickle.UnpicklingError as error:
            # Other values may refer to it, so it remains, and contains the refused value.
            value.__dict__[""] = self._not_made(error, name, state)

    def _build(self, value: NeedsState, state: Any) -> None:
        """Replaces an object on the stack that needed its state."""
        made: Any
        try:
            self._budget.charge_call("", (state,))
            self._budget.charge(_make(value.name, value.nbytes, (state,)))
            made = _make(value.name, value.make, (state,))
            self._budget.measure(made, _elements_of(state))
        except _NOT_MADE as error:
            made = self._not_made(error, value.name, state)
        self.stack[-1] = made
        self._without_state -= 1
        if value.key is not None:
            self.memo[value.key] = made

    def _make_tuple(self, elements: list[Any]) -> None:
        value = tuple(elements)
        try:
            self._budget.measure(value, value)
        except ExpansionError as error:
            self.append(self._not_made(error, "builtins.tuple", *elements))
        else:
            self.append(value)

    def _load_short_tuple(self, length: int) -> None:
        elements = self.stack[-length:]
        del self.stack[-length:]
        self._make_tuple(elements)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        kind = type(target)
        if kind is Refused:
            target.parts += items
            return
        is_dict = kind in (dict, collections.OrderedDict, collections.Counter)
        if not is_dict and not self._is_user_global(kind):
            raise ForbiddenPickleError(f"Can only set items of dicts, not of a {kind}")
        self._budget.charge_hashes(items[::2])
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key] = value

    def _load_storage(self) -> None:
        pid = self.stack[-1]
        key = pid[2] if type(pid) is tuple and len(pid) == 5 else None
        # Torch ignores case in record names, so many keys could read one record.
        if type(key) is not str or not (key.isascii() and key.isdecimal()):
            raise ForbiddenPickleError("a storage whose record is not a number")
        self.load_binpersid()
        address = self.stack[-1]._data_ptr()
        if address:
            self.storages[address] = key

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _extend(self, elements: list[Any]) -> None:
        target = self.stack[-1]
        kind = type(target)
        if kind is Refused:
            target.parts += elements
            return
        if kind is collections.deque and id(target) not in self._fixed_deques:
            self._budget.measure(target, elements)
        elif kind is not list and not self._is_user_global(kind):
            raise ForbiddenPickleError(f"Can only append to lists, not to a {kind}")
        target.extend(elements)

    def _load_append(self) -> None:
        self._extend([self.stack.pop()])

    def _load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _memoize(self, nbytes: int) -> None:
        key, value = int.from_bytes(self.read(nbytes), "little"), self.stack[-1]
        if type(value) is NeedsState:
            value.key = key
        self.memo[key] = value

    def _push_memoized(self, nbytes: int) -> None:
        value = self.memo[int.from_bytes(self.read(nbytes), "little")]
        if type(value) is NeedsState:
            raise ForbiddenPickleError("an object within its own state")
        if type(value) is collections.deque:
            self._fixed_deques.add(id(value))
        self.append(value)

    def _load_long4(self) -> None:
        self.load_long4()
        self._budget.measure(self.stack[-1], (), self.stack[-1].bit_length() // 8)

    def _refuse(self) -> None:
        raise ForbiddenPickleError("an opcode that torch.save does not write")

    dispatch = {  # noqa: RUF012
        **dict.fromkeys(range(256), _refuse),
        **{
            code[0]: _Base.dispatch[code[0]]
            for code in (
                *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL),
                *(pickle.EMPTY_TUPLE, pickle.EMPTY_LIST, pickle.EMPTY_DICT),
                *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT, pickle.BINUNICODE),
                *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
            )
        },
        pickle.LONG4[0]: _load_long4,
        pickle.BINPERSID[0]: _load_storage,
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
        pickle.BINPUT[0]: lambda self: self._memoize(1),
        pickle.LONG_BINPUT[0]: lambda self: self._memoize(4),
        pickle.BINGET[0]: lambda self: self._push_memoized(1),
        pickle.LONG_BINGET[0]: lambda self: self._push_memoized(4),
    }


def _check_rebuild(function: Any, kind: Any, arguments: Any, _: Any) -> None:
    """Checks the function that ``_rebuild_from_type_v2`` calls, and the class of the result."""
    is_tensor = isinstance(kind, type) and issubclass(kind, torch.Tensor)
    if id(function) not in _REBUILDS or not is_tensor or type(arguments) is not tuple:
        raise ForbiddenPickleError(f"Trying to call {_name_of(function)}")


def _is_container_class(function: Any) -> bool:
    """Returns whether a function that the user allows is a class such as ``list``."""
    return getattr(function, "__module__", "") in ("array", "builtins", "collections")


def _full_name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{_name_of(function)}"


def _name_of(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _elements_of(state: Any) -> Iterable[Any]:
    """Yields the elements of a state that an array or dtype built from it may reference."""
    for element in state if isinstance(state, tuple) else ():
        yield element
        if isinstance(element, dict):
            for field in element.values():
                if type(field) is tuple:
                    yield from field
        elif isinstance(element, list | tuple):
            yield from element


def _make(name: str, make: Callable[..., Any], arguments: Any) -> Any:
    try:
        return make(*arguments)
    except ExpansionError as error:
        raise ExpansionError(f"{name}: {error}") from error
    except (
        ArithmeticError,
        ImportError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise pickle.UnpicklingError(f"{name}: {text_of(error)}") from error


def _pickle_module(**attributes: Any) -> Any:
    """Returns the ``pickle_module`` of ``torch.load``."""
    unpickler = type("_Unpickler", (_DataUnpickler,), attributes)
    return types.SimpleNamespace(__name__=__name__, Unpickler=unpickler)
