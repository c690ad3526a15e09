"""State dicts of FSDP1 models without all-gather: each rank's range of each parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, _state_dict_utils
from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp
from torch.distributed.fsdp._common_utils import (
    FSDP_PREFIX,
    _get_param_to_fqns,
    _module_handle,
)
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle
from torch.distributed.fsdp._optim_utils import (
    FSDPParamInfo,
    _get_flat_param_to_fqn,
    _get_fqn_to_fsdp_param_info,
    _get_param_key_to_param,
    _is_named_optimizer,
    _unflatten_param_groups,
)
from torch.distributed.fsdp._runtime_utils import _lazy_init
from torch.distributed.fsdp._unshard_param_utils import FLAT_PARAM
from torch.distributed.utils import _replace_by_prefix

from torch_ckpt.errors import MismatchError, UnsupportedError
from torch_ckpt.planning.flat_shard import FlatShard

__all__ = ["fsdp1_state_dict", "load_fsdp1_state_dict"]

_Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def fsdp1_state_dict(
    model: torch.nn.Module, optimizers: _Optimizers = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the sharded state dicts of an FSDP1 model and its optimizers, without all-gather.

    The names are those of ``torch.distributed.checkpoint.state_dict.get_state_dict``, which gathers
    each parameter and each optimizer state, and then discards most of it. This function returns a
    :class:`FlatShard` of the elements that the rank has: a view of the memory of training. The
    saved checkpoint is the same, and loads into FSDP1, FSDP2 and DDP on any number of ranks.

    To load, pass the state dicts to ``dcp.load``, which fills the memory of training, and then to
    :func:`load_fsdp1_state_dict`.

    Args:
        model: A ``FullyShardedDataParallel`` module, or a model that contains some. All sharding
            strategies, and both values of ``use_orig_params``, are supported.
        optimizers: The optimizers of the model. States that do not exist yet are initialized.

    Returns:
        The state dict of the model, and that of the optimizers, with ``"state"`` and
        ``"param_groups"``.

    Raises:
        UnsupportedError: A parameter was a DTensor or not contiguous before FSDP1 flattened it, or
            the shape of an optimizer state differs from that of its parameter.
        ValueError: The model has no FSDP1 module.

    Example::

        model_state, optim_state = torch_ckpt.fsdp1_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optim_state}
        dcp.save(state, storage_writer=FastWriter("run/step-100"))
    """
    _check(model)
    with _flat_shards():
        return get_state_dict(model, optimizers)


def load_fsdp1_state_dict(
    model: torch.nn.Module,
    optimizers: _Optimizers,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
) -> None:
    """Applies loaded state dicts of :func:`fsdp1_state_dict` to an FSDP1 model and its optimizers.

    ``dcp.load`` has already filled the parameters and the optimizer states. This function copies
    the other values: learning rates and other options, counters, and the extra state of modules.

    Args:
        model: The model.
        optimizers: Its optimizers.
        model_state_dict: The model's state dict, filled by ``dcp.load``.
        optim_state_dict: The optimizers' state dict, filled by ``dcp.load``.

    Raises:
        MismatchError: A state dict lacks a parameter or an optimizer state, or its range differs.
        ValueError: The model has no FSDP1 module.

    Example::

        state = dict(zip(("model", "optim"), torch_ckpt.fsdp1_state_dict(model, optimizer)))
        dcp.load(state, storage_reader=FastReader("run/step-100"))
        torch_ckpt.load_fsdp1_state_dict(model, optimizer, state["model"], state["optim"])
    """
    _check(model)
    if isinstance(optimizers, torch.optim.Optimizer):
        optimizers = (optimizers,)
    with torch.no_grad(), _flat_shards():
        set_model_state_dict(model, model_state_dict)
        for optimizer in optimizers:
            _load_optimizer(model, optimizer, optim_state_dict)


def _check(model: torch.nn.Module) -> None:
    if not FullyShardedDataParallel.fsdp_modules(model):
        raise ValueError(
            "cannot make flat shards: the model has no FullyShardedDataParallel module; use "
            "torch.distributed.checkpoint.state_dict"
        )


