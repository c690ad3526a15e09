"""Writes the seeds of the fuzz targets; run it again when a target reads something new.

Usage: ``python fuzz/make_seeds.py``
"""

from __future__ import annotations

import io
import pickle
import random
import struct
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard

from torch_ckpt._core import _native, _tensor_view

SEEDS = Path(__file__).parent / "seeds"
GOLDEN = Path(__file__).parent.parent / "tests" / "golden"


def write(target: str, name: str, data: bytes) -> None:
    """One seed of a target."""
    folder = SEEDS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def saved(value: Any) -> bytes:
    """What ``torch.save`` writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def make_zip_seeds() -> None:
    """Frames of ours and of torch, plain and odd; three bytes before each say how to cut it."""
    cut = bytes(3)
    for name in ("float32", "float8_e5m2", "empty", "scalar"):
        write("zip_frame_fuzzer", f"ours_{name}", cut + (GOLDEN / f"frames/{name}.pt").read_bytes())
    values = {
        "transposed": torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
        "view": torch.arange(8)[2:4],
        "channels_last": torch.zeros(1, 2, 2, 2).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "two": [torch.zeros(1), torch.zeros(2)],
        "object": {"step": 1, "name": "x"},
    }
    for name, value in values.items():
        write("zip_frame_fuzzer", f"torch_{name}", cut + saved(value))
    # Without checksums, what the fuzzer changes inside a record is not refused at once.
    torch.serialization.set_crc32_options(False)
    for name, value in values.items():
        write("zip_frame_fuzzer", f"unchecked_{name}", cut + saved(value))
    write("zip_frame_fuzzer", "unseen_payload", b"\x80\0\1" + saved(values["view"]))


def make_index_seeds() -> None:
    """Indexes as they are, behind a byte that says whether checksums are to be made true again."""
    name = "__0_0_0123456789abcdef.distcp"
    file = (name, 1000, bytes(8), b"", 0)
    digests = struct.pack("<4q", 64, 1, 2, 3)  # Of the slice at 64: its sample, and both halves.
    box = ([0, 0], [2, 3], 0, 64, 700, True, [])
    object_box = ([], [], 0, 800, 100, False, ["zstd", "x"])
    properties = ("bfloat16", "contiguous_format", True, False, [2, 3])
    entries = [("model.weight", properties, [box]), ("step", None, [object_box])]
    paths = [("model.weight", ["model", "weight"]), ("step", ["step", -1])]
    facts: dict[str, tuple[Any, Any, Any]] = {
        "whole": ([file], entries, paths),
        "sums": ([file], None, None),
        "digests": ([(name, 1000, bytes(8), digests, 5)], entries, paths),
        "origin": ([(name, 1000, bytes(8), b"", 5)], None, None),
        "empty": ([], [], []),
    }
    for name, (files, listed, places) in facts.items():
        _, index = _native.make_index(
            "0123456789abcdef", b"metadata", files, "1.0.0", listed, places
        )
        for sealed in (0, 1):
            write("index_fuzzer", f"{name}_{sealed}", bytes([sealed]) + index)


def make_block_seeds() -> None:
    """Encoded blocks of each unit, and pairs of versions; the target describes the bytes before."""
    for shift, dtype in enumerate((torch.uint8, torch.int16, torch.int32, torch.int64)):
        base = torch.arange(600, dtype=torch.int64).to(dtype)
        for name, every in (("few", 290), ("some", 11), ("all", 1)):
            result = base.clone()
            result[::every] ^= 3
            snapshot, digests = base.clone(), bytearray(8)
            views = [_tensor_view.view(tensor, "", True) for tensor in (snapshot, result)]
            how = 0, 1, digests, 1, _native.DifferenceMemory()
            encoded, _ = _native.take_difference(*views, *how).encode()
            head = bytes([shift]) + struct.pack("<H", len(base) - 1)
            write("encoded_block_fuzzer", f"{name}_{base.itemsize}", head + encoded)
            pair = base[:64].numpy().tobytes() + result[:64].numpy().tobytes()
            write(
                "encoded_block_fuzzer",
                f"{name}_{base.itemsize}_pair",
                bytes([4 | shift, 0, 0]) + pair,
            )


def varint(value: int) -> bytes:
    """As ``plan/wire.h`` writes numbers."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def word(text: str) -> bytes:
    """As ``plan/wire.h`` writes words."""
    return varint(len(text)) + text.encode()


