"""FastCheckpointManager: verl's FSDP workers save and load with this package.

verl's configuration names no class for this. It imports modules instead: those of the environment
variable ``VERL_USE_EXTERNAL_MODULES``, in every process, and that of ``model.external_lib``, where
a model is built. If this module is imported, verl's FSDP engines use :class:`FastCheckpointManager`
in place of their ``FSDPCheckpointManager``.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import fsdp_version
from verl.workers.engine.fsdp import transformer_impl

from torch_ckpt.api import load, save
from torch_ckpt.coordination.group import DEFAULT_TIMEOUT_S, group_of
from torch_ckpt.coordination.portable import first_error
from torch_ckpt.errors import CheckpointError, MismatchError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.integrations.fsdp1 import fsdp1_state_dict, load_fsdp1_state_dict
from torch_ckpt.ladder.removal import remove_directory
from torch_ckpt.planning.rank_state import RankState
from torch_ckpt.storage.reader import FastReader

__all__ = ["FastCheckpointManager"]

_LOG = logging.getLogger("torch_ckpt")

_CONTENTS = {"model": ["model"], "optimizer": ["optim"], "extra": ["rng", "extra_state"]}
"""Contents of verl's configuration -> the first parts of their names, also in verl's own files."""

_OURS = "a checkpoint of torch_ckpt"
_VERL_FILES = "files that verl loads"
_OTHER_VERL_FILES = "files of another number of ranks, or none"


def _is_verl_file(name: str) -> bool:
    """Returns whether a file is one that verl writes for each rank."""
    return "_world_size_" in name and name.endswith(".pt")


def _check_adapters(path: str, in_file: Collection[str], in_model: Collection[str]) -> None:
    """Raises MismatchError if only the checkpoint, or only the model, has an adapter."""
    unknown = [f"the model has no {name!r}" for name in sorted({*in_file} - {*in_model})]
    missing = [f"the checkpoint has no {name!r}" for name in sorted({*in_model} - {*in_file})]
    for first in [*unknown, *missing][:1]:
        others = len(unknown) + len(missing) - 1
        more = f" (and {others} more)" if others else ""
        raise MismatchError(
            f"cannot load the adapters in {path}: {first}{more}; set model.lora_rank and "
            "model.target_modules as in the saved training"
        )


class FastCheckpointManager(FSDPCheckpointManager):  # type: ignore[misc]
    """Saves the model, the optimizer and the extra state of verl's workers as one checkpoint.

    The checkpoint loads on any number of ranks, with FSDP1 and FSDP2 alike. Its directory must be
    on storage that all ranks share. The learning rate schedule is restored on any number of ranks,
    random states only on the number that saved them. verl itself still writes the folder
    ``huggingface`` and other files, and ``checkpoint.save_contents``, ``load_contents`` and
    ``max_ckpt_to_keep`` have the same meaning.

    Checkpoints that verl wrote, with one file for each rank, load as well: by verl on the same
    number of ranks. On another number, they are resharded, except the optimizer states of FSDP1.

    Args:
        *arguments: As in verl.
        **options: As in verl.

    Raises:
        UnsupportedError: ``checkpoint.async_save`` is set, which verl has for Megatron only.

    Example::

        export VERL_USE_EXTERNAL_MODULES=torch_ckpt.frameworks.verl.checkpoints
        python -m verl.trainer.main_ppo ...
    """

    checkpoint_save_contents: list[str]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.checkpoint_config and self.checkpoint_config.get("async_save", False):
            raise UnsupportedError(
                "cannot save asynchronously with FSDP: verl would never record such a save as its "
                "latest; set checkpoint.async_save to False"
            )

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Saves a checkpoint, and removes older ones of this process. All ranks call it.

        Args:
            local_path: Directory of the checkpoint, the same on all ranks.
            hdfs_path: No effect, as in verl.
            global_step: The step.
            max_ckpt_to_keep: Number of checkpoints to retain. Defaults to all.

        Raises:
            CheckpointError: The save failed. All ranks raise the error of the first failed rank.
            ValueError: ``save_contents`` lists the model or the optimizer, but this object has
                none. Or ``save_lora_only`` is set, and the model has adapters of another kind.
        """
        if local_path is None:
            return
        contents = self.checkpoint_save_contents
        state, _ = self._state(contents, "save")
        if self.should_save_lora_only and self._has_lora() and "model" in state:
            state["model"] = {
                name: value
                for name, value in state["model"].items()
                if self.is_lora_only_state_dict({name: value})
            }
            if not state["model"]:
                raise ValueError(
                    "checkpoint.save_lora_only is set, and no parameter of the model is one of "
                    "LoRA: its name has neither 'lora_' nor '.adapter_'"
                )
        if self.rank == 0:
            self.ensure_checkpoint_capacity(max_ckpt_to_keep)
        if state:
            # Ray's workers expect an ``Exception``.
            with first_error("in a save of verl"):
                save(state, checkpoint_id=local_path)
            if self.rank == 0:  # An earlier save of this step by verl left them.
                folder = Location(local_path)
                for name in filter(_is_verl_file, folder.names()):
                    (folder / name).discard()
        # verl writes the rest, and removes older checkpoints after the commit.
        self.checkpoint_save_contents = [each for each in contents if each not in _CONTENTS]
        try:
            super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        finally:
            self.checkpoint_save_contents = contents

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,
    ) -> None:
        """Loads a checkpoint of this class or the files of verl. All ranks call it.

        Args:
            local_path: Directory of the checkpoint, which all ranks have.
            hdfs_path: No effect, as in verl.
            del_local_after_load: As in verl, for files that it has written.

        Raises:
            CheckpointError: The load failed. All ranks raise the error of the first failed rank.
            NotFoundError: A rank lacks the directory or a file. The message names the rank and its
                machine.
            MismatchError: The checkpoint lacks one of ``load_contents``, only the checkpoint or
                only the model has an adapter, or verl has saved to the same directory later.
            UnsupportedError: verl wrote the optimizer states of FSDP1 on another number of ranks.
            ValueError: ``load_contents`` lists the model or the optimizer, but this object has
                none.
        """
        if local_path is None:
            return
        reader = FastReader(local_path)
        stored: Mapping[str, Any] = {}

        def own() -> tuple[str, str]:
            nonlocal stored
            host = socket.gethostname()
            try:
                kind = self._kind_of(local_path)
                if kind != _VERL_FILES:
                    stored = reader.read_metadata().state_dict_metadata
            except MismatchError:
                raise
            except CheckpointError as error:
                cls = NotFoundError if isinstance(error, NotFoundError) else CheckpointError
                raise cls(
                    f"cannot load {local_path} on rank {self.rank}, {host}: {error}"
                ) from error
            return kind, host

        def decide(found: Sequence[tuple[str, str]]) -> str:
            (kind, host), *_ = found
            for rank, (other, other_host) in enumerate(found):
                if other != kind:
                    raise NotFoundError(
                        f"cannot load {local_path}: it has {kind} on rank 0, {host}, and {other} "
                        f"on rank {rank}, {other_host}. All machines need the same directory"
                    )
            return kind

        kind = group_of(None).decide("opening", own, decide, timeout_s=DEFAULT_TIMEOUT_S)
        has_verl_files = kind != _OURS
        if kind == _VERL_FILES:
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
            return
        contents = [each for each in self.checkpoint_load_contents if each in _CONTENTS]
        found = {name.partition(".")[0] for name in stored}
        for each in contents:
            if found.isdisjoint(_CONTENTS[each]):
                raise MismatchError(
                    f"cannot load {each!r} from {local_path}: it was not saved; remove it from "
                    "checkpoint.load_contents"
                )
        state, model = self._state(contents, "load")
        in_file = {name.partition(".")[2] for name in stored if name.startswith("model.")}
        if "model" in state and self.is_lora_only_state_dict(in_file):
            adapters = {name for name in state["model"] if self.is_lora_only_state_dict({name})}
            _check_adapters(local_path, in_file, adapters)
            state["model"] = {name: state["model"][name] for name in in_file}
        self._choose_extra(state, found)
        if has_verl_files and "optim" in state:
            if fsdp_version(self.model) == 1:
                raise UnsupportedError(
                    f"cannot load 'optimizer' from {local_path} on {self.world_size} ranks: verl "
                    "saved flat optimizer states of FSDP1; load on as many ranks as saved, and "
                    "save with torch_ckpt there"
                )
            state["optim"] = self.optimizer.state_dict()  # With numbers, as verl saves it.
        with first_error("in a load of verl"):
            load(state, storage_reader=reader)
        self._apply(state, {**model, **state.get("model", {})}, has_verl_files)

    def _kind_of(self, local_path: str) -> str:
        """Returns what is in a directory, on this rank."""
        names = Location(local_path).names()
        if ".metadata" in names:
            if any(map(_is_verl_file, names)):
                raise MismatchError(
                    f"cannot load {local_path}: verl has written files beside the checkpoint of "
                    "torch_ckpt; remove .metadata to load those, or *_world_size_*_rank_*.pt"
                )
            return _OURS
        if not any(f"_world_size_{self.world_size}_rank_" in name for name in names):
            return _OTHER_VERL_FILES
        for each in filter(_CONTENTS.__contains__, self.checkpoint_load_contents):
            name = f"{_CONTENTS[each][-1]}_world_size_{self.world_size}_rank_{self.rank}.pt"
            if name not in names:
                raise NotFoundError(f"there is no {name}")
        return _VERL_FILES

    def remove_previous_save_local_path(self, path: str | Collection[str]) -> None:
        """Removes checkpoints, so that no reader ever finds a partly deleted one."""
        for each in [path] if isinstance(path, str) else path:
            try:
                remove_directory(Location(each))
            except NotFoundError:
                continue
            except CheckpointError as error:  # As in verl, training continues.
                _LOG.warning("cannot remove %s: %s", each, error)

    def _state(self, contents: Collection[str], verb: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the state dict of some contents, and the one of the model in any case."""
        for each, value in (("model", self.model), ("optimizer", self.optimizer)):
            if each in contents and value is None:
                raise ValueError(
                    f"cannot {verb} {each!r}: checkpoint.{verb}_contents has it, and "
                    "this worker has none"
                )
        state: dict[str, Any] = {}
        model: dict[str, Any] = {}
        if "model" in contents or "optimizer" in contents:
            collect: Any = fsdp1_state_dict if fsdp_version(self.model) == 1 else get_state_dict
            model, optim = collect(self.model, (self.optimizer,) if "optimizer" in contents else ())
            if "model" in contents:
                state["model"] = dict(model)
            if "optimizer" in contents:
                state["optim"] = optim
        if "extra" in contents:
            state["rng"] = RankState(self.get_rng_state, self.load_rng_state, on_resize="drop")
            if self.lr_scheduler is not None:  # As one object, whatever its keys.
                state["lr_scheduler"] = (self.lr_scheduler.state_dict(),)
        return state, model

    def _choose_extra(self, state: dict[str, Any], found: Collection[str]) -> None:
        """Leaves what a checkpoint has of the extra state, by the names of the checkpoint."""
        if "extra_state" in found and "rng" in state:
            del state["rng"]  # It is that of other ranks.
            if "lr_scheduler" in state:
                (schedule,) = state.pop("lr_scheduler")
                state["extra_state"] = {"lr_scheduler": schedule}
        elif "lr_scheduler" not in found:
            state.pop("lr_scheduler", None)

    def _apply(self, state: dict[str, Any], model: dict[str, Any], has_verl_files: bool) -> None:
        """Passes on a loaded state. The tensors of FSDP are filled already."""
        optimizers = (self.optimizer,) if "optim" in state else ()
        optim = state.get("optim", {})
        if has_verl_files and optimizers:
            self.optimizer.load_state_dict(optim)
            optimizers, optim = (), {}
        if model and fsdp_version(self.model) == 1:
            load_fsdp1_state_dict(self.model, optimizers, model, optim)
        elif model:
            set_state_dict(self.model, optimizers, model_state_dict=model, optim_state_dict=optim)
        if "lr_scheduler" in state:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"][0])
        elif "extra_state" in state:
            self.lr_scheduler.load_state_dict(state["extra_state"]["lr_scheduler"])


transformer_impl.FSDPCheckpointManager = FastCheckpointManager
