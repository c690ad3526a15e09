"""Unrestored values of a load: stored but not requested by any rank, or requested but not stored.

Each rank sends the requested names of the checkpoint to the coordinator. A stored value counts only
if no rank requests it, because under pipeline parallelism each rank requests other names.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_ckpt.errors import SITE
from torch_ckpt.formats.opened import is_foreign
from torch_ckpt.planning.differences import listed, with_similar

__all__ = ["LeftNames", "RequestedNames", "Unrestored", "scope_of"]

_HINT = (
    "; this optimizer has no state before its first step. For its momenta, load into the result of "
    f"torch's get_state_dict: see {SITE}runs/#after-restore"
)


@dataclass(frozen=True)
class RequestedNames:
    """The names that one rank requests.

    ``missing`` are requested names that the checkpoint lacks. ``stored`` is a digest of all names
    of the checkpoint, in order, or empty if the rank requests all of them: the memory of another
    machine contains other names. ``flags`` has a byte for each name of the checkpoint, 1 if it is
    requested, and is compressed.
    """

    missing: Sequence[str]
    stored: bytes = b""
    flags: bytes = b""

    @classmethod
    def of(
        cls, state_dict: Mapping[str, Any], metadata: Metadata, *, is_partial: bool
    ) -> RequestedNames:
        """Returns the names in a flat state dict.

        With ``is_partial``, the checkpoint may lack some. If the names are all names of the
        checkpoint, reads none of its names.
        """
        stored = metadata.state_dict_metadata
        missing = [fqn for fqn in state_dict if fqn not in stored] if is_partial else []
        if len(state_dict) - len(missing) == len(stored):
            return cls(missing)
        flags = zlib.compress(bytes(name in state_dict for name in stored), 1)
        return cls(missing, _digest(stored), flags)


@dataclass(frozen=True)
class LeftNames:
    """What the coordinator sends to each rank about the names of all ranks.

    ``missing`` are requested names that the checkpoint lacks. ``unused`` has a byte for each name
    of the checkpoint, 1 if no rank requests it, and is compressed; empty if there is no such name,
    and ``None`` if the ranks have different lists of names.
    """

    missing: Sequence[str]
    unused: bytes | None

    @classmethod
    def of(cls, ranks: Sequence[RequestedNames]) -> LeftNames:
        """Returns the names that all ranks together leave."""
        missing = list(dict.fromkeys(name for rank in ranks for name in rank.missing))
        digests = {rank.stored for rank in ranks}
        if b"" in digests:
            return cls(missing, b"" if len(digests) < 3 else None)
        if len(digests) > 1:
            return cls(missing, None)
        unused = bytes(1 - flag for flag in _union(ranks))
        return cls(missing, zlib.compress(unused, 1) if any(unused) else b"")

    def unused_of(self, metadata: Metadata) -> Sequence[str] | None:
        """Returns the names of the checkpoint that no rank requests; ``None`` if unknown."""
        if not self.unused:
            return None if self.unused is None else ()
        flags = zlib.decompress(self.unused)
        names = metadata.state_dict_metadata
        return tuple(name for name, flag in zip(names, flags, strict=True) if flag)


@dataclass(frozen=True)
class Unrestored:
    """The values that a load of all ranks does not restore.

    Attributes:
        stored: Stored names that no rank requests. If no name with a first component is requested,
            the component and the number of its names.
        missing: Requested names that the checkpoint lacks; the first ones with similar names.
        stored_count: Number of stored names that no rank requests.
        requested_count: Number of requested names, including missing ones.
        nbytes: Bytes of the stored tensors that no rank requests.
    """

    path: str
    stored: Sequence[str]
    missing: Sequence[str]
    stored_count: int
    requested_count: int
    nbytes: int

    @classmethod
    def of(
        cls,
        ranks: Sequence[RequestedNames],
        metadata: Metadata,
        is_counted: Callable[[str], bool],
    ) -> Unrestored:
        """Returns the unrestored values of all ranks together, given the coordinator's metadata.

        ``is_counted`` returns whether a stored name counts if no rank requests it.
        """
        requested, others = _split(ranks, metadata)
        stored = [name for name in others if is_counted(name)]
        missing = list(dict.fromkeys(name for rank in ranks for name in rank.missing))
        return cls(
            str(getattr(metadata.storage_meta, "checkpoint_id", None) or "the checkpoint"),
            _grouped(stored, requested),
            with_similar(missing, others),
            len(stored),
            len(metadata.state_dict_metadata) - len(others) + len(missing),
            _nbytes_of(stored, metadata),
        )

    def warnings(self) -> list[str]:
        """Returns a line for each kind of unrestored values."""
        lines = []
        if self.missing:
            count, total = len(self.missing), self.requested_count
            of = f"all {total}" if count == total else f"{count} of the {total}"
            lines.append(
                f"{self.path} lacks {of} requested values, which stay as they are: "
                f"{listed(self.missing)}"
            )
        if self.stored:
            values = (
                "1 stored value" if self.stored_count == 1 else f"{self.stored_count} stored values"
            )
            hint = _HINT if any(".state." in name for name in self.stored) else ""
            lines.append(
                f"{self.path}: {values} ({self.nbytes} bytes) not requested, and not loaded: "
                f"{listed(self.stored)}{hint}"
            )
        return lines

    def error(self) -> str:
        """Returns the message of a strict load."""
        directions = [
            ("missing in the checkpoint", self.missing),
            ("in the checkpoint, but not requested", self.stored),
        ]
        text = "".join(f"\n  {what}: {listed(names)}" for what, names in directions if names)
        return f"cannot load {self.path} strictly: the state dict has other names{text}"


def scope_of(
    state_dict: Mapping[Any, Any],
    metadata: Metadata,
    rank_states: Sequence[str],
    *,
    strict: bool | None,
    is_whole: bool,
) -> Callable[[str], bool]:
    """Returns a function that decides whether a stored name counts if no rank requests it.

    An intentional partial load omits whole top-level keys of the state dict, so names below these
    do not count, unless ``is_whole``. Names in checkpoints of other programs differ, and count in
    strict loads only. Names of ``RankState`` values (``rank_states``) never count: each
    ``RankState`` selects what it loads.
    """
    if strict is False or (strict is None and is_foreign(metadata)):
        return lambda _: False
    nested = {str(key) for key, value in state_dict.items() if isinstance(value, Mapping | list)}
    chosen = tuple(f"{fqn}.rank_" for fqn in rank_states)

    def is_counted(name: str) -> bool:
        return (is_whole or _is_below(name, nested)) and not name.startswith(chosen)

    return is_counted


def _is_below(name: str, keys: set[str]) -> bool:
    at = name.find(".")
    while at >= 0:
        if name[:at] in keys:
            return True
        at = name.find(".", at + 1)
    return False


def _split(
    ranks: Sequence[RequestedNames], metadata: Metadata
) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the stored names that any rank requests, and those that no rank requests.

    Both are empty if a rank requests all, or its list of names differs from the coordinator's.
    """
    names = metadata.state_dict_metadata
    digests = {rank.stored for rank in ranks}
    if b"" in digests or digests != {_digest(names)}:
        return (), ()
    flags = _union(ranks)
    requested = [name for name, flag in zip(names, flags, strict=True) if flag]
    return requested, [name for name, flag in zip(names, flags, strict=True) if not flag]