@contextlib.contextmanager
def _flat_shards() -> Iterator[None]:
    """Makes FSDP1's state dicts consist of flat shards.

    Torch's own functions find the names and visit the modules. Only the functions that gather and
    divide parameters are replaced.
    """
    with contextlib.ExitStack() as stack:
        for kind in ("sharded", "full"):  # NO_SHARD has full state dicts.
            for name, replacement in (
                ("pre_state_dict_hook", _before_state_dict),
                ("post_state_dict_hook", _after_state_dict),
                ("pre_load_state_dict_hook", _before_load),
                ("post_load_state_dict_hook", _after_load),
            ):
                stack.enter_context(
                    mock.patch.object(_state_dict_utils, f"_{kind}_{name}", replacement)
                )
        stack.enter_context(mock.patch.object(fsdp, "_optim_state_dict", _optim_state_dict))
        yield


# ---- The model ----


def _before_state_dict(state: Any, module: torch.nn.Module, *_: Any, **__: Any) -> None:
    _state_dict_utils._common_pre_state_dict_hook(module, state)


def _after_state_dict(
    module: torch.nn.Module, state: Any, state_dict: dict[str, Any], prefix: str
) -> dict[str, Any]:
    _replace_by_prefix(state_dict, f"{prefix}{FSDP_PREFIX}", prefix)
    handle = _module_handle(state, module)
    if handle is not None:
        state_dict.pop(f"{prefix}{FLAT_PARAM}", None)
        for name, number in _names(module, state, handle):
            fqn = f"{prefix}{name}"
            state_dict[fqn] = _shard(handle, number, fqn, handle.flat_param.data)
    return state_dict


def _before_load(
    module: torch.nn.Module, state: Any, state_dict: dict[str, Any], prefix: str
) -> None:
    _lazy_init(state, module)
    _replace_by_prefix(state_dict, prefix, f"{prefix}{FSDP_PREFIX}")
    handle = _module_handle(state, module)
    if handle is None:
        return
    prefix = f"{prefix}{FSDP_PREFIX}"
    flat = handle.flat_param
    for name, number in _names(module, state, handle):
        loaded = state_dict.pop(f"{prefix}{name}", None)
        _copy(_shard(handle, number, f"{prefix}{name}", flat.data), loaded)
        if flat._params is not None:  # The module loads its own parameter, which changes nothing.
            state_dict[f"{prefix}{name}"] = flat._params[number].detach()
    if flat._params is None:
        state_dict[f"{prefix}{FLAT_PARAM}"] = flat.detach()


def _after_load(*_: Any) -> None: ...


def _names(
    module: torch.nn.Module, state: Any, handle: FlatParamHandle
) -> Iterator[tuple[str, int]]:
    """Returns name and number of each parameter of a handle. Tied names have the same number."""
    flat = handle.flat_param
    numbers = {(info.module_name, info.param_name): n for n, info in enumerate(flat._param_infos)}
    ties = (numbers[tie.prim_module_name, tie.prim_param_name] for tie in flat._shared_param_infos)
    names = (name for name, _, _ in _state_dict_utils._param_name_infos(module, state))
    return zip(names, (*numbers.values(), *ties), strict=True)


def _shard(handle: FlatParamHandle, number: int, fqn: str, flat: torch.Tensor) -> FlatShard:
    """Returns this rank's range of one parameter, in a tensor like the handle's flat parameter."""
    parameter = handle.flat_param
    if parameter._param_extensions[number] is not None or not parameter._contiguities[number]:
        raise UnsupportedError(
            f"cannot make a flat shard of {fqn!r}: it was a DTensor or not contiguous before FSDP1 "
            "flattened it; use torch.distributed.checkpoint.state_dict"
        )
    info = parameter._shard_param_infos[number]
    local = flat.view(-1).narrow(0, info.offset_in_shard or 0, info.numel_in_shard or 0)
    return FlatShard(local, fqn, parameter._shapes[number], info.intra_param_start_idx or 0)


