"""Who loads what in bench_load.py. Imports no torch: only the ranks themselves need it."""

from __future__ import annotations

from dataclasses import dataclass

from machine import GIB

OURS = "torch-ckpt"
OURS_OFF = f"{OURS} without exchange"
OURS_PLANNED = f"{OURS} with FastLoadPlanner"
ON_STOCKS_FILES = f"{OURS} on dcp's files"
ON_STOCKS_FILES_OFF = f"{ON_STOCKS_FILES} without exchange"
STOCK = "dcp"

SAVED = (OURS, STOCK, "torch.save", "safetensors")  # Formats, each in a folder of its name.


@dataclass(frozen=True)
class Contender:
    """One way for all ranks to load their tensors; how is in rank_loads.py.

    Attributes:
        saved: The format that it reads, one of `SAVED`.
        temporary: Memory that it takes for a while, of what a rank loads; roughly.
        shards: Whether it loads row shards.
    """

    saved: str
    temporary: float = 0.1
    shards: bool = False


CONTENDERS = {
    OURS: Contender(OURS, temporary=0.4, shards=True),
    OURS_OFF: Contender(OURS, shards=True),
    OURS_PLANNED: Contender(OURS, temporary=0.4, shards=True),
    ON_STOCKS_FILES: Contender(STOCK, temporary=0.4),
    ON_STOCKS_FILES_OFF: Contender(STOCK),
    STOCK: Contender(STOCK, shards=True),
    "torch.load": Contender("torch.save", temporary=1.0),
    "torch.load-mmap": Contender("torch.save"),
    "safetensors": Contender("safetensors", shards=True),
    "fastsafetensors": Contender("safetensors", temporary=1.0),
    "runai": Contender("safetensors", temporary=0.5),
}

EXCHANGING = (OURS, OURS_OFF, ON_STOCKS_FILES, ON_STOCKS_FILES_OFF, STOCK)
BY_OWN_FILES = [name for name in CONTENDERS if name not in (ON_STOCKS_FILES, ON_STOCKS_FILES_OFF)]

# State dicts -----------------------------------------------------------------------------------

REPLICATED, ROWS, ONE = "replicated", "rows", "one"


def shapes(kind: str, gib: float) -> dict[str, tuple[int, int]]:
    """Shapes of the bf16 tensors of a state dict: of 1 GiB, or of `gib` times that.

    `REPLICATED` is 24 tensors of 32 MiB, 224 of 1 MiB and 512 of 64 KiB; `ROWS` is alike, and no
    number of rows divides by 2 or 3; `ONE` is a single tensor.
    """
    scale = max(int(gib * GIB) >> 20, 4)  # Of 1024.
    scale -= scale % 4  # Rows are a multiple of 8 bytes.
    if kind == ONE:
        return {"embedding.weight": (512 * 1024, scale)}
    odd = 3 if kind == ROWS else 0  # 4099, 515 and 35 rows.
    found = {f"layers.{i}.weight": (4096 + odd, 4 * scale) for i in range(24)}
    found |= {f"layers.{i}.gate": (512 + odd, scale) for i in range(224)}
    return found | {f"layers.{i}.norm": (32 + odd, scale) for i in range(512)}


def nbytes_of(kind: str, gib: float) -> int:
    """Bytes of the whole state dict, each tensor once."""
    return sum(2 * rows * columns for rows, columns in shapes(kind, gib).values())
