"""The native modules, their type stubs, and the functions that pass tensors to them."""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Imports ``_tensor_view``, which links libtorch, with an error that names both versions."""
    if name != "_tensor_view":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"{__name__}._tensor_view")
    except ImportError as error:
        import torch

        from torch_ckpt._core import _native

        raise ImportError(
            f"torch_ckpt was built for torch {_native.TORCH_VERSION}, and does not load with torch "
            f"{torch.__version__}: {error}; build it "
            "for this version: pip install --no-build-isolation --no-binary torch-ckpt torch-ckpt"
        ) from error
