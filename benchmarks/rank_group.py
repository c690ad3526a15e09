"""Processes that load together: started once, told what to do, timed from a barrier on."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from throttled_disk import ThrottledDisk


class RankError(Exception):
    """A rank failed, or was not done in time; all of them have been ended."""


class RankGroup:
    """So many processes in one gloo group, each running a program such as `load_rank.py`.

    Args:
        count: Number of ranks.
        directory: Where they find saved state dicts; with a disk, where each mounts it.
        cuda: Whether they load into CUDA tensors; the ranks share the GPUs in turn.
        disk: Makes each rank a node of its own that reads the directory from this disk.
        timeout_s: For the start, and for any call.
        program: Beside this file; it has the functions that :meth:`call` runs.

    Raises:
        RankError: A rank did not start.

    Example::

        with RankGroup(2, Path("saved")) as ranks:
            usages = ranks.call("load", loader="dcp", kind="replicated", gib=1.0)
    """

    def __init__(
        self,
        count: int,
        directory: Path,
        *,
        cuda: bool = False,
        disk: ThrottledDisk | None = None,
        timeout_s: float,
        program: str = "load_rank.py",
    ) -> None:
        self.count = count
        self.cuda = cuda
        self.disk = disk
        self.timeout_s = timeout_s
        self._program = str(Path(__file__).with_name(program))
        self._meeting = tempfile.TemporaryDirectory(prefix="bench-load-ranks-")
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(count):
                self._processes.append(self._start(rank, directory))
            self.call("start")
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, directory: Path) -> subprocess.Popen[str]:
        options = {
            "rank": rank,
            "count": self.count,
            "meeting": str(Path(self._meeting.name) / "store"),
            "directory": str(directory),
            "cuda": self.cuda,
            "timeout_s": self.timeout_s,
            "device": self.disk and self.disk.device,
            "cgroup": self.disk and str(self.disk.limit.processes),
        }
        alone = ["unshare", "--mount", "--propagation", "private"] if self.disk else []
        return subprocess.Popen(
            [*alone, sys.executable, self._program, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # ^C reaches this process alone, which then ends them.
        )

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def call(self, function: str, **arguments: Any) -> list[Any]:
        """Runs a function of the program on all ranks; returns what each of them returned.

        Raises:
            RankError: A rank raised or ended; or not all were done within `timeout_s`.
        """
        line = json.dumps({"function": function, "arguments": arguments}) + "\n"
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
            return self._answers(function)
        except (RankError, OSError) as error:
            self.close()
            raise RankError(str(error)) from error

    def _answers(self, function: str) -> list[Any]:
        answers: dict[int, Any] = {}
        until = time.monotonic() + self.timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.count:
                ready = selector.select(max(until - time.monotonic(), 0))
                if not ready:
                    late = [rank for rank in range(self.count) if rank not in answers]
                    raise RankError(f"{function} on ranks {late}: no end in {self.timeout_s:g} s")
                for key, _ in ready:
                    answer = json.loads(key.fileobj.readline() or '"ended"')  # type: ignore[union-attr]
                    if not isinstance(answer, dict):
                        raise RankError(f"{function} on rank {key.data}: it {answer}")
                    if "error" in answer:
                        raise RankError(f"{function} on rank {key.data}: {answer['error']}")
                    answers[key.data] = answer["value"]
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.count)]

    def kill(self) -> None:
        """Kills all ranks, and waits for their end."""
        for process in self._processes:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Ends all ranks; what they have mounted goes with them."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
        self._processes = []
        self._meeting.cleanup()
