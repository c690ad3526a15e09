"""Runs of the scripts of `examples/`, each in processes of its own.

Linux only: torchrun starts each rank in a session of its own, out of reach of a signal to its
process group, so the ranks are found in /proc and killed through pidfds.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 140
KILL_TIMEOUT_S = 30


def descendants(pid: int) -> list[int]:
    """Returns the processes below ``pid``, parents before children."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # A process that ended meanwhile.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def kill(process: subprocess.Popen[str]) -> None:
    """Kills a process and all below it at once, and returns when they have ended."""
    if process.poll() is None:
        with contextlib.ExitStack() as stack:
            doomed = []
            for pid in [process.pid, *descendants(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    doomed.append(os.pidfd_open(pid))
                    stack.callback(os.close, doomed[-1])
            for pidfd in doomed:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            for pidfd in doomed:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                assert poll.poll(KILL_TIMEOUT_S * 1000), "a killed rank did not end"
    process.wait()


@contextlib.contextmanager
def running(
    script: str, options: str, *, ranks: int, folder: Path
) -> Iterator[subprocess.Popen[str]]:
    """Starts an example in a folder, without torchrun on one rank; leaves no process behind."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    process = subprocess.Popen(
        [
            sys.executable,
            *(launcher if ranks > 1 else []),
            str(ROOT / "examples" / script),
            *options.split(),
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": str(folder),  # A killed torchrun leaves its own files there.
        },
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill(process)
        if process.stdout:
            process.stdout.close()


def output_of(script: str, options: str = "", *, ranks: int = 1, folder: Path) -> str:
    """Runs an example to its end and returns what it printed on stdout."""
    with running(script, options, ranks=ranks, folder=folder) as process:
        output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 0, output
    return output
