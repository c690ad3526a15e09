"""Destination: where agents write a save, as encoded in slots and messages."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import NamedTuple

from torch_ckpt._core import _native
from torch_ckpt.commits.small_files import SMALL_FILES
from torch_ckpt.errors import CorruptionError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.stored_json import from_json

__all__ = ["Destination", "directory_name"]

_SHOWN = 200
"""Characters of an unsound destination that an error shows."""


def directory_name(snapshot: _native.StoredSnapshot) -> str:
    """Returns the path or URL of the directory of a snapshot, reachable from this process or not.

    Raises CorruptionError if the snapshot names none.
    """
    return _decoded(os.fsdecode(snapshot.directory))[0]


class Destination(NamedTuple):
    """The directory of a future checkpoint, and where agents of several machines exchange files.

    Attributes:
        directory: Directory of the checkpoint, on this machine.
        shared: Directory of the run, if the machines do not share the checkpoint's directory.
        small_files: Contents of the small files of the step, by name. ``None`` if the save has no
            such files, and does not change existing ones.
        base: Directory of an older checkpoint, from which the save takes unchanged data.
    """

    directory: Location
    shared: Location | None = None
    small_files: Mapping[str, bytes] | None = None
    base: Location | None = None

    @classmethod
    def resolved(
        cls,
        directory: str | os.PathLike[str],
        shared: Location | None = None,
        small_files: Mapping[str, bytes] | None = None,
        base: str | os.PathLike[str] | None = None,
    ) -> Destination:
        """Returns the destination with links resolved, for the agent: links may change later."""
        older = None if base is None else Location(base).resolved()
        made = cls(Location(directory).resolved(), shared, small_files, older)
        if unknown := sorted(set(small_files or ()) - SMALL_FILES):
            raise ValueError(
                f"cannot save to {made.directory!r}: {unknown[0]!r} is no small file of a step, "
                f"such as {min(SMALL_FILES)}"
            )
        try:
            made.encode().encode()
        except UnicodeEncodeError:
            raise UnsupportedError(
                f"cannot save to {str(made.directory)!a}: the name is not UTF-8"
            ) from None
        except UnicodeDecodeError:
            raise UnsupportedError(
                f"cannot save to {made.directory}: a small file of the step is not UTF-8"
            ) from None
        return made

    @classmethod
    def decode(cls, text: str) -> Destination:
        """Returns the destination that :meth:`encode` has encoded, also in version 0.2.

        Raises CorruptionError if the text is no encoded destination.
        """
        directory, shared, small_files, base = _decoded(text)
        return cls(
            Location(directory),
            Location(shared) if shared else None,
            small_files,
            Location(base) if base else None,
        )

    @classmethod
    def of(cls, snapshot: _native.StoredSnapshot) -> Destination:
        """Returns the destination of a snapshot that has one."""
        return cls.decode(os.fsdecode(snapshot.directory))

    def encode(self) -> str:
        """Returns the path of the directory, or a JSON object if further fields are set."""
        if self == Destination(self.directory):
            return str(self.directory)
        facts: dict[str, object] = {
            "directory": str(self.directory),
            "shared": None if self.shared is None else str(self.shared),
            "small_files": None,
            "base": None if self.base is None else str(self.base),
        }
        if self.small_files is not None:
            texts = {name: each.decode() for name, each in self.small_files.items()}
            facts["small_files"] = texts
        return json.dumps(facts, ensure_ascii=False)


def _decoded(text: str) -> tuple[str, str | None, dict[str, bytes] | None, str | None]:
    """Returns the directory, the shared directory, the small files and the base."""
    directory, _, rest = text.partition("\0")  # Earlier versions wrote one or two paths.
    facts: object = {"directory": directory, "shared": rest or None, "small_files": None}
    with contextlib.suppress(ValueError):  # Not JSON, or not UTF-8.
        match from_json(text, dict) if text.startswith("{") else facts:
            case {"directory": str(name), "shared": shared, "small_files": files, **more} if (
                isinstance(shared, str | None)
                and isinstance(base := more.get("base"), str | None)
                and "\0" not in f"{name}{shared}{base}"
                and _are_small_files(files)
            ):
                contents = files and {each: content.encode() for each, content in files.items()}
                return name, shared, contents, base
    raise CorruptionError(f"a save in memory has no sound destination: {text[:_SHOWN]!r}")


def _are_small_files(files: object) -> bool:
    if not isinstance(files, dict):
        return files is None
    return files.keys() <= SMALL_FILES and all(isinstance(each, str) for each in files.values())
