"""Capture and restore the states of all random generators of this process.

A state has plain values and tensors only, so that torch.load(weights_only=True) accepts it. Every
rank has its own state, so a checkpoint needs the states of all ranks.
"""

import random
from typing import Any

import numpy
import torch


def capture() -> dict[str, Any]:
    """Return the states of the random generators of Python, NumPy, torch's CPU and accelerator.

    The dict has an entry for each generator. That of a GPU, except on MPS, is left out if this
    process has not used the GPU yet.
    """
    numpy_state = numpy.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    state = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
    if device := _device_in_use():
        state[device] = torch.get_device_module(device).get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Set the random generators of this process to a result of `capture`.

    The generator of the GPU keeps its state if `state` has none for it, or if this process has not
    used the GPU yet.
    """
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if (device := _device_in_use()) in state:
        torch.get_device_module(device).set_rng_state(state[device])


def _device_in_use() -> str | None:
    """Return the type of the current accelerator, such as "cuda", if this process has used it."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    # Reading the state of a device that was never used would open a context on it.
    is_used = getattr(torch.get_device_module(device), "is_initialized", lambda: True)
    return device.type if is_used() else None
