"""The logged values of the slowest rank, and the warning about a rank that stays slow."""

import logging
import socket
from statistics import median_low

import torch

from gptrain.parallel.mesh import gather

log = logging.getLogger(__name__)
SLOW_RATIO = 1.5  # computing time relative to the median rank, above which a rank is slow
SLOW_STEPS = 10  # number of logged steps in a row after which a slow rank is reported


class SlowestRank:
    """Compares the computing times of all ranks, to find a rank that slows down all others.

    The computing time of a step leaves out the time in which a rank waits for other ranks. It is
    compared with the median of all ranks. With an even number of ranks the median is the faster of
    the two in the middle, so that with two ranks the slow one is compared with the fast one.

    Args:
        rank: Global rank of this process.
        device: Device of this rank.
    """

    def __init__(self, rank: int, device: torch.device):
        self.place = f"rank {rank} on {socket.gethostname()}, {device}"
        self._slowest = 0  # slowest rank of the last logged step
        self._n_slow = 0  # number of logged steps in a row in which this rank was slow

    def compare(self, seconds: float) -> dict[str, float]:
        """Gather the computing times of a step, and return the logged values of the slowest rank.

        All ranks must call this method, once per logged step. It waits for the device. Rank 0 logs
        a warning when one rank has taken more than SLOW_RATIO times the median in SLOW_STEPS logged
        steps in a row.

        Args:
            seconds: Computing time of this rank in the step.

        Returns:
            `perf/slowest_rank` (global rank) and `perf/slowest_over_median` (its computing time
            relative to the median), identical on all ranks.
        """
        all_seconds = gather(seconds)
        slowest = all_seconds.index(max(all_seconds))
        ratio = all_seconds[slowest] / max(median_low(all_seconds), 1e-9)
        n_before = self._n_slow if slowest == self._slowest else 0
        self._n_slow = n_before + 1 if ratio > SLOW_RATIO else 0
        self._slowest = slowest
        if self._n_slow == SLOW_STEPS:
            log.warning(
                "warning: %s computes %.1f times as long as the median of all ranks, in %d "
                "logged steps in a row",
                gather(self.place)[slowest],
                ratio,
                SLOW_STEPS,
            )
        return {"perf/slowest_rank": float(slowest), "perf/slowest_over_median": ratio}
