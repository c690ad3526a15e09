"""Pickles objects like ``torch.save``, without unused memory around the tensors in them."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import pickle
import sys
import types
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage

from torch_ckpt._core.tensors import MemoryFaultError, memory_fault
from torch_ckpt._core.unpickling import MAIN_OF_SPAWNED
from torch_ckpt.coordination.current_call import setting
from torch_ckpt.staging.memory_faults import in_object
from torch_ckpt.staging.memory_runs import CopiedTensor, MemoryRun, copy_elements, runs_of

__all__ = ["has_slack", "pickle_object"]

_ATOMS = frozenset({bool, bytes, complex, float, int, str, type(None)})
_BY_ITEMSIZE = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
_SEVERAL_TO_A_BYTE = frozenset({torch.quint4x2, torch.quint2x4})

# Functions whose first arguments are storage, offset, sizes and strides, in elements.
_REBUILDS = frozenset(
    {
        torch._utils._rebuild_qtensor,
        torch._utils._rebuild_tensor_v2,
        torch._utils._rebuild_tensor_v3,
    }
)


def pickle_object(value: Any, fqn: str) -> io.BytesIO:
    """Pickles an object in memory.

    Omits the parts of a storage that no tensor in the object uses, if they are at least half of it.
    Tensors that share elements also share them after a load. Raises ValueError, with the path of
    the tensor in the object, if the storage of a tensor is too short for it.
    """
    with _main_script_as_main():
        if type(value) in _ATOMS:
            return _saved(value, pickle)
        try:
            return _saved(value, _UNLESS_SLACK)
        except MemoryFaultError as fault:
            raise in_object(fault, fqn, value) from None
        except _SlackError:
            # Alive until the end: otherwise a tensor that the object creates for the pickle could
            # get the id of a freed storage, and so the copy of another tensor.
            tensors = _inspected(value, fqn)
        with setting(_copies, tensors.copies()):
            return _saved(value, _WITH_COPIES)


def _saved(value: Any, pickle_module: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream, pickle_module=pickle_module)
    return stream


@contextlib.contextmanager
def _main_script_as_main() -> Iterator[None]:
    """Names classes and functions of the main script as in other processes.

    In a process that ``multiprocessing`` has spawned, their module is ``__mp_main__``, which other
    processes cannot import.
    """
    main = sys.modules.get("__main__")
    if main is None or vars(main).get("__name__") != MAIN_OF_SPAWNED:
        yield
        return
    renamed = list(_defined_in(main, set()))
    try:
        for value in renamed:
            value.__module__ = "__main__"
        yield
    finally:
        for value in renamed:
            value.__module__ = MAIN_OF_SPAWNED


def _defined_in(namespace: Any, seen: set[int]) -> Iterator[Any]:
    """Yields the classes and functions of the main script, and those within its classes."""
    for value in [*vars(namespace).values()]:
        if not issubclass(type(value), type | types.FunctionType) or id(value) in seen:
            continue  # Other values may have attributes that raise.
        seen.add(id(value))
        if getattr(value, "__module__", None) == MAIN_OF_SPAWNED:
            yield value
            if isinstance(value, type):
                yield from _defined_in(value, seen)


def has_slack(value: Any, fqn: str) -> bool:
    """Returns whether ``torch.save`` would write memory that no tensor in an object uses.

    Raises ValueError if the storage of a tensor is too short for it.
    """
    if type(value) in _ATOMS:
        return False
    try:
        return _inspected(value, fqn).has_slack
    except MemoryFaultError:
        raise
    except Exception:
        return False  # `torch.save` will raise the error.


_Reduced = tuple[Any, ...]

# A class created for one call would be in a reference cycle, and keep the tensors alive until the
# garbage collector runs. But staged tensors must be freed before the next save.


class _Inspector(pickle.Pickler):
    """Finds the tensors in an object, as ``torch.save`` reduces them."""

    def __init__(self, file: Any, protocol: int) -> None:
        super().__init__(file, protocol=protocol)
        self.tensors = _Tensors()

    def reducer_override(self, value: Any) -> Any:
        """Adds a tensor."""
        reduced = _reduced(value)
        return self.tensors.add(reduced) if isinstance(reduced, tuple) else reduced

    def persistent_id(self, value: Any) -> Any:
        """Adds a storage, which is not pickled."""
        if not isinstance(value, TypedStorage | UntypedStorage):
            return None
        self.tensors.add_storage(value)
        return "storage"


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _SlackError(Exception):
    """A storage in an object has memory that no tensor uses."""


class _UnlessSlack(_Inspector):
    """Pickles an object, or raises _SlackError before ``torch.save`` writes the storages.

    So an object without slack is pickled only once, because pickling may have side effects. The
    class that ``torch.save`` derives has its own ``persistent_id``, so this class does not see
    storages outside tensors.
    """

    def dump(self, value: Any) -> None:
        """Pickles an object."""
        super().dump(value)
        if self.tensors.has_slack:
            raise _SlackError


class _WithCopies(pickle.Pickler):
    """Pickles tensors over copies (``_copies``) of the memory that they use."""

    def reducer_override(self, value: Any) -> Any:
        """Pickles a tensor."""
        reduced = _reduced(value)
        if not isinstance(reduced, tuple) or (where := _where(reduced)) is None:
            return reduced
        copy = _copies.get().get(where[1])
        return reduced if copy is None else _with_storage(reduced, copy)


# Each is a ``pickle_module`` of ``torch.save``.
_UNLESS_SLACK = types.SimpleNamespace(__name__=__name__, Pickler=_UnlessSlack)
_WITH_COPIES = types.SimpleNamespace(__name__=__name__, Pickler=_WithCopies)


def _reduced(value: Any) -> Any:
    """Returns the reduced form of a tensor; ``NotImplemented`` for another value.

    Raises PicklingError for a tensor that torch could not unpickle, because torch would set the
    memory of a leaf that already requires a gradient.
    """
    if not isinstance(value, torch.Tensor) or type(value) in copyreg.dispatch_table:
        return NotImplemented
    reduced = value.__reduce_ex__(2)  # type: ignore[no-untyped-call]
    if reduced[0] is torch._utils._rebuild_tensor_v3 and reduced[1][4]:
        raise pickle.PicklingError(
            f"torch cannot load a pickled tensor of {value.dtype} that requires a gradient; pass "
            "its detach()"
        )
    return reduced


def _inspected(value: Any, fqn: str) -> _Tensors:
    """Returns the tensors in an object."""
    inspector = _Inspector(_Nowhere(), 2)
    try:
        inspector.dump(value)
    except MemoryFaultError as fault:
        raise in_object(fault, fqn, value) from None
    return inspector.tensors


# Id of the storage; dtype; offset, sizes and strides in elements.
_Key = tuple[int, torch.dtype, int, tuple[int, ...], tuple[int, ...]]

_copies: ContextVar[dict[_Key, torch.Tensor]] = ContextVar("copies")


class _Tensors:
    """The tensors in an object, and the memory that they need."""

    def __init__(self) -> None:
        self._found: dict[int, dict[_Key, None]] = {}  # By the id of the storage.
        self._storages: dict[int, UntypedStorage] = {}  # Referenced, so that no id is reused.
        self._kept: set[int] = set()
        self._expected: dict[int, Any] = {}  # Storages of tensors that the pickler will receive.

    def add(self, reduced: _Reduced) -> _Reduced:
        """Adds a tensor by its reduced form, and returns that form.

        Raises MemoryFaultError if the storage is too short.
        """
        where = _where(reduced)
        if where is None:
            return reduced
        storage, key = where
        self._storages[key[0]] = storage
        named = _storage_in(reduced)
        self._expected[id(named)] = named
        keys = self._found.setdefault(key[0], {})
        if key not in keys:
            _check_memory_at(storage, key)
            keys[key] = None
        return reduced

    def add_storage(self, value: object) -> None:
        """Adds a value that may be a storage. Storages outside tensors remain whole."""
        if self._expected.pop(id(value), None) is None:
            untyped = value._untyped_storage if isinstance(value, TypedStorage) else value
            if isinstance(untyped, UntypedStorage):
                self._kept.add(untyped._cdata)

    @functools.cached_property
    def _parts(self) -> list[tuple[dict[_Key, CopiedTensor], list[MemoryRun]]]:
        """The tensors and the runs of each storage with memory that no tensor uses."""
        out = []
        for number, keys in self._found.items():
            storage = self._storages[number]
            nbytes = storage.nbytes()
            if number in self._kept or any(_fills(key, nbytes) for key in keys):
                continue
            tensors = {key: _tensor_at(storage, key) for key in keys}
            used = [tensor for tensor in tensors.values() if tensor.live.numel()]
            runs = runs_of(used, keeps_sharing=True)
            # A copy of more than half a storage would take more memory than it saves.
            if 2 * sum(run.nbytes for run in runs) <= nbytes:
                out.append((tensors, runs))
        return out

    @property
    def has_slack(self) -> bool:
        """Whether a storage has memory that no tensor uses."""
        return bool(self._parts)

    def copies(self) -> dict[_Key, torch.Tensor]:
        """Copies the memory that tensors use, for storages with memory that no tensor uses."""
        copies: dict[_Key, torch.Tensor] = {}
        for tensors, runs in self._parts:
            for run in runs:
                live = run.live()
                memory = torch.empty(run.nbytes, dtype=torch.uint8, device=live.device)
                copy_elements(live, memory)
                run.set_memory(memory)
            copies |= {key: copy for key, (_, copy) in tensors.items()}
        return copies


def _fills(key: _Key, nbytes: int) -> bool:
    """Returns whether the elements of a tensor have no gaps and fill its storage."""
    _, dtype, _, sizes, strides = key
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return expected * dtype.itemsize == nbytes


def _check_memory_at(storage: UntypedStorage, key: _Key) -> None:
    """Raises MemoryFaultError if the storage of a tensor is too short for it."""
    _, dtype, offset, sizes, strides = key
    if all(sizes):
        steps = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        needed, found = (offset + steps + 1) * dtype.itemsize, storage.nbytes()
        if needed > found:
            raise memory_fault(dtype, sizes, needed, found)


def _tensor_at(storage: UntypedStorage, key: _Key) -> CopiedTensor:
    """Returns a tensor in a storage, with an integer dtype, and its copy, still without memory."""
    _, dtype, offset, sizes, strides = key
    plain, device = _BY_ITEMSIZE[dtype.itemsize], storage.device
    if not all(sizes):
        empty = torch.empty_strided(sizes, strides, dtype=plain, device=device)
        return CopiedTensor(empty, empty)
    live: Any = torch.empty(0, dtype=plain, device=device)
    live.set_(storage, offset, sizes, strides)
    return CopiedTensor(live, torch.empty(0, dtype=plain, device=device))


def _storage_in(reduced: _Reduced) -> Any:
    function, arguments, *_ = reduced
    if function is torch._tensor._rebuild_from_type_v2:
        return _storage_in((arguments[0], arguments[2]))
    return arguments[0]


def _where(reduced: _Reduced) -> tuple[UntypedStorage, _Key] | None:
    """Returns the storage of a tensor, and the part that it uses; ``None`` without a storage."""
    function, arguments, *_ = reduced
    if function is torch._tensor._rebuild_from_type_v2:
        return _where((arguments[0], arguments[2]))
    if function not in _REBUILDS:
        return None
    storage, offset, sizes, strides = arguments[:4]
    untyped = storage._untyped_storage if isinstance(storage, TypedStorage) else storage
    dtype = storage.dtype if isinstance(storage, TypedStorage) else arguments[6]
    if not isinstance(untyped, UntypedStorage) or dtype in _SEVERAL_TO_A_BYTE:
        return None
    if untyped.nbytes() and not untyped.data_ptr():
        return None  # A wrapper subclass, whose values are in other tensors.
    return untyped, (untyped._cdata, dtype, offset, tuple(sizes), tuple(strides))


def _with_storage(reduced: _Reduced, copy: torch.Tensor) -> _Reduced:
    """Returns the reduced form of a tensor over its copy."""
    function, arguments, *more = reduced
    if function is torch._tensor._rebuild_from_type_v2:
        inner = _with_storage((arguments[0], arguments[2]), copy)
        return (function, (arguments[0], arguments[1], inner[1], *arguments[3:]), *more)
    storage, _, sizes, _ = arguments[:4]
    moved: Any = copy.untyped_storage()
    if isinstance(storage, TypedStorage):
        typed: Any = TypedStorage
        moved = typed(wrap_storage=moved, dtype=storage.dtype, _internal=True)
    strides = copy.stride()
    return (function, (moved, copy.storage_offset(), sizes, strides, *arguments[4:]), *more)
