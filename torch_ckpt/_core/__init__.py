"""The native modules, their type stubs, and the functions that pass tensors to them."""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Imports ``_tensor_view``, which reads tensors of torch, if it matches the installed torch.

    Otherwise raises an ImportError that names both versions.
    """
    if name != "_tensor_view":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    try:
        module = importlib.import_module(f"{__name__}._tensor_view")
        reason = _misread(module)
    except (ImportError, RuntimeError) as error:
        reason = str(error)
    if not reason:
        return module
    from torch_ckpt import __version__

    raise ImportError(
        f"torch_ckpt {__version__} does not work with torch {torch.__version__}: {reason}; it "
        "needs torch 2.11 or later, and a later torch may need a later torch_ckpt: "
        "pip install --upgrade torch torch-ckpt"
    )


def _misread(module: ModuleType) -> str:
    """Returns which properties of tensors the module reads incorrectly, or an empty string."""
    import torch

    floats = torch.zeros(2, 3, dtype=torch.complex64, device="cpu")
    plain = floats[:, 1:].real
    tensors = [plain, floats.conj(), floats.conj().imag, torch.zeros(2, device="cpu").to_sparse()]
    kinds = [module.tensor_kind(tensor).name for tensor in tensors]
    if kinds != ["PLAIN", "NEEDS_COPY", "NEEDS_COPY", "TORCH_ONLY"]:
        return f"it reads wrong facts of tensors: {kinds}"
    extent = module.extent(plain)[1:]
    return "" if extent == (8, 44) else f"it reads a wrong place of a tensor: {extent}"
