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
    version, numbers, gauss_next = random.getstate()
    name, keys, position, has_gauss, gauss = numpy.random.get_state()
    state: dict[str, Any] = {
        "python": {
            "version": version,
            "numbers": torch.tensor(numbers, dtype=torch.int64),
            "gauss_next": gauss_next,
        },
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(keys.astype(numpy.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "torch": torch.get_rng_state(),
    }
    if device := _device_in_use():
        state[device] = torch.get_device_module(device).get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put a captured state back, of the generators that this process has."""
    for name, saved in state.items():
        if name == "python":
            numbers = tuple(saved["numbers"].tolist())
            random.setstate((saved["version"], numbers, saved["gauss_next"]))
        elif name == "torch":
            torch.set_rng_state(saved)
        elif name == "numpy":
            keys = saved["keys"].numpy().astype(numpy.uint32)
            numpy.random.set_state(
                (saved["name"], keys, saved["position"], saved["has_gauss"], saved["gauss"])
            )
        elif name == _device_in_use():
            torch.get_device_module(name).set_rng_state(saved)


def _device_in_use() -> str | None:
    if not torch.accelerator.is_available():
        return None
    name = torch.accelerator.current_accelerator().type
    module = torch.get_device_module(name)
    # A device that was never used has no state of its own yet, and asking would open it.
    return name if getattr(module, "is_initialized", lambda: True)() else None
