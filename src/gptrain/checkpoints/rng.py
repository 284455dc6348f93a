"""Capture and restore the states of all random generators of this process.

A state has plain values and tensors only, so that torch.load(weights_only=True) accepts it. Every
rank has its own state, so a checkpoint needs the states of all ranks.
"""

import random
from typing import Any

import numpy
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """Return the states of the random generators of Python, NumPy, torch's CPU and a device.

    The dict has an entry for each generator, that of an accelerator under its type, such as "cuda".
    The device must be the current one of its type.
    """
    numpy_state = numpy.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    state = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Set the random generators of this process to a result of `capture`.

    The generator of the device keeps its state if `state` has none for a device of its type.
    """
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])
