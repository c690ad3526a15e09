"""MachineReader: loads a checkpoint whose data files lie on the disks of several machines."""

from __future__ import annotations

from torch_ckpt.formats.committed import files_in
from torch_ckpt.storage.reader import FastReader

__all__ = ["MachineReader"]


class MachineReader(FastReader):
    """Reads a checkpoint whose data files lie on the disks of several machines.

    Each rank passes a directory on its machine. All directories contain the same ``.metadata`` and
    index, and each data file lies in at least one of them. A rank reads the files in its directory,
    and receives bytes of other files from other ranks. A file is ignored if its length differs from
    the index. If one directory contains all files, the class works as ``FastReader``.

    Example::

        dcp.load(state, storage_reader=MachineReader("/local-disk/step-100"))
    """

    def _reachable_files(self) -> frozenset[str] | None:
        index = self._opened.index
        return None if index is None else files_in(self._opened.directory, index.files)
