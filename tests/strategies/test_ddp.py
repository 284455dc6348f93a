"""Communication hooks of data-parallel gradients."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from kinds import Parallel, close, make_batch, make_net
from ranks import on_ranks
from sent import Sent

from gptrain.parallel.data_parallel import SYNC_BUFFERS, build_comm_hook


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
    for name in ("none", "bf16", "fp16"):
        parallel = Parallel("ddp", comm_hook=name, **options).parallel
        assert parallel.ddp_arguments == options | {SYNC_BUFFERS: False}
