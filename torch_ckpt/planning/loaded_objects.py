"""Stores loaded objects in a nested state dict, under the state dict's own keys.

In FQNs, and in the paths in DCP's metadata, all keys are text. DCP stores a loaded object under
these texts. A state dict with other keys, such as the integers of an optimizer, would then have
both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from torch_ckpt.coordination.statefuls import restore_pickled
from torch_ckpt.errors import naming, text_of

__all__ = ["own_keys", "store_object", "store_value"]


def store_object(planner: DefaultLoadPlanner, fqn: str, value: object) -> None:
    """Stores a loaded object where ``DefaultLoadPlanner`` does, but under the existing keys.

    If the present value is a ``Stateful``, it is restored from the pickled one instead. Raises
    ValueError if a mapping of the state dict cannot be changed.
    """
    with naming("load", fqn):
        if restore_pickled(planner.state_dict.get(fqn), value):
            return
    path: Sequence[str | int] = (fqn,)
    if planner.flatten_state_dict:
        path = planner.mappings[fqn]
    else:
        planner.state_dict[fqn] = value  # A copy if it flattens sharded tensors.
    try:
        store_value(planner.original_state_dict, path, value)
    except TypeError as error:
        raise ValueError(
            f"cannot load {fqn!r}: its container cannot be changed ({text_of(error)}); pass a dict "
            "or list"
        ) from error


def store_value(state_dict: dict[str, Any], path: Sequence[str | int], value: object) -> None:
    """Stores a value at a path of DCP's metadata, under the state dict's own keys if they exist.

    Raises TypeError if the container of the value cannot be changed.
    """
    keys = own_keys(state_dict, path)
    if keys is None:
        set_element(state_dict, tuple(path), value)
        return
    container: Any = state_dict
    for key in keys[:-1]:
        container = container[key]
    container[keys[-1]] = value


def own_keys(state_dict: object, path: Sequence[str | int]) -> tuple[Any, ...] | None:
    """Returns the keys of a nested value; ``None`` if it does not exist.

    The path is as in DCP's metadata: keys of mappings as text, positions in lists.

    Example::

        assert own_keys({"state": {0: {"step": 1}}}, ("state", "0", "step")) == ("state", 0, "step")
    """
    if not path:
        return ()
    for key in _keys_like(state_dict, path[0]):
        rest = own_keys(state_dict[key], path[1:])  # type: ignore[index]
        if rest is not None:
            return (key, *rest)
    return None


def _keys_like(container: object, word: str | int) -> Iterator[Any]:
    """Yields the keys of a mapping with this text, or the position in a list."""
    if isinstance(word, int):
        if isinstance(container, list) and word < len(container):
            yield word
        return
    if not isinstance(container, Mapping):
        return
    if word in container:
        yield word
    if word.removeprefix("-").isdecimal() and int(word) in container:
        yield int(word)  # No search: an optimizer has an integer for each parameter.
    yield from (key for key in list(container) if type(key) is not str and str(key) == word)