def _copy(ours: FlatShard, loaded: object) -> None:
    """Copies a loaded shard into the memory of training, unless it is there already."""
    if not isinstance(loaded, FlatShard) or (loaded.start, loaded.end) != (ours.start, ours.end):
        raise MismatchError(f"cannot load {ours!r}: the state dict has {loaded!r}")
    if loaded.local.data_ptr() != ours.local.data_ptr():
        ours.local.copy_(loaded.local)


# ---- The optimizers ----


def _optim_state_dict(
    model: torch.nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any],
    **_: Any,
) -> dict[str, Any]:
    """The replacement of FSDP1's function of this name."""
    param_to_fqns = _get_param_to_fqns(model)
    params: dict[int | str, torch.nn.Parameter] = _get_param_key_to_param(
        optim,
        model,
        _is_named_optimizer(optim_state_dict),
        param_to_fqns,
        _get_flat_param_to_fqn(model),
    )
    infos = _get_fqn_to_fsdp_param_info(model)
    state: dict[str, Any] = {}
    for key, values in optim_state_dict["state"].items():
        if key in params:
            state.update(_param_states(params[key], values, param_to_fqns, infos))
        else:  # The user's own state.
            state[f"{key}"] = values
    groups = _unflatten_param_groups(optim_state_dict, params, param_to_fqns)
    return {"state": state, "param_groups": groups}


def _param_states(
    param: torch.nn.Parameter,
    values: dict[str, Any],
    param_to_fqns: dict[torch.nn.Parameter, list[str]],
    infos: dict[str, FSDPParamInfo],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Returns each name of a parameter, and its optimizer state."""
    for fqn in param_to_fqns[param]:
        info = infos.get(fqn)
        if info is None:  # FSDP1 does not manage the parameter.
            yield fqn, dict(values)
            continue
        number = info.param_indices[fqn]
        shape = info.handle.flat_param._shapes[number]
        # Without elements on this rank, the parameter has no gradient, and its step does not
        # advance.
        is_elsewhere = not param.numel() and bool(shape.numel())
        state = {}
        for name, value in values.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                if not is_elsewhere:
                    state[name] = value
                continue
            if value.size() != param.size():
                raise UnsupportedError(
                    f"cannot make a flat shard of {name!r} of {fqn!r}: it has sizes "
                    f"{tuple(value.size())}, and the parameter {tuple(param.size())}"
                )
            if isinstance(param, FlatParameter):
                state[name] = _shard(info.handle, number, f"{fqn}.{name}", value)
            else:
                of_param = _shard(info.handle, number, fqn, info.handle.flat_param.data)
                state[name] = FlatShard(
                    value.view(-1), f"{fqn}.{name}", of_param.size(), of_param.start
                )
        yield fqn, state


def _load_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loaded: dict[str, Any]
) -> None:
    param_to_fqns = _get_param_to_fqns(model)
    infos = _get_fqn_to_fsdp_param_info(model)
    groups = {fqn: group for group in loaded["param_groups"] for fqn in group["params"]}
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        fqn = param_to_fqns[group["params"][0]][0]
        if fqn not in groups:
            raise MismatchError(f"cannot load the options of {fqn!r}: no group lists it")
        group.update({k: value for k, value in groups[fqn].items() if k != "params"})
        for param in group["params"]:
            values = optimizer.state.get(param, {})
            for fqn, state in _param_states(param, values, param_to_fqns, infos):
                if state and fqn not in loaded["state"]:
                    raise MismatchError(f"cannot load the optimizer state of {fqn!r}: it is absent")
                for name, value in state.items():
                    stored = loaded["state"][fqn].get(name)
                    if isinstance(value, FlatShard):
                        _copy(value, stored)
                    elif isinstance(value, torch.Tensor) and stored is not value:
                        value.copy_(stored)
                    else:
                        values[name] = stored
