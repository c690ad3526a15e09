"""Finds tied tensors in a checkpoint: names whose tensors a conversion stores once.

Two names are tied only if one of these sources states it: the files, in which both names refer to
the same bytes; the model that ``config.json`` beside the checkpoint describes; or the caller. A
checkpoint of DCP stores the elements of each name, and records no ties. Equal elements do not prove
a tie: the weights of a model and their average are equal before the first update, and differ
afterwards.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_ckpt._core import _native
from torch_ckpt.errors import MismatchError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.equality import same_bits
from torch_ckpt.formats.model_config import model_config
from torch_ckpt.formats.opened import is_foreign
from torch_ckpt.storage.stored_values import StoredValues, pieces_of

__all__ = ["find_ties"]

_PIECE_NBYTES = 8 << 20

_OPTIMIZER = re.compile(r"(^|\.)(state|param_groups)\.")
"""Names of optimizer states, which are never tied.

An optimizer updates the state of each parameter in place. FSDP1 and DeepSpeed store one ``step``
for several parameters. If the parameters shared this tensor, it would count each step several
times.
"""

_REPEATED = re.compile("layer|block|expert|depth")
"""Options of a model that count modules, each with at least one name."""

_LOG = logging.getLogger("torch_ckpt")


def find_ties(values: StoredValues, path: Location, named: Mapping[str, str]) -> dict[str, str]:
    """Returns name -> the name under which their common tensor is stored.

    ``path`` is the path of the checkpoint. ``named`` are the ties that the caller states. States of
    optimizers are never tied.

    Raises:
        MismatchError: The tensors of ``named`` belong to an optimizer, or differ in any bit.
        NotFoundError: A name in ``named`` is not the name of a tensor.
    """
    ties: dict[str, str] = {}
    for name, first in named.items():
        _check(values, path, name, first)
        _tie(ties, name, first)
    for names in (*_recorded(values), *_of_model(values, path)):
        for name in names[1:]:
            _tie(ties, name, names[0])
    return ties


def _tie(ties: dict[str, str], name: str, first: str) -> None:
    """Ties ``name``, and all names tied to it, to ``first`` or to the first of its tied names."""
    name, first = ties.get(name, name), ties.get(first, first)
    if name != first:
        ties.update({each: first for each, other in ties.items() if other == name} | {name: first})


def _check(values: StoredValues, path: Location, name: str, first: str) -> None:
    for each in (name, first):
        if each not in values.names or not _is_tensor(values, each):
            raise NotFoundError(f"cannot tie {name!r} to {first!r}: {path} has no tensor {each!r}")
        if _OPTIMIZER.search(values.names[each]):
            raise MismatchError(
                f"cannot tie {name!r} to {first!r} in {path}: optimizers update {each!r} in place"
            )
    if not _are_equal(values, name, first):
        raise MismatchError(f"cannot tie {name!r} to {first!r} in {path}: they are not equal")


def _is_tensor(values: StoredValues, name: str) -> bool:
    return isinstance(values.entry(name), TensorStorageMetadata)


def _are_equal(values: StoredValues, name: str, other: str) -> bool:
    """Returns whether two tensors have the same dtype, sizes and bits."""
    entries = [values.entry(each) for each in (name, other)]
    sizes, dtype = entries[0].size, entries[0].properties.dtype
    if (sizes, dtype) != (entries[1].size, entries[1].properties.dtype):
        return False
    boxes = pieces_of(sizes, dtype.itemsize, _PIECE_NBYTES)
    return all(same_bits(*values.load([(name, box), (other, box)])) for box in boxes)


# ---- Ties that the files record ----


def _recorded(values: StoredValues) -> list[list[str]]:
    """Returns the groups of names that refer to the same bytes, in formats that record this."""
    if values.index is None or not is_foreign(values.metadata):
        return []
    shown = {fqn: name for name, fqn in values.names.items() if not _OPTIMIZER.search(fqn)}
    groups: dict[Hashable, list[str]] = {}
    for fqn, extents in _extents_of(values.index):
        if fqn in shown:
            groups.setdefault(extents, []).append(shown[fqn])
    return [names for names in groups.values() if len(names) > 1]


def _extents_of(index: _native.Index) -> Iterator[tuple[str, Hashable]]:
    """Yields each non-empty tensor, and everything that determines its elements in the files."""
    for number, (fqn, properties, boxes) in enumerate(index):
        if properties is None or 0 in properties[4] or not all(box[5] for box in boxes):
            continue  # An object, or one that only torch can read.
        strides, offset, _ = index.view(number) or ((), 0, 0)
        extents = tuple((tuple(box[0]), tuple(box[1]), *box[2:5]) for box in boxes)
        yield fqn, (properties[0], tuple(properties[4]), extents, tuple(strides), offset)


# ---- Ties of a model of Hugging Face ----


def _of_model(values: StoredValues, path: Location) -> list[list[str]]:
    """Returns the groups of names that the model of ``config.json`` ties, if they are equal.

    A name with other elements is not tied: the checkpoint overrides the config.
    """
    groups: list[list[str]] = []
    for group in _groups_of_model(model_config(path), path, len(values.names)):
        names = [name for name in group if name in values.names and _is_tensor(values, name)]
        equal = [name for name in names[1:] if _are_equal(values, names[0], name)]
        groups += [[names[0], *equal]] if equal else []
    return groups


def _groups_of_model(config: dict[str, Any], path: Location, count: int) -> Iterable[list[str]]:
    """Returns the groups of names that share a parameter in the model that a config describes.

    Only the class of the model defines them, so this function constructs the model on the meta
    device. ``count`` is the number of names in the checkpoint.
    """
    ties, architectures = config.get("tie_word_embeddings"), config.get("architectures")
    if ties is False or not isinstance(architectures, list) or not architectures:
        return ()
    try:
        model = _model_of(config, str(architectures[0]), count)
    except Exception as error:  # The model may need another version, or its own code.
        if ties:
            _LOG.warning(
                "no names are tied, although config.json of %s has tie_word_embeddings: %s; name "
                "them with --ties",
                *(path, error),
            )
        return ()
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return groups.values()


def _model_of(config: dict[str, Any], architecture: str, count: int) -> torch.nn.Module:
    import transformers

    model_class = getattr(transformers, architecture, None)
    if not isinstance(model_class, type) or not issubclass(
        model_class, transformers.PreTrainedModel
    ):
        raise UnsupportedError(f"transformers has no model {architecture!r}")
    for key, value in _options(config):  # An untrusted file may state arbitrary numbers.
        if _REPEATED.search(key) and isinstance(value, int) and value > count:
            raise MismatchError(f"it has {key}={value}, but the checkpoint has only {count} names")
    with torch.device("meta"):
        model: torch.nn.Module = model_class(transformers.AutoConfig.for_model(**config))
    return model


def _options(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the options of a model, and of the models in it, such as ``text_config``."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _options(value)
        yield key, value
