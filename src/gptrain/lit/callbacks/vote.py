"""A value gathered from each rank at once, or a yes-or-no vote that no rank waits for."""

from typing import Any

import torch
import torch.distributed as dist


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """One value of each rank, on all ranks; of all there are, or of a group."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def n_collectives() -> int:
    """Return how many collectives this rank has begun among all ranks; 0 where nobody counts.

    Ranks that have begun as many can begin the next one together.
    """
    group: Any = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        return 0
    try:
        return group._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):
        return 0


class Vote:
    """Yes-or-no questions that all ranks ask at the same steps, and that are answered a step later.

    All ranks get the same answers: a question is answered with yes if any rank voted yes. Ranks may
    therefore begin a collective operation because of an answer, but not because of their own vote.

    The votes go from host to host: a GPU would have to finish all that was queued on it before its
    host could read the answer.
    """

    def __init__(self):
        self._group: dist.ProcessGroup | None = None
        self._asked: tuple[torch.Tensor, dist.Work] | None = None

    def ask(self, *votes: bool) -> tuple[bool, ...] | None:
        """Give this rank's votes, and return the answers to the questions that were asked last.

        Args:
            votes: One vote for each question. All questions of a step are one collective operation.

        Returns:
            One answer for each question, or None if nothing was asked before. A single process gets
            the answers to these very questions.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return votes
        if self._group is None:
            of_hosts = dist.get_backend() == "gloo"
            self._group = dist.group.WORLD if of_hosts else dist.new_group(backend="gloo")
        previous = self.close()
        any_yes = torch.tensor(votes, dtype=torch.uint8)
        work = dist.all_reduce(any_yes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._asked = any_yes, work
        return previous

    def close(self) -> tuple[bool, ...] | None:
        """Wait for the answers that are still out and return them, or None if there are none."""
        if self._asked is None:
            return None
        (any_yes, work), self._asked = self._asked, None
        work.wait()
        return tuple(map(bool, any_yes.tolist()))
