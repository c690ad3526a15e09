"""RankFiles: writes the files of one rank in one save after another, with the same buffers."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt._core import _native
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.coordination.current_call import current_call
from torch_ckpt.filesystems.location import Location
from torch_ckpt.options import IoMode
from torch_ckpt.records.record import note
from torch_ckpt.storage.buffers import buffer_pools
from torch_ckpt.storage.data_file import FileOptions, write_data_file
from torch_ckpt.storage.file_jobs import FileJobs, in_threads
from torch_ckpt.storage.progress import progress_bar
from torch_ckpt.storage.rank_reuse import Taken, take_unchanged
from torch_ckpt.storage.rank_work import RankWork, split

__all__ = ["RankFiles"]


class RankFiles:
    """The files of one rank. Used by one thread, except :meth:`written_nbytes`.

    Attributes:
        finished: Names of the complete files of the present save.
        io_mode: I/O mode of the last file that this process wrote; ``None`` before the first file.
    """

    def __init__(self) -> None:
        self.finished: list[str] = []
        self.io_mode: IoMode | None = None
        self._pools: list[_native.BufferPool] = []
        self._jobs: FileJobs | None = None  # Set while files are written.
        self._nbytes = self._written_nbytes = 0  # Total and written bytes of the last save.

    def __getstate__(self) -> dict[str, Any]:
        # A background save process receives a copy without native handles.
        return {**self.__dict__, "_jobs": None, "_pools": []}

    @contextlib.contextmanager
    def writing(self, directory: Location, nbytes: int, how: FileOptions) -> Iterator[FileJobs]:
        """Begins the files of a save, ``nbytes`` in total. Yields the collection of their jobs.

        Shows a progress bar. At the end, adds the written bytes to the record, even after a
        failure. Then drops the jobs, because they refer to their call, and so to the state of a
        failed save.
        """
        call = current_call()
        jobs = FileJobs(None if call is None else call.cancel_on_failure)
        self.finished, self._jobs, self._nbytes, self._written_nbytes = [], jobs, nbytes, 0
        bar = progress_bar("saving", directory, lambda: nbytes, jobs.done_nbytes)
        try:
            with bar if how.shows_progress else contextlib.nullcontext():
                yield jobs
        finally:
            self._jobs, self._written_nbytes = None, jobs.done_nbytes()
            note(**jobs.details(how.thread_count), mode=self._mode(directory))

    def write(
        self,
        transaction: CheckpointTransaction,
        prefix: str,
        work: RankWork,
        planner: SavePlanner,
        how: FileOptions,
        *,
        base: Location | None,
        groups: Callable[[Sequence[RankWork], str], list[tuple[str, RankWork]]],
    ) -> list[WriteResult]:
        """Writes the work of this rank to files with this prefix; removes a file that fails.

        Takes unchanged data from the base, if any. ``groups`` divides the rest into work for
        different files, each with the prefix of their names.
        """
        directory, numbers = transaction.directory, defaultdict[str, Any](itertools.count)

        def new_name(prefix: str = prefix) -> str:
            return f"{prefix}{next(numbers[prefix])}_{transaction.save_id}.distcp"

        with self.writing(directory, sum(work.work.nbytes), how) as jobs:
            taken = Taken([work])
            if base is not None and len(work.work):
                taken = take_unchanged(
                    None if str(base) == str(transaction.target) else base,
                    *(directory, work, how),
                    new_name=new_name,
                    finished=self.finished,
                )
            count = how.thread_count if how.single_file else None
            named = {
                new_name(each): part
                for each, group in groups(taken.groups, prefix)
                for part in split(group, count)
            }
            results = taken.results + self._write(directory, named, planner, jobs, how)
            if self.finished and how.sync:
                directory.sync()
        return results

    def _write(
        self,
        directory: Location,
        files: Mapping[str, RankWork],
        planner: SavePlanner,
        jobs: FileJobs,
        how: FileOptions,
    ) -> list[WriteResult]:
        """Writes files (name -> work), as many at a time as there are threads."""
        workers = min(how.thread_count, len(files))
        if workers == 0:
            return []
        pools = self.pools(workers, self._nbytes, how, directory)

        def write_files(first: int) -> list[WriteResult]:
            results: list[WriteResult] = []
            for name in list(files)[first::workers]:
                written, file, self.io_mode = write_data_file(
                    *(directory, name, files[name], planner, how),
                    pool=pools[first],
                    begun=jobs.begin,
                )
                self.finished.append(name)
                results += written
                # The report is sent to the coordinator as an additional result.
                results.append(WriteResult(MetadataIndex(name), 0, file))
            return results

        return list(itertools.chain.from_iterable(in_threads(write_files, workers, jobs)))

    def pools(
        self, count: int, nbytes: int, how: FileOptions, directory: Location
    ) -> list[_native.BufferPool]:
        """Returns a buffer pool for each of ``count`` threads, which write ``nbytes`` together."""
        self._pools = buffer_pools(
            *(self._pools, count, nbytes, how.io, how.copy_ahead), directory.file_system
        )
        return self._pools

    def written_nbytes(self) -> tuple[int, int]:
        """Returns the written and the total bytes of the last save.

        Any thread may call it.
        """
        jobs = self._jobs
        return self._written_nbytes if jobs is None else jobs.done_nbytes(), self._nbytes

    def _mode(self, directory: Location) -> str:
        """Returns the mode of the writes, for the record."""
        if not directory.file_system.writes_at_offsets:
            return "store"
        return "direct" if self.io_mode is not None and self.io_mode.direct else "buffered"
