"""What two ranks decide or reduce together: votes, saves after an error, targets and metrics."""

from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from ranks import on_ranks
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from gptrain.lit.callbacks.vote import Vote
from gptrain.lit.strategies.base import ManyRanks, find_saved_buffers
from gptrain.parallel.base import Parallel


@on_ranks(2)
def test_two_ranks_agree_on_votes_and_sums():
    rank = dist.get_rank()
    own_group = [dist.new_group([other]) for other in (0, 1)][rank]
    strategy = ManyRanks(Parallel())
    strategy.parallel_devices = [torch.device("cpu")]
    check_votes(rank)
    check_sums(rank, own_group, strategy)
    check_buffers(rank, own_group, strategy)


def check_votes(rank):
    """The results of a vote are known at the next call, and each is known once."""
    vote = Vote()
    assert vote.ask(rank == 1, False) is None
    assert vote.ask(False, rank == 0) == (True, False)
    assert vote.close() == (False, True)
    assert vote.close() is None and vote.ask(False) is None
    assert vote.close() == (False,)


def check_sums(rank, own_group, strategy):
    """A reduction is over the group that is given, and keeps the fraction of a mean."""
    for operation, group, expected in (
        ("mean", None, 18.5), ("AVG", None, 18.5), ("sum", None, 37), ("sum", own_group, 18 + rank),
        ("max", None, 19),
    ):  # fmt: skip
        # Lightning reduces an integer tensor in place.
        assert strategy.reduce(torch.tensor(18 + rank), group, operation) == expected


def check_buffers(rank, own_group, strategy):
    """Saved buffers are those of the first rank of the group, in their own dtypes."""
    module = nn.Module()
    module.register_buffer("n_seen", torch.tensor(2**40 + 1 + rank))  # float32 would round it
    module.register_buffer("mean", torch.tensor([0.5, 7.0]) + rank)
    module.register_buffer("scratch", torch.tensor(rank), persistent=False)
    strategy._buffer_places = find_saved_buffers(module)
    strategy.parallel.data_group = own_group  # a group of one rank
    strategy.synchronize_buffers()
    assert module.n_seen == 2**40 + 1 + rank and module.mean[1] == 7 + rank
    strategy.parallel.data_group = dist.group.WORLD
    strategy.synchronize_buffers()
    assert module.n_seen == 2**40 + 1 and module.mean.tolist() == [0.5, 7.0]
    assert module.scratch == rank
    module.mean += rank
    strategy.synchronize_buffers()
    assert module.mean.tolist() == [0.5, 7.0]


def test_votes_are_counted_on_the_cpu_where_the_ranks_have_another_backend():
    """A vote on a GPU would be known only after all its queued work."""
    made = []
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        with patch.object(dist, "new_group", lambda **of: made.append(of) or dist.group.WORLD):
            vote = Vote()
            vote.ask(True)
            vote.ask(False)
            vote.close()
    finally:
        dist.destroy_process_group()
    assert made == [{"backend": "gloo"}]


class Counts(SumMetric):
    """A metric that keeps a buffer in checkpoints."""

    def __init__(self):
        super().__init__()
        self.register_buffer("limits", torch.ones(2))


def test_metrics_count_data_ranks_once_and_keep_the_buffers_of_their_rank():
    """Ranks that share samples give a metric, or one of a collection, the same values."""
    module = nn.Module()
    module.net = nn.BatchNorm1d(3)
    inner = [MeanMetric(), Counts()]
    module.metrics = nn.ModuleDict({"alone": SumMetric(), "both": MetricCollection(inner)})
    strategy = ManyRanks(Parallel())
    strategy.parallel.is_partitioned, strategy.parallel.data_group = True, (group := object())
    strategy.accelerator, strategy.model = CPUAccelerator(), module
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.setup(SimpleNamespace(state=SimpleNamespace(fn="validate"), callbacks=[]))
    metrics = [module.metrics["alone"], *module.metrics["both"].values()]
    assert [metric.process_group for metric in metrics] == 3 * [group]
    names = [name for owner, name in find_saved_buffers(module) if owner is module.net]
    assert names == ["running_mean", "running_var", "num_batches_tracked"]
    assert len(find_saved_buffers(module)) == 3
