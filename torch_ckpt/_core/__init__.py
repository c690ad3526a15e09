"""The native modules, their type stubs, and the functions that pass tensors to them."""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Imports ``_tensor_view``, which reads torch's own objects, if it fits this torch.

    Otherwise raises an ImportError that names both versions of torch.
    """
    if name != "_tensor_view":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    try:
        module = importlib.import_module(f"{__name__}._tensor_view")
        whole = torch.empty(2, 3, device="cpu")
        plain, sparse = whole[:, 1:], whole.to_sparse()
        kinds = [module.tensor_kind(tensor) for tensor in (plain, sparse)]
        fits = kinds == [module.TensorKind.PLAIN, module.TensorKind.TORCH_ONLY]
        reason = "" if fits else f"it reads wrong facts of a tensor: {kinds}"
    except (ImportError, RuntimeError) as error:
        reason = str(error)
    if not reason:
        return module
    from torch_ckpt._core import _native

    raise ImportError(
        f"torch_ckpt was built for torch {_native.TORCH_VERSION}, and does not work with torch "
        f"{torch.__version__}: {reason}; build it for this version: "
        "pip install --no-build-isolation --no-binary torch-ckpt torch-ckpt"
    )
