"""Non-blocking votes of all ranks."""

import torch
import torch.distributed as dist


class Vote:
    """Repeated yes-or-no votes of all ranks that do not wait: results are known at the next call.

    The result of a vote is yes if any rank voted yes. It is identical on all ranks. Ranks may
    therefore start a collective operation because of a result, but not because of their own vote.

    The votes are an asynchronous all-reduce on the CPU with gloo. With NCCL a rank could read the
    result only after its GPU had finished all queued work.
    """

    def __init__(self):
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = None if is_alone else dist.new_group(backend="gloo")
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def ask(self, *votes: bool) -> tuple[bool, ...] | None:
        """Start new votes, and return the results of the votes that the previous call started.

        All ranks must call it at the same points of the run. It waits only if the previous votes
        have not reached all ranks yet, and returns None if none are pending. A single rank gets its
        new votes back at once. One all-reduce carries the votes on all questions.
        """
        if self._group is None:
            return votes
        previous = self.close()
        any_yes = torch.tensor(votes, dtype=torch.uint8)
        work = dist.all_reduce(any_yes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = any_yes, work
        return previous

    def close(self) -> tuple[bool, ...] | None:
        """Wait for the pending votes and return their results, or None. Collective."""
        if self._pending is None:
            return None
        any_yes, work = self._pending
        self._pending = None
        work.wait()
        return tuple(map(bool, any_yes.tolist()))
