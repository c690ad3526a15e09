"""Mappings of a state that objects of the program have, as modules and optimizers do."""

from __future__ import annotations

import random
from collections import UserDict
from typing import Any

from support.states import State


class Owner:
    """An object whose state dict is a mapping of the state."""

    def __init__(self, state: State) -> None:
        self.state = state

    def state_dict(self) -> State:
        return type(self.state)(self.state)  # A load into it alone restores nothing.

    def load_state_dict(self, state: State) -> None:
        self.state = state


def owned(state: State, seed: object, share: float) -> State:
    """The state with objects in place of this share of its inner mappings, at any depth.

    Whether a mapping has one depends on its path alone, so that ranks with other values agree.
    """

    def within(value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, list):
            return [within(each, (*path, number)) for number, each in enumerate(value)]
        if not isinstance(value, dict | UserDict):
            return value
        made = type(value)({key: within(each, (*path, key)) for key, each in value.items()})
        draws = random.Random(f"owner {seed} {path}").random()
        return Owner(made) if path and draws < share else made

    return within(state, ())  # type: ignore[no-any-return]


def unowned(state: Any) -> Any:
    """The state with the present mappings in place of the objects."""
    if isinstance(state, Owner):
        return unowned(state.state)
    if isinstance(state, list):
        return [unowned(each) for each in state]
    if isinstance(state, dict | UserDict):
        return type(state)({key: unowned(each) for key, each in state.items()})
    return state
