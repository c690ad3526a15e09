"""Nothing of torch is changed by importing or constructing anything, or by a save or load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint._async_process_executor
import torch.distributed.checkpoint._async_thread_executor
import torch.distributed.checkpoint.state_dict_loader
import torch.distributed.checkpoint.state_dict_saver


def seen():
    modules = {n: m for n, m in sys.modules.items() if n.startswith("torch.distributed") and m}
    found = {}
    for name, module in modules.items():
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type) and value.__module__.startswith("torch.distributed"):
                found.update({(name, key, k): v for k, v in vars(value).items()})
    return found


def changed(before):
    caches = {"__warningregistry__", "__abstractmethods__", "_abc_impl", "__doc__"}
    now = seen()
    return [
        key for key, value in before.items()
        if key[-1] not in caches and key in now and now[key] is not value
        and not isinstance(value, (int, str, dict, list, type(None)))
    ]


state = {"w": torch.arange(5.0), "step": 3}
dcp.save(state, checkpoint_id=f"{sys.argv[1]}/stock")  # What torch does to itself, it has done.
before = seen()
import torch_ckpt
import torch_ckpt.api

own = {"rng": torch_ckpt.RankState(torch.get_rng_state, torch.set_rng_state), **state}
writer = torch_ckpt.FastWriter(f"{sys.argv[1]}/0")
dcp.save(own, storage_writer=writer, planner=torch_ckpt.FastSavePlanner())
dcp.load(own, storage_reader=torch_ckpt.FastReader(f"{sys.argv[1]}/0"))
torch_ckpt.save(own, checkpoint_id=f"{sys.argv[1]}/1")
torch_ckpt.load(own, checkpoint_id=f"{sys.argv[1]}/1")
torch_ckpt.async_save(own, checkpoint_id=f"{sys.argv[1]}/2").result()
with torch_ckpt.Run(f"{sys.argv[1]}/run", asynchronous=True) as run:
    run.save(1, own)
assert not changed(before), changed(before)
with torch_ckpt.installed():
    assert changed(before)
    dcp.save(own, checkpoint_id=f"{sys.argv[1]}/3")
assert not changed(before), changed(before)
"""


@pytest.mark.timeout(120)
def test_torch_is_as_it_was(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], check=True, timeout=100)
