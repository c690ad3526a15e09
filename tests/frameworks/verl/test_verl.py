"""verl's workers save and load with this package, and load what verl has written.

The real verl, with models of transformers under FSDP1 and FSDP2 on CPUs.
"""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Worlds
from states import assert_same, loaded_whole
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from torch_ckpt.errors import CheckpointError, MismatchError, NotFoundError, UnsupportedError

ROOT = Path(__file__).resolve().parents[3]
VERL = ROOT / "build/verl"
START_TIMEOUT_S = 300  # Ranks import verl, Ray and transformers.
pytestmark = [
    pytest.mark.framework,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not VERL.exists(), reason="tests/check.py frameworks installs verl"),
]
ALL = ["model", "optimizer", "extra"]


class Worker:
    """What a worker of verl has: a model, its optimizer, a schedule, and the manager."""

    def __init__(self, kind: str, by: str = "fast", *, seed: int = 0, **config: Any) -> None:
        if str(VERL) not in sys.path:
            sys.path.append(str(VERL))
        from transformers import Qwen2Config, Qwen2ForCausalLM
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

        from torch_ckpt.frameworks.verl.checkpoints import FastCheckpointManager

        torch.manual_seed(seed)
        sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 31}
        settings = Qwen2Config(**sizes, **heads, tie_word_embeddings=False)
        settings.architectures = ["Qwen2ForCausalLM"]
        model: Any = Qwen2ForCausalLM(settings)
        if lora := config.pop("lora", False):
            from peft import LoraConfig, get_peft_model

            targets = ["q_proj", "v_proj"] if lora is True else lora
            model = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
        if kind.startswith("fsdp1"):
            model = FullyShardedDataParallel(
                model, use_orig_params=kind == "fsdp1 orig", device_id=torch.device("cpu")
            )
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for module in [each for each in model.modules() if hasattr(each, "self_attn")]:
                fully_shard(module, mesh=mesh)
            fully_shard(model, mesh=mesh)
        trained = [each for each in model.parameters() if each.requires_grad]
        self.model = model
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.9**n)
        manager = FastCheckpointManager if by == "fast" else FSDPCheckpointManager
        self.manager: Any = manager(
            model, self.optimizer, self.schedule, checkpoint_config=config or None
        )
        torch.manual_seed(100 * seed + dist.get_rank())

    def train(self, steps: int) -> list[float]:
        """Trains on random tokens, which need not be those of other ranks."""
        losses = []
        for _ in range(steps):
            tokens = torch.randint(31, (2, 6))
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def states(self) -> dict[str, Any]:
        """The states by name, with all elements of their tensors."""
        options = StateDictOptions(full_state_dict=True)
        found = get_model_state_dict(self.model, options=options)
        optim = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        for fqn, state in optim["state"].items():
            found |= {f"{fqn}.{name}": value for name, value in state.items()}
        lrs = [group["lr"] for group in optim["param_groups"]]
        return copy.deepcopy(found) | {"lr": lrs, "schedule": self.schedule.last_epoch}


def save(path: Path, kind: str, by: str = "fast", **config: Any) -> tuple[Any, list[float]]:
    """Returns the saved states on the first rank, and the losses of the next steps."""
    worker = Worker(kind, by, **config)
    worker.train(2)
    worker.manager.save_checkpoint(str(path), global_step=2)
    return worker.states(), worker.train(2)


def load(path: Path, kind: str, by: str = "fast", **config: Any) -> tuple[Any, list[float]]:
    worker = Worker(kind, by, seed=5, **config)
    worker.manager.load_checkpoint(str(path))
    return worker.states(), worker.train(2)


def run(worlds: Worlds, ranks: int, function: Any, *arguments: Any) -> Any:
    return worlds.run(ranks, function, *arguments, timeout_s=START_TIMEOUT_S)