def make_plan_seeds() -> None:
    """Plans of few items, and what travels with them, as the headers in ``plan/`` describe them.

    Behind a byte that has the fuzzer write the checksum, which Python does not know.
    """
    sizes = varint(2) + varint(8) + varint(6)
    matrix = b"\1" + varint(2) + word("bfloat16") + word("contiguous_format") + sizes
    scalar = b"\7" + varint(4) + word("float32") + word("contiguous_format") + varint(0)
    fqns = varint(4)
    for shared, rest, number in ((0, "model.a", 0), (6, "b", 0), (0, "step", 1), (0, "lr", 2)):
        fqns += varint(shared) + word(rest) + varint(number)
    entries = varint(3) + matrix + b"\0" + scalar + fqns
    # Whole, upper rows, object, scalar, lower rows, a corner.
    items = {
        "whole": varint(4) + b"\1\1\0\x64\1",
        "rows": varint(5) + b"\x12\0\4\1\0\x64\1" + b"\x1a\0\4\4",
        "corner": varint(4) + b"\xf2\3\4\4\3\3" + b"\1\0\x64\1",
    }
    for name, listed in items.items():
        body = b"TCPL\1\0\0\0" + varint(len(entries)) + entries + listed + bytes(8)
        for flags in (1, 5, 9):
            write("plan_wire_fuzzer", f"{name}_{flags}", bytes([flags]) + body)
    runs = varint(2) + varint(0) + varint(5) + varint(3) + varint(200)
    cuts = varint(2) + varint(3) + varint(0) + varint(7) + varint(0) + varint(9) + varint(300)
    assignment = b"TCAS\1\0\0\0" + varint(300) + runs + cuts + bytes(8)
    write("plan_wire_fuzzer", "assignment", b"\3" + assignment)
    # model.layers.0.weight, model.layers.12.weight (of one key), step.
    paths = varint(3) + varint(0) + word("model.layers.0.weight") + varint(4)
    paths += varint(10) + varint(12) + varint(1) + varint(12)
    paths += varint(13) + word("12.weight") + varint(1) + varint(44)
    paths += varint(0) + word("step") + varint(1) + varint(8)
    write("plan_wire_fuzzer", "paths", b"\x11TCPP\1\0\0\0" + paths + bytes(8))
    # Item, distance from the former one, bytes: forward, behind a gap, and back.
    extents = varint(3)
    for number in (0, 0, 1401, 0, 6784, 600, 7, 8183, 2):
        extents += varint(number)
    write("plan_wire_fuzzer", "extents", b"\x21TCEX\1\0\0\0" + extents + bytes(8))


def make_pickle_seeds() -> None:
    """Metadata that stock DCP has written, in each protocol."""
    state = {
        "weight": torch.zeros(2, 3),
        "half": torch.zeros(2, dtype=torch.bfloat16),
        "optimizer": {"step": 3, "param_groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]},
    }
    with tempfile.TemporaryDirectory() as folder:
        extensions = {"plain": None, "zstd": [ZStandard()]}
        for name, found in extensions.items():
            writer = dcp.FileSystemWriter(Path(folder) / name, _extensions=found)
            dcp.save(state, storage_writer=writer, no_dist=True)
            pickled = (Path(folder) / name / ".metadata").read_bytes()
            write("pickle_fuzzer", name, pickled)
        metadata = pickle.loads(pickled)
    for protocol in range(6):
        write("pickle_fuzzer", f"protocol_{protocol}", pickle.dumps(metadata, protocol))
    plain = [None, True, 1, -(2**40), 2**70, 0.5, "\u00e9", b"bytes", {"a": [()], 1: {}}, {1}]
    write("pickle_fuzzer", "plain_data", pickle.dumps(plain, 5))
    looped: list[Any] = []
    looped.append((looped, looped))
    write("pickle_fuzzer", "cycle", pickle.dumps(looped, 4))
    write("pickle_fuzzer", "forbidden", pickle.dumps(print, 4))


def make_save_load_seeds() -> None:
    """Bytes that choose disks, buffers and tensors; the target uses any bytes."""
    for number in range(40):
        write("save_load_fuzzer", f"{number}", random.Random(number).randbytes(200))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    make_zip_seeds()
    make_index_seeds()
    make_block_seeds()
    make_plan_seeds()
    make_pickle_seeds()
    make_save_load_seeds()
