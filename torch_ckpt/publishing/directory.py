"""Directory: where a publisher publishes, as its coordinator knows it. Imports no torch."""

from __future__ import annotations

import contextlib
import logging
import secrets

from torch_ckpt.commits.terms import check_holder, check_term, has_term, take_term
from torch_ckpt.errors import CheckpointError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.publishing.version_files import Version, has_version, numbers_among, path_of

__all__ = ["Directory"]

_LOG = logging.getLogger("torch_ckpt")


class Directory:
    """The directory of a publisher: its term there, and the committed versions.

    Attributes:
        term: The term of the publisher; 0 before its first version.
        job: The id of the publisher in the file of its term.
        is_whole: Number of each committed version that is known -> whether it is whole.
        newest: The newest version of this publisher, to which the next delta is added.
    """

    def __init__(self, root: Location) -> None:
        self._root = root
        self.term = 0
        self.job = secrets.token_hex(8)
        self.is_whole: dict[int, bool] = {}
        self.newest: Version | None = None

    def names(self) -> list[str]:
        """Returns the names in the directory, in which this publisher has the newest term.

        Takes a term for the first version, and if no term is there: the directory was removed, or a
        program has removed old files. Forgets versions that were removed.

        Raises:
            CheckpointError: It is that of a run, or was emptied.
            StorageError: It cannot be read, or a term cannot be taken.
            SupersededError: Another publisher has a later term, or has begun the directory again.
        """
        root, names = self._root, None
        if self.term:
            with contextlib.suppress(NotFoundError):
                names = root.names()
            if not has_term(names or ()):
                self._begin_again(names)
        if not self.term:
            self.term = take_term(root, {}, job=self.job).number
            names = root.names()
        assert names is not None
        check_term(root, self.term, names=names)
        if not (has_term(names, self.term) and self.is_whole.keys() >= set(numbers_among(names))):
            check_holder(root, self.term, self.job)
        self._forget_removed(names)
        return names

    def _forget_removed(self, names: list[str]) -> None:
        """Forgets versions that were removed by others, so that the next one needs none of them."""
        removed = self.is_whole.keys() - set(numbers_among(names))
        line = [] if self.newest is None else [number for number, _ in self.newest.line]
        # A purge of old files leaves their directories. The whole version has the oldest ones.
        has_folders = self._root.file_system.has_folders
        if line and has_folders and not has_version(path_of(self._root, line[0])):
            removed.add(line[0])
        for number in removed:
            self.is_whole.pop(number, None)
        if lacking := sorted(removed.intersection(line)):
            message = "%s lacks version %s, which was removed; the next version is whole"
            _LOG.warning(message, self._root, ", ".join(map(str, lacking)))
            self.newest = None

    def _begin_again(self, names: list[str] | None) -> None:
        """Forgets the term, which is not there, and the versions, unless some are there."""
        found = numbers_among(names or ())
        if names is not None and not found and self._root.local_path is not None:
            raise CheckpointError(
                f"cannot publish to {self._root}: it has neither terms nor versions any more. It "
                "may have been moved or unmounted. To continue here, open a new Publisher"
            )
        self.term = 0
        # Some stores list a removed directory for some time.
        if not any(has_version(path_of(self._root, number)) for number in found):
            _LOG.warning("%s is gone; this publish creates it again", self._root)
            self.is_whole, self.newest = {}, None
