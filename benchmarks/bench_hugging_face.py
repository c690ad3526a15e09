"""Loads of Hugging Face's models onto FSDP2 over tensor parallelism, from a throttled disk.

Eight gloo ranks, each with a page cache of its own (see throttled_disk.py, which needs root), load
a model of transformers from files as the hub has them, by `from_pretrained(distributed_config=)`.
Contenders take turns, in new processes each round. Prints the machine, a table, and what is asked.
Takes 8 minutes:

    python benchmarks/bench_hugging_face.py --dir /data --json result.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench_load import Bar
from bench_tree import print_table
from hugging_face_rank import OURS, PLAIN, TRANSFORMERS
from load_turns import RAW, THROTTLED, Bench, Sample, open_storages
from machine import MIB, describe
from rank_group import RankGroup

PROGRAM = "hugging_face_rank.py"
CONTENDERS = (TRANSFORMERS, OURS)


def measure(bench: Bench) -> int:
    """Saves, and loads in turns; returns the bytes of the model."""
    options, saved = bench.options, bench.directory / "saved"
    saved.mkdir()
    arguments = {"timeout_s": options.timeout_s, "program": PROGRAM}
    with RankGroup(1, saved, **arguments) as group:
        nbytes: int = group.call("write", width=options.width, layers=options.layers)[0]
    with open_storages(bench, saved, {THROTTLED}) as storages:
        if THROTTLED not in storages:
            raise SystemExit(1)
        storage = storages[THROTTLED]

        def turn(group: RankGroup, number: int, tp: int, name: str) -> None:
            storage.make_cold(group)
            if name == RAW:
                answers, read_nbytes = storage.call(group, "read_raw", folder=PLAIN)
            else:
                more = {"folder": PLAIN, "contender": name, "tp": tp}
                answers, read_nbytes = storage.call(
                    group, "read_model", first=name == CONTENDERS[0], **more
                )
            sample = Sample(
                scenario=f"{options.ranks // tp} x {tp}",
                storage=THROTTLED,
                ranks=options.ranks,
                contender=name,
                round=number,
                nbytes=nbytes,
                seconds=max(a["end"] for a in answers) - min(a["begin"] for a in answers),
                read_nbytes=read_nbytes,
                cpu_s=sum(a["cpu_s"] for a in answers),
                rss_growth=max(a["rss_growth"] for a in answers),
            )
            bench.samples.append(sample)
            print(sample, file=sys.stderr, flush=True)

        for tp in options.tp:
            for number in range(options.rounds):
                # Each from_pretrained leaves process groups, whose threads poll for ever.
                with RankGroup(
                    options.ranks, storage.node, disk=storage.disk, **arguments
                ) as group:
                    for name in CONTENDERS:  # Imports modules, and opens connections.
                        group.call("warm", contender=name, tp=tp)
                    for name in (RAW, *CONTENDERS):
                        turn(group, number, tp, name)
    shutil.rmtree(saved)
    return nbytes


def main() -> None:
    """Runs what the command line asks for; leaves no files but the one of `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4], help="tensor parallel ranks")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each contender")
    parser.add_argument("--rate-mb", type=float, default=200.0, help="MB/s of the disk for all")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of any call")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench-hugging-face-", dir=options.dir)).resolve()
    machine = describe(directory.parent)
    width = max(map(len, machine))
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in machine.items()), flush=True)
    bench = Bench(directory, options)
    try:
        nbytes = measure(bench)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"\n{nbytes / MIB:.0f} MiB, {options.ranks} ranks, {options.rate_mb:g} MB/s in all\n")
    rows = [["mesh", "contender", "s, min / median", "read, of the model", "CPU s", "RSS +MiB"]]
    bars: list[Bar] = []
    for mesh in (f"{options.ranks // tp} x {tp}" for tp in options.tp):
        medians: dict[str, tuple[float, float]] = {}
        for name in (RAW, *CONTENDERS):
            found = bench.of(mesh, THROTTLED, options.ranks, name)
            seconds = [sample.seconds for sample in found]
            read = statistics.median(sample.read_nbytes for sample in found) / nbytes
            medians[name] = statistics.median(seconds), read
            row = [mesh, name, f"{min(seconds):.2f} / {statistics.median(seconds):.2f}"]
            cpu_s = statistics.median(sample.cpu_s for sample in found)
            grown = max(sample.rss_growth for sample in found) / MIB
            rows.append([*row, f"{read:.3f}", f"{cpu_s:.1f}", f"{grown:.0f}"])
        times = medians[TRANSFORMERS][0] / medians[OURS][0]
        bars.append(Bar(f"{mesh}: bytes read, of the model", medians[OURS][1], 1.02, "x"))
        bars.append(Bar(f"{mesh}: times as fast", times, 5.0, "x", at_least=True))
    print_table(rows)
    print("\nAsked\n")
    print_table([["what", "asked", "found", "verdict"], *(bar.cells() for bar in bars)])
    if options.json is not None:
        facts = {"machine": machine, "samples": [asdict(sample) for sample in bench.samples]}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
