"""Names of a module's tensors in a checkpoint, and back."""

from collections.abc import Mapping
from typing import Any

from gptrain.parallel.state import EXTRA_PREFIX

NET = "net."


def to_saved_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state by names of a file: `net.head.weight` is `head.weight` there.

    What lies outside the net, `gain` of the module say, is `module.gain`.
    """
    return {n.removeprefix(NET) if n.startswith(NET) else EXTRA_PREFIX + n: state[n] for n in state}


def from_saved_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's state under the module's own names."""
    return {
        n.removeprefix(EXTRA_PREFIX) if n.startswith(EXTRA_PREFIX) else NET + n: state[n]
        for n in state
    }
