"""Non-blocking votes of all ranks."""

from functools import cached_property

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from gptrain.lit.lightning import data_of


class Vote:
    """Repeated yes-or-no votes of all ranks that do not wait: results are known at the next call.

    The result is yes, on all ranks, if any rank voted yes. All ranks must call the methods in the
    same order, after the process group was made.

    Args:
        n_votes: Number of questions.
    """

    def __init__(self, n_votes: int):
        self._votes = torch.zeros(n_votes, dtype=torch.uint8)
        self._pending: dist.Work | None = None

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        """Group of all ranks on gloo, or None with one rank."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        return dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def ask(self, *votes: bool) -> list[bool]:
        """Start new votes, and return the results of those that the previous call started.

        Each question has a vote, True for yes. The first call returns no for all of them. A single
        rank gets its own votes back at once.
        """
        if self._group is None:
            return [*votes]
        self.close()
        results = list(map(bool, self._votes.tolist()))
        self._votes = torch.tensor(votes, dtype=torch.uint8)
        self._pending = dist.all_reduce(self._votes, dist.ReduceOp.MAX, self._group, async_op=True)
        return results

    def close(self) -> None:
        """Wait for pending votes, if there are any. Collective."""
        if self._pending is not None:
            self._pending.wait()


def may_vote_in_validation(trainer: Trainer) -> bool:
    """Return whether all ranks validate equally many batches, so that they can vote after each.

    The loaders of a user's own LightningDataModule may have different lengths on the ranks.
    """
    return trainer.world_size == 1 or data_of(trainer).val is not None
