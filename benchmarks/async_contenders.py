"""Who saves in bench_async.py. Imports no torch: only the ranks themselves need it."""

from __future__ import annotations

OURS = "torch-ckpt"
OURS_PLUGIN = f"{OURS} under DCP's planner"
OURS_RESERVED = f"{OURS}, reserved"
OURS_AGENT = f"{OURS}, agent"
OURS_AGENT_RESERVED = f"{OURS_AGENT}, reserved"
OURS_SYNC = f"{OURS}, synchronous"
STOCK_THREAD = "dcp, thread"
STOCK_CACHED = "dcp, thread, cached copy"
STOCK_PROCESS = "dcp, process, shared memory"
OURS_OVERLAPPED = f"{OURS}, not blocking"
TORCH_SAVE = "torch.save"
MEMCPY = "memcpy into warm buffers"

FROM_MEMORY = f"{OURS}, from memory"
FROM_DISK = f"{OURS}, from disk, cold"
STOCK_FROM_DISK = "dcp, from disk, cold"

ASYNC = (OURS, OURS_AGENT, OURS_PLUGIN, STOCK_THREAD, STOCK_CACHED, STOCK_PROCESS)
ASYNC_CUDA = (*ASYNC, OURS_OVERLAPPED)
