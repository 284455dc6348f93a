"""One device, or a whole net on each of several."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from gptrain.lit.strategies.states import NamedStates


class Single(NamedStates, SingleDeviceStrategy):
    """One device."""


class Ranks(NamedStates, DDPStrategy):
    """Several ranks, whose process group exists already.

    Lightning would seed every rank alike here, and dropout with it.
    """

    def setup_distributed(self) -> None:
        self.set_world_ranks()


class Replicated(Ranks):
    """Data parallel: a whole net on every rank, gradients averaged while they are formed."""

    def _register_ddp_hooks(self) -> None:
        if self._ddp_comm_hook is not None:  # Lightning registers it on GPUs only
            self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)
