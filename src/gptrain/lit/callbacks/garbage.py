"""The callback that keeps Python's garbage collector from pausing the training."""

import gc
from typing import Any

from lightning.pytorch import Callback

FIRST_STEPS = 3  # micro-steps after which the objects that a training keeps exist


class QuietCollector(Callback):
    """Callback that keeps the garbage collector from visiting the objects that a training keeps.

    A full collection visits every object of the process: with torch, Lightning and a compiled model
    these are millions, and on one rank after another the training pauses for up to 0.5 s. After the
    first micro-steps this callback freezes all objects (gc.freeze), which are then not visited. The
    collector stays enabled for objects that are made later.

    Does nothing in a process that has frozen objects already: its user manages the collector.
    """

    def __init__(self) -> None:
        self._n_steps = 0  # micro-steps that this start has begun
        self._is_frozen = False

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Freeze all objects that exist, once, when the first FIRST_STEPS micro-steps are done."""
        self._n_steps += 1
        if self._n_steps == FIRST_STEPS + 1 and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._is_frozen = True

    def teardown(self, *_: Any, **__: Any) -> None:
        """Unfreeze the objects, so that the next job in this process can free them."""
        if self._is_frozen:
            gc.unfreeze()
            self._is_frozen = False

    on_exception = teardown  # Lightning does not call teardown after an error
