"""One rank of bench_convert.py: saves with DeepSpeed's ZeRO-3, and resumes in two ways."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from load_rank import Answer, Rank, serve
from machine import MIB, Meter
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DIRECT, CONVERTED = "FastReader", "ds_to_universal, then DeepSpeed"
OURS = "torch-ckpt convert --to universal"
WEIGHTS, OURS_WEIGHTS = "zero_to_fp32", "torch-ckpt convert --to torch --prefix model."
WIDTH = 1024
LAYER_NBYTES = 4 * WIDTH * WIDTH * 4 * 3  # Weights in fp32, and two moments of Adam.

# Each prints its seconds without the imports, and the peak memory of its largest process in MiB: in
# all, and beyond what the imports need.
_MEASURED = """
import resource, sys, time
{imports}

def peak_mib():  # That of getrusage includes the process before exec.
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

imported, begin = peak_mib(), time.perf_counter()
{run}
seconds = time.perf_counter() - begin
peak = max(peak_mib(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
print("measured", seconds, peak, peak - imported)
"""
_CONVERSIONS = {
    CONVERTED: _MEASURED.format(
        imports="import types\nfrom deepspeed.checkpoint import ds_to_universal",
        run="""
ds_to_universal.main(types.SimpleNamespace(
    input_folder=sys.argv[1], output_folder=sys.argv[2], num_extract_workers=4,
    num_merge_workers=2, keep_temp_folder=False, strict=True, inject_missing_state=False,
))
""",
    ),
    OURS: _MEASURED.format(
        imports="from torch_ckpt.cli.main import main\nimport torch_ckpt.conversion.convert",
        run='assert main(["convert", sys.argv[1], sys.argv[2], "--to", "universal"]) == 0',
    ),
    WEIGHTS: _MEASURED.format(
        imports="from deepspeed.utils import zero_to_fp32",
        run="zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2])",
    ),
    OURS_WEIGHTS: _MEASURED.format(
        imports="from torch_ckpt.cli.main import main\nimport torch_ckpt.conversion.convert",
        run="""
assert main(["convert", sys.argv[1], sys.argv[2], "--to", "torch", "--prefix", "model."]) == 0
""",
    ),
}


class ConvertRank(Rank):
    """What one process keeps between calls: an engine of DeepSpeed, and a model of FSDP2."""

    def prepare(self, gib: float) -> int:
        """Saves a checkpoint, and makes what it is loaded into; returns the bytes of its state."""
        os.environ.update(
            RANK=str(dist.get_rank()),
            WORLD_SIZE=str(dist.get_world_size()),
            LOCAL_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29500",
            DS_ACCELERATOR="cpu",
        )
        self.count = max(round(gib * (1 << 30) / LAYER_NBYTES), 1)
        engine = self._engine(universal=False)
        for layer in engine.module:
            engine.backward(layer(torch.ones(1, WIDTH)).sum())
        engine.step()
        engine.save_checkpoint(str(self.directory), tag="saved")
        engine.destroy()
        self.engine = self._engine(universal=True)
        net = nn.Sequential(*(layer() for layer in self._layers()))
        self.net = fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        get_state_dict(self.net, self.optimizer)  # Makes the state of the optimizer.
        return self.count * LAYER_NBYTES

    def resume(self, contender: str) -> Answer:
        """Returns the seconds and the peak memory of a resume."""
        dist.barrier()
        if contender == DIRECT:
            with Meter() as meter:
                self._resume_direct()
            return {
                "convert_s": 0.0,
                "load_s": meter.usage.total_seconds,
                "total_s": meter.usage.total_seconds,
                "rank_rss": meter.usage.rss_growth / MIB,
                "convert_rss": 0.0,
            }
        convert_s, _, convert_rss = self.convert(CONVERTED)
        with Meter() as meter:
            self.engine.load_checkpoint(str(self.directory))
        load_s = meter.usage.total_seconds
        return {
            "convert_s": convert_s,
            "load_s": load_s,
            "total_s": convert_s + load_s,
            "rank_rss": meter.usage.rss_growth / MIB,
            "convert_rss": convert_rss,
        }

    def convert(self, contender: str) -> tuple[float, float, float]:
        """Converts on the first rank; returns seconds, peak MiB, and those beyond the imports."""
        measured = torch.zeros(3, dtype=torch.float64)
        if dist.get_rank() == 0:
            source, target = self.directory / "saved", self.directory / "universal"
            if contender == WEIGHTS:  # It takes the folder above.
                source = self.directory
            command = [sys.executable, "-c", _CONVERSIONS[contender], str(source), str(target)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{contender} failed: {done.stderr[-1000:]}")
            line = next(line for line in done.stdout.splitlines() if line.startswith("measured"))
            measured = torch.tensor([float(word) for word in line.split()[1:]], dtype=torch.float64)
        dist.broadcast(measured, 0)
        seconds, peak, growth = measured.tolist()
        return seconds, peak, growth

    def _layers(self) -> list[Any]:
        return [lambda: nn.Linear(WIDTH, 4 * WIDTH, bias=False)] * self.count

    def _engine(self, *, universal: bool) -> Any:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # Would compile it.
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 1e-3}},
            "zero_optimization": {"stage": 3},
            "checkpoint": {"load_universal": universal},
        }
        torch.manual_seed(0)
        net = nn.Sequential(*(layer() for layer in self._layers()))
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        return deepspeed.initialize(
            model=net, model_parameters=net.parameters(), config=config, dist_init_required=False
        )[0]

    def _resume_direct(self) -> None:
        from torch_ckpt import FastReader

        model, optim = get_state_dict(self.net, self.optimizer)
        state = {"model": model, "optim": optim}
        dcp.load(state, storage_reader=FastReader(self.directory / "saved"))
        set_state_dict(
            self.net,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )

    def forget(self) -> None:
        """Removes what the conversion wrote."""
        if dist.get_rank() == 0:
            from machine import remove_tree

            target = Path(self.directory / "universal")
            target.unlink() if target.is_file() else remove_tree(target)
        dist.barrier()


if __name__ == "__main__":
    serve(ConvertRank)
