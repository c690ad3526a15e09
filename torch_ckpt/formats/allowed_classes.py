"""Lists the classes that objects may contain, and finds other classes in a written pickle."""

from __future__ import annotations

import _compat_pickle
import struct
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch._weights_only_unpickler import _get_allowed_globals

from torch_ckpt._core import _native
from torch_ckpt._core.unpickling import allowed_by_user, main_module
from torch_ckpt.errors import CheckpointError
from torch_ckpt.formats.data_classes import DATA_CLASSES

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "ARCHIVE",
    "HOW_TO_ALLOW",
    "NO_STAND_INS",
    "TORCH_GLOBALS",
    "StandIns",
    "current_name",
    "is_blocked",
    "refused_classes",
    "refused_names",
    "warn_of_refused",
]

ARCHIVE = b"PK\3\4"

StandIns = Mapping[str, Callable[..., Any]]
"""Name of a class of another library -> function that builds plain data to replace its objects."""

NO_STAND_INS: StandIns = types.MappingProxyType({})

HOW_TO_ALLOW = (
    "pass their classes to torch.serialization.add_safe_globals([...]), or load with "
    "trust_pickle=True"
)


TORCH_GLOBALS: dict[str, Any] = {
    name: value for name, value in _get_allowed_globals().items() if name not in DATA_CLASSES
}
_ALLOWED = TORCH_GLOBALS.keys() | DATA_CLASSES.keys()

_MAX_FQNS_NAMED = 20  # In one warning.


def refused_classes(archive: Buffer) -> list[str]:
    """Lists the classes and functions in an archive that :func:`load_object` would refuse.

    The list is empty if the bytes are not an archive: the planner's ``load_bytes`` reads those.
    """
    data = memoryview(archive)
    if len(data) < 30 or bytes(data[:4]) != ARCHIVE:
        return []
    name_nbytes, extra_nbytes = struct.unpack_from("<HH", data, 26)
    name_end = 30 + name_nbytes
    if not bytes(data[30:name_end]).endswith(b"/data.pkl"):
        return []
    try:
        return refused_names(data[name_end + extra_nbytes :])
    except CheckpointError as error:
        return [str(error)]


def warn_of_refused(refused: Mapping[str, Sequence[str]]) -> None:
    """Issues one warning for all values (FQN -> refused names) that a load will refuse."""
    if not refused:
        return
    fqns = [f"{fqn!r} ({', '.join(names)})" for fqn, names in refused.items()]
    if len(fqns) > _MAX_FQNS_NAMED:
        fqns[_MAX_FQNS_NAMED:] = [f"and {len(fqns) - _MAX_FQNS_NAMED} more"]
    classes = sorted({name for names in refused.values() for name in names})
    warnings.warn(
        f"torch_ckpt saves {len(refused)} values that a load will refuse, because unpickling them "
        f"may run code: {', '.join(fqns)}. To load them, {HOW_TO_ALLOW}. All classes: "
        f"{', '.join(classes)}",
        stacklevel=2,
    )


def refused_names(pickled: Buffer, stand_ins: StandIns = NO_STAND_INS) -> list[str]:
    """Lists the classes and functions in a pickle that are not allowed.

    Raises CheckpointError if the bytes are not a pickle that ``torch.save`` writes.
    """
    names = {current_name(*name) for name in _native.pickle_globals(pickled)}
    unknown = {name for name in names if name not in _ALLOWED and name not in stand_ins}
    if unknown:
        unknown -= {name for name in allowed_by_user() if not is_blocked(name)}
    return sorted(unknown)


def is_blocked(name: str) -> bool:
    """Returns whether torch refuses the module even if a user allows it."""
    return name.rpartition(".")[0] in ("sys", "os", "posix", "nt")


def current_name(module: str, name: str) -> str:
    """Returns the full name in Python 3; protocol 2 stores names of Python 2.

    The main script is always ``__main__``, no matter which process pickled the object.
    """
    module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    return f"{main_module(_compat_pickle.IMPORT_MAPPING.get(module, module))}.{name}"
