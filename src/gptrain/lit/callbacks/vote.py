"""Non-blocking votes of all ranks."""

import torch
import torch.distributed as dist


class Vote:
    """Repeated yes-or-no votes of all ranks that do not wait: results are known at the next call.

    The result is yes, on all ranks, if any rank voted yes. All ranks must build the object, after
    the process group, and call its methods in the same order.
    """

    def __init__(self):
        self._group = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            is_gloo = dist.get_backend() == "gloo"
            self._group = dist.group.WORLD if is_gloo else dist.new_group(backend="gloo")
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def ask(self, *votes: bool) -> tuple[bool, ...] | None:
        """Start new votes, and return the results of those that the previous call started.

        All ranks pass the same number of votes, True for yes. The first call, and the first after
        `close`, returns None. A single rank gets its own votes back at once.
        """
        if self._group is None:
            return votes
        previous = self.close()
        any_yes = torch.tensor(votes, dtype=torch.uint8)
        work = dist.all_reduce(any_yes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = any_yes, work
        return previous

    def close(self) -> tuple[bool, ...] | None:
        """Wait for pending votes and return their results; None if there are none. Collective."""
        if self._pending is None:
            return None
        any_yes, work = self._pending
        self._pending = None
        work.wait()
        return tuple(map(bool, any_yes.tolist()))
