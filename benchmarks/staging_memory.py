"""Measures saves with less and less memory for staging, and prints what each cost as JSON.

Run by `bench_options.py`: `python staging_memory.py SHARE DIRECTORY GIB SAVES`. The snapshot may
have this share of the state: 1 is all of it, and 0 is a synchronous save. In a process of its own,
because memory of an earlier snapshot would hide growth.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from contenders import silence
from machine import Meter, remove_tree
from workloads import large_state

import torch_ckpt
from torch_ckpt import FastWriter, SnapshotStager


def main() -> None:
    """Saves once to measure memory, and then again to measure times."""
    share, directory, gib, saves = sys.argv[1:]
    silence()
    state = large_state(float(gib))
    nbytes = sum(tensor.nbytes for tensor in state.values())
    limit = None if float(share) >= 1 else max(1, int(nbytes * float(share)))
    stager = SnapshotStager(max_host_nbytes=limit)
    path = Path(directory)

    def save() -> dict[str, float]:
        writer = FastWriter(path, stager=stager)
        begin = time.perf_counter()
        if float(share) == 0:
            torch_ckpt.save(state, storage_writer=writer, no_dist=True)
            blocked_s = time.perf_counter() - begin
        else:
            future = torch_ckpt.async_save(state, storage_writer=writer, no_dist=True)
            blocked_s = time.perf_counter() - begin
            assert future is not None
            future.result()
        durable_s = time.perf_counter() - begin
        remove_tree(path)
        return {"blocked_s": blocked_s, "durable_s": durable_s}

    with Meter() as meter:
        save()
    times = [save() for _ in range(int(saves))]
    print(json.dumps({"rss": meter.usage.rss_growth, "times": times}))


if __name__ == "__main__":
    main()