KINDS = ["fsdp1", "fsdp1 orig", "fsdp2"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_resumes_bit_for_bit_and_on_any_ranks(
    worlds: Worlds, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "global_step_2/actor"
    saved = run(worlds, 2, save, path, kind)
    assert {each.name for each in path.iterdir() if not each.name.startswith("_")} >= {
        ".metadata",
        "fsdp_config.json",
        "huggingface",
    }
    assert not list(path.glob("*.pt"))
    assert (path / "huggingface/config.json").exists()
    for (states, losses), (found, next_losses) in zip(
        saved, run(worlds, 2, load, path, kind), strict=True
    ):
        assert_same(found, states)
        assert next_losses == losses
    for ranks, other in ((1, "fsdp2"), (3, kind), (2, "fsdp2" if kind != "fsdp2" else "fsdp1")):
        assert_same(run(worlds, ranks, load, path, other)[0][0], saved[0][0])


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_verl_has_written_load_on_any_ranks(
    worlds: Worlds, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "global_step_2/actor"
    saved = run(worlds, 2, save, path, kind, "verl")
    assert (path / "optim_world_size_2_rank_1.pt").exists()
    for (states, losses), (found, next_losses) in zip(
        saved, run(worlds, 2, load, path, kind), strict=True
    ):
        assert_same(found, states)
        assert next_losses == losses
    if kind == "fsdp2":
        for ranks in (1, 3):
            assert_same(run(worlds, ranks, load, path, kind)[0][0], saved[0][0])
        return
    error = run(worlds, 3, error_of_load, path, kind, ALL)[0]
    assert "flat optimizer states of FSDP1" in error
    states = run(worlds, 3, load_contents, path, kind, ["model", "extra"])[0]
    names = [name for name in states if f"{name}.exp_avg" in states]
    assert len(names) > 10
    assert_same({n: states[n] for n in names}, {n: saved[0][0][n] for n in names})
    assert states["schedule"] == saved[0][0]["schedule"]


def test_a_directory_to_which_both_have_saved_is_never_loaded_by_guess(
    worlds: Worlds, tmp_path: Path
) -> None:
    path = tmp_path / "global_step_2/actor"
    run(worlds, 2, save, path, "fsdp2", "verl")
    saved = run(worlds, 2, save, path, "fsdp2")
    assert not list(path.glob("*.pt"))
    assert_same(run(worlds, 2, load, path, "fsdp2")[0][0], saved[0][0])
    run(worlds, 2, save, path, "fsdp2", "verl")
    for error in run(worlds, 2, error_of_load, path, "fsdp2", ALL):
        assert "verl has written files beside the checkpoint of torch_ckpt" in error


def load_contents(path: Path, kind: str, contents: list[str]) -> Any:
    return load(path, kind, load_contents=contents)[0]


def error_of_load(path: Path, kind: str, contents: list[str]) -> str:
    with pytest.raises((CheckpointError, ValueError)) as caught:
        load(path, kind, load_contents=contents)
    return f"{type(caught.value).__name__}: {caught.value}"


# ---- Contents, retention, errors ----


def save_many(folder: Path) -> list[list[str]]:
    """The checkpoints after each save, at most two of which are retained."""
    worker = Worker("fsdp2", save_contents=["model", "hf_model"])
    found = []
    for step in range(1, 5):
        path = folder / f"global_step_{step}/actor"
        worker.manager.save_checkpoint(str(path), global_step=step, max_ckpt_to_keep=2)
        dist.barrier()
        found.append(sorted(each.parent.name for each in folder.glob("global_step_*/actor")))
        dist.barrier()
    return found


def test_old_checkpoints_are_removed_and_contents_are_those_of_the_configuration(
    worlds: Worlds, tmp_path: Path
) -> None:
    found = run(worlds, 2, save_many, tmp_path)[0]
    assert found == [[f"global_step_{n}" for n in each] for each in ([1], [1, 2], [2, 3], [3, 4])]
    path = tmp_path / "global_step_4/actor"
    stored = loaded_whole(path)
    assert {name.partition(".")[0] for name in stored} == {"model"}
    exported = loaded_whole(path / "huggingface")
    assert exported.keys() == {name.partition(".")[2] for name in stored}
    error = run(worlds, 2, error_of_load, path, "fsdp2", ALL)[1]
    assert error.startswith("MismatchError: cannot load 'optimizer' from")
    assert "remove it from checkpoint.load_contents" in error


def save_adapters(path: Path) -> None:
    worker = Worker("fsdp2", lora=True, save_lora_only=True)
    worker.train(2)
    worker.manager.save_checkpoint(str(path), global_step=2)
    other = Worker("fsdp2", lora=True, seed=5)
    base = {name: value for name, value in other.states().items() if "lora_" not in name}
    other.manager.load_checkpoint(str(path))
    wanted, found = worker.states(), other.states()
    adapters = {name for name in wanted if "lora_" in name}
    assert len(adapters) > 4
    assert_same({n: found[n] for n in adapters}, {n: wanted[n] for n in adapters})
    base = {name: value for name, value in base.items() if isinstance(value, torch.Tensor)}
    assert_same({n: found[n] for n in base}, base)


def test_adapters_alone_are_saved_and_loaded(worlds: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "actor"
    run(worlds, 2, save_adapters, path)
    names = [name for name in loaded_whole(path) if name.startswith("model.")]
    assert names
    assert all("lora_" in name for name in names)


def misuse(path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"set checkpoint\.async_save to False"):
        Worker("fsdp2", async_save=True)
    worker = Worker("fsdp2")
    worker.manager.optimizer = None  # As of a reference policy.
    with pytest.raises(ValueError, match=r"checkpoint\.save_contents has it"):
        worker.manager.save_checkpoint(str(path))
    with pytest.raises(CheckpointError, match="missing"):
        worker.manager.load_checkpoint(str(path / "missing"))
    assert not path.exists()
    if dist.get_rank() == 1:
        worker.manager.get_rng_state = Unpicklable
    worker.manager.checkpoint_save_contents = ["extra"]
    with pytest.raises(Exception, match="cannot be pickled"):  # Of rank 1, on both ranks.
        worker.manager.save_checkpoint(str(path))
    assert worker.manager.checkpoint_save_contents == ["extra"]
    assert not (path / ".metadata").exists()


def load_unshared(path: Path) -> list[str]:
    """Loads where the last rank lacks the directory, the checkpoint, all but verl's, and a file."""
    worker, rank = Worker("fsdp2"), dist.get_rank()
    worker.train(1)
    mine = path / "shared" if rank == 0 else path / "own"
    worker.manager.save_checkpoint(str(path / "shared"), global_step=1)
    other = Worker("fsdp2", by="verl")
    other.manager.save_checkpoint(str(path / "verls"), global_step=1)
    errors = []
    for where in ("directory", "checkpoint", "other", "file"):
        if where == "other" and rank == 1:
            mine = path / "verls"
        elif where == "file":
            mine = path / "verls"
            if rank == 1:
                (mine / "model_world_size_2_rank_1.pt").unlink()
        elif where == "checkpoint" and rank == 1:
            mine.mkdir()
        dist.barrier()
        begin = time.monotonic()
        with pytest.raises(NotFoundError) as caught:
            worker.manager.load_checkpoint(str(mine))
        assert time.monotonic() - begin < 30
        errors.append(str(caught.value))
    return errors


def test_a_directory_that_one_machine_lacks_is_an_error_on_all_at_once(
    worlds: Worlds, tmp_path: Path
) -> None:
    host = socket.gethostname()
    for errors in run(worlds, 2, load_unshared, tmp_path):
        for error in errors[:2]:
            assert f"cannot load {tmp_path}/own on rank 1, {host}: " in error
        assert f"on rank 0, {host}, and files that verl loads on rank 1, {host}. All" in errors[2]
        assert f"cannot load {tmp_path}/verls on rank 1, {host}: there is no model_" in errors[3]


def misuse_adapters(path: Path) -> None:
    worker = Worker("fsdp2", lora=True, save_lora_only=True)
    worker.manager.save_checkpoint(str(path / "adapters"))
    with pytest.raises(MismatchError, match=r"model has no '.*lora_A.*' \(and 3 more\); set"):
        Worker("fsdp2").manager.load_checkpoint(str(path / "adapters"))
    more = Worker("fsdp2", lora=["q_proj", "k_proj", "v_proj"])
    with pytest.raises(MismatchError, match=r"checkpoint has no '.*k_proj.*' \(and 1 more\); set"):
        more.manager.load_checkpoint(str(path / "adapters"))
    worker = Worker("fsdp2", save_lora_only=True)
    worker.model.peft_config = {}  # As adapters of another kind have it.
    with pytest.raises(ValueError, match=r"no parameter of the model is one of LoRA"):
        worker.manager.save_checkpoint(str(path / "none"))
    assert not (path / "none").exists()


def test_adapters_that_are_not_there_are_refused(worlds: Worlds, tmp_path: Path) -> None:
    run(worlds, 2, misuse_adapters, tmp_path)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


def test_a_wrong_use_is_an_error_that_says_why(worlds: Worlds, tmp_path: Path) -> None:
    run(worlds, 2, misuse, tmp_path / "actor")


# ---- How verl finds the manager ----

ENGINE = """
import sys
from types import SimpleNamespace
import torch.distributed as dist
from verl.utils.import_utils import import_external_libs
from verl.workers.engine.fsdp import transformer_impl

import_external_libs(sys.argv[1] or None)  # As model.external_lib.
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
transformer_impl.log_gpu_memory_usage = lambda *_, **__: None
# Its own constructor needs a device.
engine = transformer_impl.FSDPEngine.__new__(transformer_impl.FSDPEngine)
engine._build_model_optimizer = lambda: None
engine.module = engine.optimizer = engine.lr_scheduler = engine.checkpoint_config = None
engine.model_config = SimpleNamespace(get_processor=lambda: None, trust_remote_code=False)
engine._is_offload_param = engine._is_offload_optimizer = False
engine.to = lambda **_: None
engine.initialize()
print("manager", type(engine.checkpoint_manager).__module__)
"""


OURS = "torch_ckpt.frameworks.verl.checkpoints"


@pytest.mark.parametrize(
    ("module", "library", "home"),
    [(OURS, "", OURS), ("", OURS, OURS), ("", "", "verl.utils.checkpoint.fsdp_checkpoint_manager")],
)
def test_verls_engines_use_the_manager_of_an_external_module(
    module: str, library: str, home: str
) -> None:
    paths = {"PYTHONPATH": f"{ROOT}:{VERL}", "VERL_USE_EXTERNAL_MODULES": module}
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, library],
        env={**os.environ, **paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )
    assert f"manager {home}\n" in done.stdout, done.stderr
