"""Saves and loads named workloads with torch-ckpt and its contenders, interleaved, in one run.

Prints the machine and the raw device ceiling first, then a table per workload and phase, then the
bars with their verdicts. A full run takes 15 to 30 minutes and 2.5 times `--gib` of disk:

    python benchmarks/bench_checkpoint.py --dir /data --json result.json

Without a built package, the stock contenders alone:

    python benchmarks/bench_checkpoint.py --contenders dcp-1t,torch.save --gib 0.25 --rounds 1

Run as root to let cold reads drop the whole page cache. `--dir` should lie on the file system to be
measured, and must not be tmpfs: O_DIRECT has no meaning there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch
from contenders import NAMES, OURS, Contender, make_contenders, silence
from machine import GIB, MIB, Fio, describe, pick_fio
from report import bars, format_bars, format_rows, format_samples
from workloads import ON_CPU, WORKLOADS, Bench, as_json, run


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="repeatable")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="of the tensors; cuda: without rss"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the large workloads")
    parser.add_argument("--contenders", default=",".join(NAMES), help="comma-separated")
    parser.add_argument("--fio-depth", type=int, default=16, help="of the ceiling in every round")
    parser.add_argument("--fio-block-mib", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    args = parser.parse_args()
    if args.rounds < 1 or args.gib <= 0:
        parser.error("--rounds and --gib must be positive")
    on_device = [name for name in WORKLOADS if args.device == "cpu" or name not in ON_CPU]
    args.workload = args.workload or on_device
    if left := set(args.workload) - set(on_device):
        parser.error(f"{', '.join(sorted(left))}: not with --device {args.device}")
    return args


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _versions(contenders: list[Contender]) -> dict[str, str]:
    versions = {"torch": torch.__version__, "safetensors": _version("safetensors")}
    if any(contender.name == OURS for contender in contenders):
        path = Path(str(sys.modules["torch_ckpt"].__file__)).parent
        versions[OURS] = f"{_version('torch-ckpt')} from {path}"
    return versions


def _ceilings(fio: Fio | None, directory: Path, nbytes: int) -> list[dict[str, object]]:
    """Returns fio's rates at depth 8 and at the depth of `fio`, two runs each."""
    found: list[dict[str, object]] = []
    if fio is None:
        return found
    path = directory / "ceiling"
    for _ in range(2):
        for depth in dict.fromkeys((8, fio.depth)):
            at_depth = Fio(fio.engine, fio.block_mib, depth)
            for write in (True, False):
                if write:
                    path.unlink(missing_ok=True)
                usage = at_depth.measure(path, nbytes, write=write)
                found.append(
                    {
                        "direction": "write" if write else "read",
                        **asdict(at_depth),
                        "seconds": usage.seconds,
                        "gb_per_s": nbytes / usage.seconds / 1e9,
                    }
                )
    path.unlink(missing_ok=True)
    return found


def _print_head(machine: dict[str, str], ceilings: list[dict[str, object]]) -> None:
    width = max(map(len, machine))
    print("machine")
    for name, value in machine.items():
        print(f"  {name.ljust(width)}  {value}")
    header = ["fio O_DIRECT", "engine", "block MiB", "depth", "s", "GB/s"]
    rows = [
        [
            *(str(c[key]) for key in ("direction", "engine", "block_mib", "depth")),
            f"{c['seconds']:.3f}",
            f"{c['gb_per_s']:.2f}",
        ]
        for c in ceilings
    ]
    print("\ndevice ceiling")
    print(format_rows(header, rows) if rows else "not measured: fio did not run", flush=True)


def _check_space(directory: Path, gib: float) -> None:
    needed, free = int(2.5 * gib * GIB) + 512 * MIB, shutil.disk_usage(directory).free
    if free < needed:
        raise SystemExit(f"{directory} has {free // MIB} MiB free and {needed // MIB} are needed")


def main() -> None:
    """Runs what the command line asks for; leaves no files but the one of `--json`."""
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    silence()
    contenders = make_contenders(args.contenders.split(","))
    _check_space(args.dir, args.gib)
    directory = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=args.dir)).resolve()
    try:
        fio = pick_fio(directory, block_mib=args.fio_block_mib, depth=args.fio_depth)
        machine = describe(directory.parent) | _versions(contenders)
        machine["tensors on"] = args.device
        if args.device == "cuda":
            machine["tensors on"] = torch.cuda.get_device_name()
        ceilings = _ceilings(fio, directory, int(args.gib * GIB))
        _print_head(machine, ceilings)
        bench = Bench(directory, contenders, args.rounds, args.gib, fio, args.device)
        run(args.workload, bench)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    verdicts = bars(bench.samples)
    print(f"\n{format_samples(bench.samples)}\n")
    print(format_bars(verdicts, gib=args.gib, rounds=args.rounds))
    if args.json is not None:
        result = {
            "machine": machine,
            "options": {key: str(value) for key, value in vars(args).items()},
            "ceilings": ceilings,
            "samples": [as_json(sample) for sample in bench.samples],
            "bars": [asdict(bar) | {"verdict": bar.verdict} for bar in verdicts],
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
