"""One rank of bench_publish.py: trains, publishes and saves, or serves and updates."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from load_rank import Answer, Rank, serve
from machine import GIB, Meter
from rank_loads import State, local_rows
from store_rank import DOWNLOADS, PART, UPLOADS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros

import torch_ckpt
from torch_ckpt import FastWriter, Publisher, Subscriber
from torch_ckpt._core import _native, _tensor_view
from torch_ckpt.filesystems.location import Location
from torch_ckpt.publishing.version_files import BLOCK_NBYTES, read_version

DEVIATION = 0.02  # Of the weights, as models are initialized.
BF16 = torch.bfloat16


def shapes(gib: float) -> dict[str, tuple[int, ...]]:
    """Two layers and the embedding of Llama 2 7B, which are 1 GiB; smaller ones for less."""
    width = int(4096 * math.sqrt(gib)) // 64 * 64
    inner = int(width * 2.6875)
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(2):
        attention = {f"layers.{layer}.{name}_proj": (width, width) for name in "qkvo"}
        mlp = {f"layers.{layer}.{name}_proj": (inner, width) for name in ("gate", "up")}
        norms = {f"layers.{layer}.norm{number}": (width,) for number in range(2)}
        found |= attention | mlp | norms | {f"layers.{layer}.down_proj": (width, inner)}
    rest = int(gib * GIB) // 2 - sum(map(math.prod, found.values()))
    return found | {"embedding": (max(rest // width, 2), width)}


def nbytes_of(gib: float) -> int:
    """Bytes of the whole model."""
    return 2 * sum(map(math.prod, shapes(gib).values()))


class PublishRank(Rank):
    """What one process keeps between calls: weights and their masters, or served tensors."""

    def prepare(self, gib: float) -> int:
        """Makes this rank's rows of a model; returns their bytes."""
        torch.set_num_threads(1)
        torch.manual_seed(dist.get_rank())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.state: State = {
            name: zeros(shape, dtype=BF16, device_mesh=mesh, placements=[Shard(0)])
            for name, shape in shapes(gib).items()
        }
        self._noise = torch.randn(1 << 22)
        self.parts = [local_rows(tensor)[0] for tensor in self.state.values()]
        self.masters = [torch.randn(part.shape).mul_(DEVIATION) for part in self.parts]
        for part, master in zip(self.parts, self.masters, strict=True):
            part.copy_(master)
        self._publisher: Publisher | None = None
        self._stager: Any = None
        return sum(part.nbytes for part in self.parts)

    def step(self, rate: float) -> Answer:
        """One step of about this learning rate; returns how many elements have other bits."""
        changed = 0
        for part, master in zip(self.parts, self.masters, strict=True):
            flat = master.view(-1)
            for begin in range(0, flat.numel(), len(self._noise)):
                piece = flat[begin : begin + len(self._noise)]
                first = int(torch.randint(len(self._noise) - len(piece) + 1, ()))
                piece.add_(self._noise[first : first + len(piece)], alpha=rate)
            new = master.to(BF16)
            changed += int((new.view(torch.int16) != part.view(torch.int16)).sum())
            part.copy_(new)
        return {"changed": changed}

    # ---- The trainer ----

    def open(self, url: str, whole_every: int) -> None:
        """Begins to publish to a directory."""
        if self._publisher is not None:
            self._publisher.close()
        options = {"whole_every": whole_every, "record": False}
        self._publisher = Publisher(url, **options)

    def publish(self, version: int) -> Answer:
        """Publishes the weights."""
        assert self._publisher is not None
        return self._timed(
            lambda: self._publisher.publish(version, self.state), self._publisher.wait
        )

    def async_save(self, folder: str) -> Answer:
        """Saves the same tensors asynchronously, in memory that the last save has left."""
        pending: list[Any] = []
        writer = FastWriter(folder)

        def begin() -> None:
            pending.append(torch_ckpt.async_save(self.state, storage_writer=writer))

        return self._timed(begin, lambda: pending[0].result())

    def _timed(self, call: Callable[[], Any], wait: Callable[[], Any]) -> Answer:
        dist.barrier()
        begin, cpu_s = time.perf_counter(), time.process_time()
        call()
        stop_s = time.perf_counter() - begin
        stop_cpu_s = time.process_time() - cpu_s
        wait()
        dist.barrier()
        seconds = time.perf_counter() - begin
        all_cpu_s = time.process_time() - cpu_s
        return {"stop_s": stop_s, "s": seconds, "cpu_s": all_cpu_s, "stop_cpu_s": stop_cpu_s}

    def memory(self, url: str, rate: float) -> Answer:
        """Returns how much memory a publisher takes besides the published values of this rank."""
        tiny = {"tiny": torch.zeros(8)}
        with Publisher(f"{url}-tiny", record=False) as publisher:  # Imports, threads, groups.
            for version in range(3):
                publisher.publish(version, tiny)
        answer: Answer = {"own": sum(part.nbytes for part in self.parts)}
        with Publisher(url, record=False) as publisher:
            for version, name in enumerate(("whole", "delta")):
                with Meter() as meter:
                    publisher.publish(version, self.state)
                    publisher.wait()
                answer[name] = meter.usage.rss_growth
                self.step(rate)
        return answer

    def codec(self, rate: float, mib: int) -> Answer:
        """Returns the CPU time of each part of the codec, in one thread, on one tensor."""
        count = mib << 19
        base = torch.randn(count).mul_(DEVIATION)
        live = (base + torch.randn(count) * rate).to(BF16)
        base = base.to(BF16)
        snapshot, target = base.clone(), base.clone()
        blocks = base.nbytes // BLOCK_NBYTES
        digests = bytearray(8 * blocks)
        view = _tensor_view.view
        answer: Answer = {"nbytes": base.nbytes}
        _native.take_snapshot(
            view(snapshot, "w", writable=True), view(base, "w", writable=False), digests, 1
        )

        def timed(name: str, call: Callable[[], Any]) -> Any:
            begin = time.thread_time()
            found = call()
            answer[name] = time.thread_time() - begin
            return found

        source = view(live, "w", writable=False)
        own = view(snapshot, "w", writable=True)
        how = 0, blocks, digests, 1, _native.DifferenceMemory()
        difference = timed("compare", lambda: _native.take_difference(own, source, *how))
        payload, table = timed("encode", lambda: difference.encode(1))
        mask = bytearray(base.nbytes)
        whole = ([0], [count])
        values = view(target, "w", writable=True)
        for name, checked in (("verify", values), ("decode", None)):
            mask[:] = bytes(len(mask))
            call = (mask, checked, whole, whole, 2, table, 0, payload, 1)
            timed(name, lambda call=call: _native.merge_blocks(*call))
        timed("xor", lambda: _native.apply_mask(values, mask, 1))
        assert torch.equal(target.view(torch.int16), live.view(torch.int16))
        return answer

    # ---- Inference ----

    def serve(self, url: str, gib: float, parts: int) -> None:
        """Makes tensors that an engine would have: the first of so many parts of the rows."""
        torch.set_num_threads(1)
        self.subscriber = Subscriber(url)
        self.served: dict[str, Any] = {}
        for name, shape in shapes(gib).items():
            is_cut = parts > 1 and len(shape) > 1
            tensor = torch.zeros(shape[0] // parts if is_cut else shape[0], *shape[1:], dtype=BF16)
            self.served[name] = (shape, (0, 0), tensor) if is_cut else tensor

    def update(self) -> Answer:
        """Brings them to the newest version."""
        begin, cpu_s = time.perf_counter(), time.process_time()
        version = self.subscriber.update(self.served)
        seconds = time.perf_counter() - begin
        assert not self.subscriber.refused
        facts = {"version": version, "read": self.subscriber.read_nbytes}
        return {"s": seconds, "cpu_s": time.process_time() - cpu_s, **facts}

    def check(self) -> list[int]:
        """Returns a digest of each served tensor, or of this rank's rows."""
        values = getattr(self, "served", None) or dict(zip(self.state, self.parts, strict=True))
        return [_native.xxh3(value.view(torch.uint8).numpy()) for value in values.values()]

    # ---- A whole export and load ----

    def export(self, gib: float, key: str) -> Answer:
        """Serializes a whole model on one rank, and uploads it by parts. Gathering is not counted.

        Nothing is written on the way, so this is faster than an export to files.
        """
        from obstore.store import S3Store
        from safetensors.torch import save

        bucket, _, name = key.partition("/")
        store, whole = (
            S3Store(bucket),
            {n: torch.zeros(s, dtype=BF16) for n, s in shapes(gib).items()},
        )
        begin = time.perf_counter()
        store.put(name, save(whole), chunk_size=PART, max_concurrency=UPLOADS)
        return {"s": time.perf_counter() - begin}

    def load_whole(self, key: str) -> Answer:
        """Downloads the file by ranges, and copies its values to the served tensors."""
        from concurrent.futures import ThreadPoolExecutor

        from obstore.store import S3Store
        from safetensors.torch import load

        bucket, _, name = key.partition("/")
        store, begin = S3Store(bucket), time.perf_counter()
        nbytes = store.head(name)["size"]
        memory = bytearray(nbytes)

        def get(at: int) -> None:
            end = min(at + PART, nbytes)
            memory[at:end] = store.get_range(name, start=at, end=end)

        with ThreadPoolExecutor(DOWNLOADS) as threads:
            list(threads.map(get, range(0, nbytes, PART)))
        loaded = load(bytes(memory))
        for fqn, tensor in self.served.items():
            tensor.copy_(loaded[fqn])
        return {"s": time.perf_counter() - begin}

    def nbytes(self, url: str, version: int) -> int:
        """Returns the size of the files of a version."""
        root = Location(url)
        files = root / f"version-{version}"
        read_version(root, version)
        return sum((files / name).nbytes() or 0 for name in files.names())


if __name__ == "__main__":
    serve(PublishRank)
