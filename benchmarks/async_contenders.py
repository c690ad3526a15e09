"""Who saves in bench_async.py. Imports no torch: only the ranks themselves need it."""

from __future__ import annotations

OURS = "torch-ckpt"
OURS_PLUGIN = f"{OURS} under DCP's planner"
OURS_RESERVED = f"{OURS}, reserved"
OURS_SYNC = f"{OURS}, synchronous"
STOCK_THREAD = "dcp, thread"
STOCK_CACHED = "dcp, thread, cached copy"
STOCK_PROCESS = "dcp, process, shared memory"
TORCH_SAVE = "torch.save"
MEMCPY = "memcpy into warm buffers"

ASYNC = (OURS, OURS_PLUGIN, STOCK_THREAD, STOCK_CACHED, STOCK_PROCESS)
