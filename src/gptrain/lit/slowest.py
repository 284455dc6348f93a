"""The logged values of the slowest rank, and the warning about a rank that stays slow."""

import logging
import socket
from statistics import median_low

import torch
import torch.distributed as dist

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
        self.rank = rank
        self.device = device
        self._slow_rank: int | None = None  # rank that was slow in the last logged step
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
        # MPS has no float64.
        times = torch.zeros(dist.get_world_size(), dtype=torch.float32, device=self.device)
        times[self.rank] = seconds
        dist.all_reduce(times)
        all_seconds = times.tolist()
        slowest = max(range(len(all_seconds)), key=all_seconds.__getitem__)
        ratio = all_seconds[slowest] / max(median_low(all_seconds), 1e-9)
        slow_rank = slowest if ratio > SLOW_RATIO else None
        self._n_slow = self._n_slow + 1 if slow_rank == self._slow_rank else 1
        self._slow_rank = slow_rank
        if slow_rank is not None and self._n_slow == SLOW_STEPS:
            places = gather(f"rank {self.rank} on {socket.gethostname()}, {self.device}")
            if self.rank == 0:
                log.warning(
                    "warning: %s computes %.1f times as long as the median of all ranks, in %d "
                    "logged steps in a row",
                    places[slowest],
                    ratio,
                    SLOW_STEPS,
                )
        return {"perf/slowest_rank": float(slowest), "perf/slowest_over_median": ratio}
