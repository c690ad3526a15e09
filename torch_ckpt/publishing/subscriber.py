"""Subscriber: brings the tensors of this process to a published version, in place."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import bytes_of
from torch_ckpt.commits.leases import lease_of
from torch_ckpt.coordination.exclusive import Exclusive
from torch_ckpt.coordination.group import DEFAULT_TIMEOUT_S
from torch_ckpt.coordination.waiting import duration
from torch_ckpt.errors import MismatchError, NotFoundError, text_of
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_files import whole_number
from torch_ckpt.planning.value_digests import THREADS
from torch_ckpt.publishing.chain import Chain, read_line
from torch_ckpt.publishing.parts import Part, Slice, digest_of, parts_of, view_of
from torch_ckpt.publishing.version_files import (
    Version,
    has_version,
    newest_number,
    newest_version,
    path_of,
    read_version,
)
from torch_ckpt.publishing.whole import load_values
from torch_ckpt.records.event_log import EventLog
from torch_ckpt.records.record import Recorder, note, phase

__all__ = ["Subscriber"]

_LOG = logging.getLogger("torch_ckpt")

_TRIES = 3
"""Tries to read the newest version, which retention may remove meanwhile."""

_Key = tuple[Any, ...]


class Subscriber:
    """Brings tensors of this process to the versions that a :class:`Publisher` publishes.

    Each process has a subscriber of its own, and they do not communicate. It reads only what its
    own tensors need: of its rows, columns or experts. An update changes all tensors or none. It
    verifies each block that it reads, and the values before and after, before it changes the first
    tensor.

    A tensor that is not of the version that the subscriber has brought it to, or of another dtype
    than the published one, gets its values from the last whole version and the deltas after it.

    Args:
        url: Directory of the versions, as a path or URL.
        timeout_s: How long an update waits for another thread that uses the subscriber, in seconds.
        record: Directory in which the phases of updates are recorded, for ``torch-ckpt report``.

    Attributes:
        version: The version of the tensors; ``None`` before the first update.
        read_nbytes: Bytes of deltas that the last update has read.
        refused: Why the last update did not use deltas for some tensors: a text for each name.

    Raises:
        UnsupportedError: ``url`` is a URL of an unregistered scheme.

    Example::

        subscriber = torch_ckpt.Subscriber("s3://bucket/policy")
        version = subscriber.update(dict(model.named_parameters()))
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        self._location = Location(url).resolved()
        self.timeout_s = duration("timeout_s", timeout_s)
        self.version: int | None = None
        self.read_nbytes = 0
        self.refused: dict[str, str] = {}
        self._chain = ""
        self._last: Version | None = None  # What the version of the tensors states.
        self._known: dict[_Key, tuple[int, int]] = {}  # Digests of the parts of that version.
        self._exclusive = Exclusive("the subscriber")
        self._log = None if record is None else EventLog(Location(record))
        self._recorder = None if self._log is None else Recorder(0, self._log)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._location)!r}, version={self.version})"

    def close(self) -> None:
        """Writes the record of the updates, if there is one."""
        if self._log is not None:
            self._log.close()

    def latest(self) -> int | None:
        """Returns the newest version that is there; ``None`` if there is none.

        Raises:
            StorageError: The directory cannot be read.
        """
        return newest_number(self._location)

    def update(
        self,
        tensors: Mapping[str, torch.Tensor | Slice] | torch.nn.Module,
        version: int | None = None,
    ) -> int:
        """Brings tensors to a version, in place; does nothing if they are of this version.

        A tensor that was changed since the last update is found only if the version is another one.

        Args:
            tensors: Name -> tensor: a plain one of the published sizes, a DTensor, a
                ``LocalShards``, or a tuple of the sizes of the whole tensor, the offsets of a box
                in it, and a tensor with the values of the box. They may be views, such as rows of a
                packed tensor, on any device. Other published tensors are not read.
            version: The version; the newest by default. May be older than that of the tensors.

        Returns:
            The version.

        Raises:
            CorruptionError: A file is damaged. The message names it, and the tensor.
            MismatchError: A tensor is not published, or has other sizes.
            NotFoundError: There is no such version, or none at all.
            StorageError: The disk or store failed.
            UnsupportedError: A tensor is of a kind that cannot be updated, such as a sparse one.
            ValueError: The memory of a tensor cannot be written, or is in part that of another one.
        """
        with self._exclusive.use("update tensors", self.timeout_s):
            wanted = None if version is None else whole_number("version", version)
            if self._recorder is None:
                return self._newest_of_tries(tensors, wanted)
            record = self._recorder.record("update", wanted)
            try:
                with record.current():
                    record.step = self._newest_of_tries(tensors, wanted)
                return record.step
            except BaseException as error:
                record.failed(error)
                raise
            finally:
                record.end()

    def _newest_of_tries(
        self, tensors: Mapping[str, torch.Tensor | Slice] | torch.nn.Module, wanted: int | None
    ) -> int:
        for tries_left in reversed(range(_TRIES)):
            with phase("choose"):
                found = self._find(wanted)
            try:
                return self._update(tensors, found)
            except NotFoundError:
                if wanted is not None or not tries_left:
                    raise
        raise AssertionError

    def _find(self, wanted: int | None) -> Version:
        if wanted is not None:
            return read_version(self._location, wanted)
        newest = newest_version(self._location, self._last)
        if newest is None:
            raise NotFoundError(f"no version is published in {self._location}")
        return newest

    def _update(
        self, tensors: Mapping[str, torch.Tensor | Slice] | torch.nn.Module, version: Version
    ) -> int:
        parts = parts_of(tensors, version.ties)
        for part in parts:
            _check(part, version)
        self.refused, self.read_nbytes = {}, 0
        if version.chain == self._chain and all(part.key in self._known for part in parts):
            return version.number
        with lease_of(path_of(self._location, version.number), version.number, has_version):
            with phase("read"):
                mask, added = self._masks(version, parts)
            with phase("apply"):
                known = self._apply(parts, mask, added)
        # An interrupt between these lines leaves tensors of unknown versions.
        self._known = {}
        self.version, self._chain, self._last = version.number, version.chain, version
        self._known = known
        return version.number

    # ---- The first pass: reads and verifies ----

    def _masks(
        self, version: Version, parts: Sequence[Part]
    ) -> tuple[Callable[[Part], Any], set[_Key]]:
        """Returns a function for the XOR of each part before and after. Changes no tensor.

        Also returns the keys of the parts to which deltas are added.
        """
        root, line = self._location, list(version.line)
        own = (self.version, self._chain)
        after = line.index(own) + 1 if own in line else 0
        by_delta = [
            part
            for part in parts
            if after and part.key in self._known and part.tensor.dtype == _dtype(part, version)
        ]
        deltas = Chain(root, read_line(root, version, line[after:]) if by_delta else [], by_delta)
        self.read_nbytes = deltas.nbytes
        note(bytes=deltas.nbytes)
        for part in by_delta:
            if why := self._refusal(deltas, part):
                self.refused[part.fqn] = why
        masks: dict[_Key, Any] = {}
        added = {part.key for part in by_delta if part.fqn not in self.refused}
        others = [part for part in parts if part.key not in added]
        if self.refused:
            _LOG.warning(
                "version %s of %s: %s; the last whole version serves",
                *(version.number, root, "; ".join(self.refused.values())),
            )
        if others:
            loaded = load_values(root, read_line(root, version, line), others)
            for part in others:
                values = loaded.pop(part.key).to(part.tensor.dtype)
                before: Any = bytes_of(part.host()).numpy()
                _native.apply_mask(view_of(values, part.fqn, writable=True), before, THREADS)
                masks[part.key] = bytes_of(values).numpy()

        def mask(part: Part) -> Any:
            return masks[part.key] if part.key in masks else deltas.mask(part, None)

        return mask, added

    def _refusal(self, deltas: Chain, part: Part) -> str:
        """Returns why deltas cannot be added to a part; empty if they can."""
        host = part.host()
        try:
            if not deltas.is_inside(part) and digest_of(host) != self._known[part.key]:
                return f"cannot update {part.fqn!r}: it was changed since version {self.version}"
            deltas.verify(part, host)
        except MismatchError as error:
            return text_of(error)
        return ""

    # ---- The second pass: changes the tensors ----

    def _apply(
        self, parts: Sequence[Part], mask: Callable[[Part], Any], added: set[_Key]
    ) -> dict[_Key, tuple[int, int]]:
        """Changes all parts, or none if an error or an interrupt ends it. Returns their digests."""
        begun: list[tuple[Part, tuple[int, int]]] = []
        known: dict[_Key, tuple[int, int]] = {}
        try:
            for part in parts:
                change, host = mask(part), part.host()
                # The first pass has verified the known digests.
                before = self._known.get(part.key) if part.key in added else None
                begun.append((part, before or digest_of(host)))
                _xor(part, host, change)
                known[part.key] = digest_of(host)
        except BaseException as error:
            self._roll_back(begun, mask, error)
            raise
        return known

    def _roll_back(
        self,
        begun: Sequence[tuple[Part, tuple[int, int]]],
        mask: Callable[[Part], Any],
        cause: BaseException,
    ) -> None:
        """Undoes the change of each part that has changed."""
        left = []
        for part, before in reversed(begun):
            try:
                host = part.host()
                if digest_of(host) != before:
                    _xor(part, host, mask(part))
                    host = part.host()
                if digest_of(host) != before:
                    left.append(part.fqn)
            except Exception as error:
                left.append(part.fqn)
                cause.add_note(f"cannot undo the change of {part.fqn!r}: {text_of(error)}")
        if left:
            self.version, self._chain, self._known = None, "", {}
            cause.add_note(f"these tensors are of no version: {', '.join(map(repr, left))}")


def _xor(part: Part, host: torch.Tensor, mask: Any) -> None:
    _native.apply_mask(view_of(host, part.fqn, writable=True), mask, THREADS)
    part.store(host)


def _check(part: Part, version: Version) -> None:
    """Checks that a part is of a published tensor. Raises MismatchError."""
    stored = version.tensors.get(version.ties.get(part.fqn, part.fqn))
    if stored is None:
        raise MismatchError(
            f"cannot update {part.fqn!r}: version {version.number} has no such tensor"
        )
    if tuple(stored[1]) != part.whole:
        raise MismatchError(
            f"cannot update {part.fqn!r}: version {version.number} has it in sizes "
            f"{list(stored[1])}, and the tensor has {list(part.whole)}"
        )


def _dtype(part: Part, version: Version) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, version.dtype_name(part.fqn))
    return dtype
