"""Conversion between a LightningModule's tensor names and the names in a checkpoint file."""

from collections.abc import Mapping
from typing import Any

from gptrain.parallel.state import EXTRA_PREFIX

NET = "net."


def to_saved_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the entries of a module's state dict for a checkpoint file.

    `net.head.weight` becomes `head.weight`. A tensor outside of `net` gets a prefix: `gain` becomes
    `module.gain`.
    """
    return {
        name.removeprefix(NET) if name.startswith(NET) else EXTRA_PREFIX + name: value
        for name, value in state.items()
    }


def from_saved_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the entries of a checkpoint file for a module; the inverse of `to_saved_names`.

    `head.weight` becomes `net.head.weight`, and `module.gain` becomes `gain`.
    """
    return {
        name.removeprefix(EXTRA_PREFIX) if name.startswith(EXTRA_PREFIX) else NET + name: value
        for name, value in state.items()
    }
