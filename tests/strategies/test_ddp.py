"""Communication hooks of data-parallel gradients, and the comparison of the ranks' speed."""

import logging
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from kinds import Parallel, close, make_batch, make_net
from ranks import on_ranks

from gptrain.lit import slowest
from gptrain.parallel.ddp import SYNC_BUFFERS, build_comm_hook
from gptrain.plan.counters import Sent


@on_ranks(2)
def test_comm_hooks_round_gradients_and_halve_the_bytes():
    gradients, sent = {}, {}
    for name in ("none", "bf16", "fp16", "powersgd"):
        torch.manual_seed(0)
        net = torch.nn.parallel.DistributedDataParallel(make_net())
        if (hook := build_comm_hook(name)) is not None:
            net.register_comm_hook(*hook)
        tokens, targets = make_batch(0, dist.get_rank())
        loss = F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten())
        with Sent() as counted:
            loss.backward()
        sent[name] = counted.n_bytes["allreduce"]
        gradients[name] = net.module.blocks[0].mlp.up_proj.weight.grad
    close(gradients["bf16"], gradients["none"], 2**-7)  # eight bits of mantissa
    close(gradients["fp16"], gradients["none"], 2**-10)
    close(gradients["powersgd"], gradients["none"], 1e-6)  # plain all-reduce before step 1000
    assert not torch.equal(gradients["bf16"], gradients["none"])
    assert sent["bf16"] == sent["fp16"] == sent["none"] / 2 > 0
    assert sent["powersgd"] == sent["none"]
    options = {"bucket_cap_mb": 7, "gradient_as_bucket_view": False, "static_graph": True,
               "find_unused_parameters": False}  # fmt: skip
    for name, dtype in (("none", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        parallel = Parallel("ddp", comm_hook=name, **options).parallel
        assert parallel.sent_dtype == dtype  # the planner counts its bytes
        assert parallel.ddp_arguments == options | {SYNC_BUFFERS: False}


@on_ranks(2)
def test_a_rank_that_takes_1_6_times_as_long_as_the_other_is_reported_once():
    """With two ranks the median is the time of the faster one."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    slowest.log.addHandler(handler)
    rank = dist.get_rank()
    ranks = slowest.SlowestRank(rank, torch.device("cpu"))
    for n_steps in range(1, 25):
        values = ranks.compare(1.6 if rank == 1 else 1.0)
        assert len(records) == (n_steps >= 10)
    assert values["perf/slowest_rank"] == 1.0
    close(torch.tensor(values["perf/slowest_over_median"]), torch.tensor(1.6), 1e-6)
    ranks = slowest.SlowestRank(rank, torch.device("cpu"))
    for n_steps in range(20):  # each rank is slow in every other step
        ranks.compare(1.6 if rank == n_steps % 2 else 1.0)
    ranks = slowest.SlowestRank(rank, torch.device("cpu"))
    for _ in range(20):  # a rank is not slow yet
        ranks.compare(1.5 if rank == 1 else 1.0)
    assert len(records) == 1
    assert records[0].getMessage().startswith("warning: rank 1 on ")
    assert "cpu computes 1.6 times as long" in records[0].getMessage()
    for seconds, ratio in (([1.0, 2.0, 3.5], 1.75), ([4.0, 1.0, 3.0, 2.0], 2.0)):
        with patch.object(slowest, "gather", lambda _, seconds=seconds: seconds):
            values = slowest.SlowestRank(0, torch.device("cpu")).compare(seconds[0])
        assert values["perf/slowest_over_median"] == ratio
