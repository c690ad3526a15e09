"""What a load leaves: stored values that no rank requests, and requested ones that are not stored.

Each rank sends to the coordinator which names of the checkpoint it requests. So a stored value
counts only if no rank requests it, as under pipeline parallelism each rank requests other names.
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

__all__ = ["RequestedNames", "Unrestored", "scope_of"]

_HINT = f"; an optimizer has no state before its first step: see {SITE}runs/"


@dataclass(frozen=True)
class RequestedNames:
    """The names that one rank requests.

    ``missing`` are those that the checkpoint lacks. ``stored`` is a digest of all names of the
    checkpoint, in their order, empty if the rank requests all of them: in the memory of another
    machine there are other names. ``flags`` has a byte for each name of the checkpoint, 1 if it is
    requested; compressed. ``unscaled`` are quantised tensors that the rank loads without scales.
    """

    missing: Sequence[str]
    stored: bytes = b""
    flags: bytes = b""
    unscaled: Sequence[str] = ()

    @classmethod
    def of(
        cls, state_dict: Mapping[str, Any], metadata: Metadata, *, is_partial: bool
    ) -> RequestedNames:
        """Returns the names in a flat state dict.

        With ``is_partial``, the checkpoint may lack some. If they are all names of the checkpoint,
        none of its names is read.
        """
        stored = metadata.state_dict_metadata
        missing = [fqn for fqn in state_dict if fqn not in stored] if is_partial else []
        if len(state_dict) - len(missing) == len(stored):
            return cls(missing)
        flags = zlib.compress(bytes(name in state_dict for name in stored), 1)
        return cls(missing, _digest(stored), flags)


@dataclass(frozen=True)
class Unrestored:
    """What a load of all ranks leaves of a checkpoint.

    Attributes:
        stored: Stored names that no rank requests. If no name with a first component is requested,
            the component and the number of its names.
        missing: Requested names that the checkpoint lacks, the first ones with a similar name.
        stored_count: Number of stored names that no rank requests.
        requested_count: Number of requested names, the missing ones included.
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
        """Returns what all ranks together leave, by the metadata that the coordinator has opened.

        ``is_counted`` says whether a stored name counts if no rank requests it.
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
        """Returns a line for each direction in which something is left."""
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
    """Returns a function of a stored name: whether it counts if no rank requests it.

    A load of a part on purpose leaves whole keys at the top of the state dict, unless ``is_whole``.
    Checkpoints of other programs have names of their own, which count in strict loads only. The
    ``RankState`` of the state dict, whose FQNs are ``rank_states``, choose what they load.
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
    """Returns the stored names that a rank requests, and those that none requests.

    If a rank requests all, or has another list of names than the coordinator, both are empty.
    """
    names = metadata.state_dict_metadata
    digests = {rank.stored for rank in ranks}
    if b"" in digests or digests != {_digest(names)}:
        return (), ()
    union = 0
    for rank in ranks:
        union |= int.from_bytes(zlib.decompress(rank.flags), "little")
    flags = union.to_bytes(len(names), "little")
    requested = [name for name, flag in zip(names, flags, strict=True) if flag]
    return requested, [name for name, flag in zip(names, flags, strict=True) if not flag]


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
    """Returns names, those with the same first component as one if none of it is requested."""
    if not names:
        return []
    counts = Counter(map(_head, names))
    kept = set(map(_head, requested))
    out: dict[str, None] = {}
    for name in names:
        head = _head(name)
        is_single = head in kept or counts[head] == 1
        out[name if is_single else f"{head} ({counts[head]} values)"] = None
    return list(out)


def _head(name: str) -> str:
    return name.partition(".")[0]
