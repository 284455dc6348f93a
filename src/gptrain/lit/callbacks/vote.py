"""Non-blocking votes of all ranks."""

import torch
import torch.distributed as dist


class Vote:
    """Repeated yes-or-no votes of all ranks that do not wait: results are known at the next call.

    The result is yes, on all ranks, if any rank voted yes. All ranks must build the object, after
    the process group, and call its methods in the same order.

    Args:
        n_votes: Number of questions.
    """

    def __init__(self, n_votes: int):
        self._group = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            is_gloo = dist.get_backend() == "gloo"
            self._group = dist.group.WORLD if is_gloo else dist.new_group(backend="gloo")
        self._votes = torch.zeros(n_votes, dtype=torch.uint8)
        self._pending: dist.Work | None = None

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
