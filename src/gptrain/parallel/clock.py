"""The time that a rank computes in an optimizer step, without the time that it waits for others."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


class ComputeClock:
    """Measures the computing time of one rank in one optimizer step.

    Ranks that train together finish every step at the same time, because the collectives of a step
    make the fast ranks wait for the slowest one. The clock therefore stops where a rank may wait:

        counted      callbacks, loggers (on rank 0), the wait for data, the forward passes, the
                     optimizer's update
        not counted  backward passes, in which gradients are communicated while they are computed;
                     the all-reduces of the number of targets and of the gradient norm; the
                     synchronization of DiLoCo; FSDP's all-gathers in the forward pass; the schedule
                     of a pipeline; saves; validations, with the wait for the batch after a
                     validation; the collectives by which the ranks agree to stop or to skip a step,
                     and those of a logged step

    A backward pass takes a fixed multiple of the forward pass, so leaving it out keeps the ratio of
    two ranks. The collectives of tensor parallelism within the forward pass are counted: ranks of
    one tensor group that wait for each other there appear equally slow.

    On a GPU the time is that of the current CUDA stream, measured by events. The host does not wait
    for the GPU before `read`.

    Args:
        device: Device of this rank.
    """

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []  # begin and end of each counted interval, alternating

    def start_step(self) -> None:
        """Discard the measurements of the previous step, and begin to measure a new step.

        The clock counts from this call on. If gradients are disabled (torch.no_grad), the clock
        stays paused until a `resume` with gradients enabled.
        """
        self._marks.clear()
        self.resume()

    def pause(self, *_: Any) -> None:
        """Stop counting time until `resume`, where this rank may wait for other ranks.

        Does nothing if the clock is paused. Hooks of torch call this method with arguments, which
        are ignored.
        """
        if len(self._marks) % 2:
            self._mark()

    def resume(self, *_: Any) -> None:
        """Count time again after `pause`.

        Does nothing if the clock counts already, or where gradients are disabled: the forward
        passes of a validation call this method, too. Hooks of torch call it with arguments, which
        are ignored.
        """
        if len(self._marks) % 2 == 0 and torch.is_grad_enabled():
            self._mark()

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Pause the clock inside the `with` block, for example around a collective.

        The end of the block is a call of `resume`, also if the clock was paused before the block.
        """
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def read(self) -> float:
        """Pause the clock, and return the seconds that were counted since `start_step`.

        On a GPU this call waits until the GPU is idle. The result is 0 before any `start_step`.
        """
        self.pause()
        begins, ends = self._marks[::2], self._marks[1::2]
        if not self._is_cuda:
            return sum(end - begin for begin, end in zip(begins, ends, strict=True))
        torch.cuda.synchronize()
        milliseconds = [begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)]
        return sum(milliseconds) / 1000

    def _mark(self) -> None:
        """Record the current time as the begin or the end of a counted interval."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
