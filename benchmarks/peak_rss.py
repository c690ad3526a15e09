"""Measures one save or load as the first of its process and prints the usage as JSON.

Run by the `rss` workload: `python peak_rss.py CONTENDER LOADER PHASE DIRECTORY GIB`. A process of
its own, because memory that an allocator kept from an earlier call would hide growth.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from contenders import make_contenders, silence
from machine import Meter, make_cold, make_warm
from workloads import SAVE, WARM, large_state, like, measure_save


def main() -> None:
    """Measures what the command line asks for."""
    name, loader, phase, directory, gib = sys.argv[1:]
    silence()
    [contender] = make_contenders([name])
    path = Path(directory)
    if phase == SAVE:
        usage, _ = measure_save(contender, large_state(float(gib)), path)
    else:
        into = like(large_state(float(gib), zeros=True))
        (make_warm if phase == WARM else make_cold)(path)
        with Meter() as meter:
            contender.load(loader, into, path)
        usage = meter.usage
        assert all(bool(torch.count_nonzero(tensor.view(torch.uint8))) for tensor in into.values())
    print(json.dumps(asdict(usage)))


if __name__ == "__main__":
    main()
