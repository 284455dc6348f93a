"""What any rank says, known to all of them a step later, so that no rank waits for the answer."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Vote:
    """A yes-or-no question that all ranks ask at the same steps."""

    def __init__(self):
        self._asked: tuple[torch.Tensor, dist.Work] | None = None

    def any(self, mine: bool, device: torch.device) -> bool | None:
        """Whether any rank said yes when it was asked last; None if it was not asked yet."""
        if not dist.is_initialized():
            return mine
        said = self.close()
        told = torch.tensor([mine], dtype=torch.uint8, device=device)
        self._asked = told, dist.all_reduce(told, op=dist.ReduceOp.MAX, async_op=True)
        return said

    def close(self) -> bool | None:
        """The answer that is still out, None if nothing is asked."""
        if self._asked is None:
            return None
        (told, work), self._asked = self._asked, None
        work.wait()
        return bool(told.item())
