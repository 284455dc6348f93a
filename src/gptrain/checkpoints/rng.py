"""The state of every random generator of this process, to be put back bit by bit.

Plain values and tensors only, so that it survives a weights-only load. Every rank has its own:
gather them when saving. Of the devices only the current one is taken, which is the one this rank
uses; asking the others would open a context, and cost memory, on each.
"""

import random
from typing import Any

import numpy
import torch


def capture() -> dict[str, Any]:
    """State of Python's, NumPy's, torch's CPU and the current device's generator."""
    numbers = numpy.random.get_state(legacy=False)
    numbers["state"]["key"] = numbers["state"]["key"].tolist()
    state = {"python": random.getstate(), "numpy": numbers, "torch": torch.get_rng_state()}
    if device := _device_in_use():
        state[device] = torch.get_device_module(device).get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put a captured state back, of the generators that this process has."""
    setters = {
        "python": random.setstate,
        "numpy": numpy.random.set_state,
        "torch": torch.set_rng_state,
    }
    if device := _device_in_use():
        setters[device] = torch.get_device_module(device).set_rng_state
    for name in setters.keys() & state.keys():
        setters[name](state[name])


def _device_in_use() -> str | None:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    # A device that was never used has no state of its own yet, and asking would open it.
    is_used = getattr(torch.get_device_module(device), "is_initialized", lambda: True)
    return device.type if is_used() else None
