"""Pickles as no pickler writes them, in archives of ``torch.save``: opcode by opcode."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from typing import Any

from torch.distributed.checkpoint import DefaultSavePlanner


def archive(pickled: bytes, *others: str) -> io.BytesIO:
    """As ``torch.save`` writes it, of any pickle; with other records, empty."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/version", "3\n")
        file.writestr("archive/data/0", b"\1" * 5056)
        for name in others:
            file.writestr(f"archive/{name}", b"")
    stream.seek(0)
    return stream


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def named(full_name: str) -> bytes:
    """What pushes a class or function."""
    module, _, name = full_name.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def raw(data: bytes) -> bytes:
    """What pushes bytes, as protocol 2 has them."""
    return b"c_codecs\nencode\n" + text(data.decode("latin1")) + text("latin1") + b"\x86R"


RECONSTRUCT = (
    b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\n(K\x00t" + raw(b"b") + b"\x87R"
)


def dtype(code: str, state: bytes | None = None) -> bytes:
    plain = b"(K\x03" + text("<") + b"NNN" + number(-1) + number(-1) + b"K\x00t"
    return (
        b"cnumpy\ndtype\n"
        + text(code)
        + b"\x89\x88\x87R"
        + (plain if state is None else state)
        + b"b"
    )


def array(code: str, shape: bytes, data: bytes, state: bytes | None = None) -> bytes:
    return RECONSTRUCT + b"(K\x01" + shape + dtype(code, state) + b"\x89" + data + b"tb"


DOUBLED = b"".join(b"q%ch%c\x86" % (i, i) for i in range(1, 60))
"""What makes of a value a tuple of two, of two of these, and so on."""


def call(name: str, *arguments: bytes) -> bytes:
    return named(name) + b"(" + b"".join(arguments) + b"tR"


def tuple_of(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


LAYOUT = call("torch.serialization._get_layout", text("torch.sparse_coo"))


def tensor_of(storage: str, count: int, sizes: bytes, strides: bytes, record: str = "0") -> bytes:
    """A tensor of the archive's storage."""
    pid = tuple_of(text("storage"), named(storage), text(record), text("cpu"), number(count)) + b"Q"
    hooks = named("collections.OrderedDict") + b")R"
    return call("torch._utils._rebuild_tensor_v2", pid, b"K\x00", sizes, strides, b"\x89", hooks)


class StoredBytes(DefaultSavePlanner):
    """Stores objects that are bytes as they are."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        if isinstance(object, bytes):
            return io.BytesIO(object)
        return super().transform_object(write_item, object)
