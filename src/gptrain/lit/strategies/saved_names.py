"""Conversion between a LightningModule's tensor names and the names in a checkpoint file.

A checkpoint file names the tensors of the net as the net without a LightningModule does, so that
the net can be loaded alone.
"""

from collections.abc import Mapping
from typing import Any

from gptrain.parallel.state import EXTRA_PREFIX

NET = "net."


def to_saved_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a LightningModule's state dict with the names that a checkpoint file has.

    `net.head.weight` becomes `head.weight`. A tensor outside of `net` gets a prefix: `gain` becomes
    `module.gain`.

    Args:
        state: State dict of the module, which is not changed.
    """
    return {
        name.removeprefix(NET) if name.startswith(NET) else EXTRA_PREFIX + name: value
        for name, value in state.items()
    }


def from_saved_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a checkpoint file with the names of a LightningModule's state dict.

    This is the inverse of `to_saved_names`: `head.weight` becomes `net.head.weight`, and
    `module.gain` becomes `gain`.

    Args:
        state: Name -> tensor as in the file. The dict is not changed.
    """
    return {
        name.removeprefix(EXTRA_PREFIX) if name.startswith(EXTRA_PREFIX) else NET + name: value
        for name, value in state.items()
    }