def _union(ranks: Sequence[RequestedNames]) -> bytes:
    """Returns a byte for each name of the checkpoint, 1 if any rank requests it."""
    union, count = 0, 0
    for rank in ranks:
        flags = zlib.decompress(rank.flags)
        union, count = union | int.from_bytes(flags, "little"), len(flags)
    return union.to_bytes(count, "little")


def _digest(names: Iterable[str]) -> bytes:
    text = "\0".join(names).encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


def _nbytes_of(names: Iterable[str], metadata: Metadata) -> int:
    entries = (metadata.state_dict_metadata[name] for name in names)
    return sum(
        math.prod(entry.size) * entry.properties.dtype.itemsize
        for entry in entries
        if isinstance(entry, TensorStorageMetadata)
    )


def _grouped(names: Sequence[str], requested: Iterable[str]) -> list[str]:
    """Returns names; unrequested names with the same first component are combined into one."""
    if not names:
        return []
    counts = Counter(map(_head, names))
    requested_heads = set(map(_head, requested))
    out: dict[str, None] = {}
    for name in names:
        head = _head(name)
        is_single = head in requested_heads or counts[head] == 1
        out[name if is_single else f"{head} ({counts[head]} values)"] = None
    return list(out)


def _head(name: str) -> str:
    return name.partition(".")[0]
