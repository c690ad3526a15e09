"""Places: which ranks of a run share its local directory.

The same path leads to different directories on different machines, unless it is on a shared file
system. Machine names do not reveal which is the case. So each rank writes a file, and lists the
files of the other ranks.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from torch_ckpt.coordination.group import Group
from torch_ckpt.filesystems.location import PENDING, Location

__all__ = ["Places"]


@dataclass(frozen=True)
class Places:
    """The places at which the ranks of a run save. Ranks at one place share a directory.

    Attributes:
        of_ranks: For each rank of the group, the first rank at its place.
        rank: This rank.
    """

    of_ranks: tuple[int, ...] = (0,)
    rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first at its place."""
        return self.of_ranks[self.rank] == self.rank

    @property
    def here(self) -> list[int]:
        """The ranks at the place of this rank."""
        return [r for r, first in enumerate(self.of_ranks) if first == self.of_ranks[self.rank]]

    @property
    def others(self) -> int:
        """The number of other places."""
        return len(set(self.of_ranks)) - 1

    @staticmethod
    def find(group: Group, directory: Location, run: Location, timeout_s: float) -> Places:
        """Creates a local directory, and returns its places. All ranks call it.

        Raises StorageError on all ranks if the directory cannot be written, and ValueError if it is
        the directory of the ``run`` itself.
        """
        activity = "opening the local directory"

        def create() -> None:
            if directory != run:
                directory.create_directories()
            if directory.is_same_as(run):  # Both retentions would remove its steps.
                raise ValueError(f"local={directory} is the directory of the run itself, {run}")

        if group.size == 1:
            create()
            return Places()
        token = group.decide(
            activity, lambda: None, lambda _: secrets.token_hex(4), timeout_s=timeout_s
        )
        prefix = f"{PENDING}{token}-"
        file = directory / f"{prefix}{group.rank}"

        def mark() -> None:
            create()
            file.write(b"", sync=False)

        def first_here() -> int:
            names = (name for name in directory.names() if name.startswith(prefix))
            return min([group.rank, *(int(name.removeprefix(prefix)) for name in names)])

        try:
            group.decide(activity, mark, lambda _: None, timeout_s=timeout_s)
            return Places(
                group.decide(activity, first_here, tuple, timeout_s=timeout_s), group.rank
            )
        finally:
            file.discard()
