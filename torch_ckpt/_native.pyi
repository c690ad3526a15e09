"""Types of the native engine (csrc/bindings/module.cc). Private: use the package's own classes."""

from collections.abc import Mapping, Sequence

from typing_extensions import Buffer

DTYPE_NAMES: list[str]

IndexBox = tuple[Sequence[int], Sequence[int], int, int, int, bool, Sequence[str]]
"""Offsets, sizes, number of the file, offset and length there, whether plain, transforms."""

IndexEntry = tuple[str, tuple[str, str, bool, bool, Sequence[int]] | None, Sequence[IndexBox]]
"""FQN; dtype, memory format, requires_grad, pin_memory and sizes of a tensor; boxes."""

IndexPath = tuple[str, Sequence[str | int]]
"""FQN; keys from the root of the nested state dict."""

class TensorView: ...

class FileSystem:
    def create_directories(self, path: bytes) -> None: ...
    def sync_directory(self, path: bytes) -> None: ...
    def remove(self, path: bytes) -> None: ...
    def list_directory(self, path: bytes) -> list[bytes]: ...
    def exists(self, path: bytes) -> bool: ...
    def read_file(self, path: bytes) -> bytes: ...
    def commit(
        self,
        directory: bytes,
        metadata_name: str,
        index_name: str,
        metadata: bytes,
        index: bytes,
        save_id: str,
        data_files: list[str],
        sync: bool,
    ) -> None: ...

def local_file_system() -> FileSystem: ...
def unpickle_metadata(
    pickle: bytes, vocabulary: Mapping[tuple[str, str], tuple[object, ...]]
) -> object: ...

class Index:
    @property
    def save_id(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def has_entries(self) -> bool: ...
    @property
    def files(self) -> list[tuple[str, int]]: ...
    @property
    def entries(self) -> list[IndexEntry] | None: ...
    @property
    def paths(self) -> list[IndexPath] | None: ...

def make_index(
    save_id: str,
    metadata: bytes,
    files: Sequence[tuple[str, int, bytes]],
    version: str,
    entries: Sequence[IndexEntry] | None,
    paths: Sequence[IndexPath] | None,
) -> bytes: ...
def open_checkpoint(
    fs: FileSystem, directory: bytes, metadata_name: str, index_name: str
) -> tuple[bytes, Index | None, Index | None, bool, str]: ...

class Layout:
    def __init__(self, tensors: Sequence[tuple[int, Sequence[int]]]) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def extents(self) -> list[tuple[int, int]]: ...

class BufferPool:
    def __init__(self, nbytes: int, block_nbytes: int) -> None: ...
    @property
    def nbytes(self) -> int: ...

class SaveJob:
    def __init__(
        self,
        fs: FileSystem,
        path: bytes,
        layout: Layout,
        pool: BufferPool,
        direct: bool,
        sync: bool,
    ) -> None: ...
    def write(self, items: Sequence[tuple[int, TensorView]]) -> None: ...
    def append(self, data: Buffer) -> tuple[int, int]: ...
    def finish(self) -> None: ...
    def abort(self) -> None: ...
    @property
    def sums(self) -> tuple[int, bytes]: ...
    @property
    def mode(self) -> tuple[str, bool, bool, list[str]]: ...

class LoadedBytes(Buffer): ...

class LoadJob:
    def __init__(
        self,
        fs: FileSystem,
        directory: bytes,
        index: Index | None,
        buffer_nbytes: int,
        block_nbytes: int,
        threads: int,
        direct: bool,
        verify: bool,
        slices_are_archives: bool,
    ) -> None: ...
    def check(self, slices: Sequence[tuple[str, int, int, str]]) -> None: ...
    def run(
        self,
        tensors: Sequence[tuple[tuple[str, int, int, str], Sequence[int], TensorView]],
        slices: Sequence[tuple[str, int, int, str]],
    ) -> tuple[list[bool], list[LoadedBytes]]: ...

class VerifyJob:
    def __init__(
        self,
        fs: FileSystem,
        directory: bytes,
        index: Index,
        buffer_nbytes: int,
        block_nbytes: int,
        threads: int,
        direct: bool,
    ) -> None: ...
    def check(self, file: int, begin: int, end: int) -> list[tuple[int, int]]: ...

class ItemTable:
    def __len__(self) -> int: ...
    def add_object(self, fqn: str, nbytes: int) -> None: ...
    def add_tensor(
        self,
        fqn: str,
        dtype: str,
        itemsize: int,
        memory_format: str,
        requires_grad: bool,
        pin_memory: bool,
        sizes: Sequence[int],
        is_shard: bool,
        offsets: Sequence[int],
        box_sizes: Sequence[int],
    ) -> None: ...
    def encode(self) -> bytes: ...

class GlobalPlan:
    def __init__(self, plans: Sequence[bytes], ranks_per_node: int) -> None: ...
    @property
    def load(self) -> list[int]: ...
    def written(
        self, rank: int, plan: bytes
    ) -> list[tuple[str, tuple[list[int], list[int]] | None, tuple[int, int] | None]]: ...

def balance_files(nbytes: Sequence[int], count: int) -> list[int]: ...
