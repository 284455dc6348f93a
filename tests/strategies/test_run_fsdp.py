"""strategy=fsdp through train.py."""

import pytest
import runs as claims
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

from gptrain.config.compose import compose_config
from gptrain.lit.strategies import build_strategy
from gptrain.models import SimpleGPT
from gptrain.parallel.dims import parallel_dims
from gptrain.parallel.mesh import start_group


class TestEveryClaim(claims.Recomputes):
    name, data_ranks = "fsdp", [0, 1]


@pytest.mark.parametrize("source", ["single", "tensor_parallel", "pipeline"])
def test_it_reads_checkpoints_of(source, runs):
    claims.check_reads_checkpoints_of(runs, "fsdp", source)


def test_it_starts_from_weights_of_one_process(runs):
    claims.check_starts_from_weights_of(runs, "fsdp", "single")


def test_under_bf16_weights_are_gathered_in_it_and_gradients_reduced_in_fp32(runs):
    run = runs(*claims.PLACES["fsdp"], "trainer.precision=bf16-mixed", "trainer.max_steps=2")
    in_bf16, in_fp32 = run.record(), short(runs)
    gathered, whole = (seen["sent"][0]["allgather_base"] for seen in (in_bf16, in_fp32))
    assert gathered == whole / 2
    assert reduced(in_bf16) == reduced(in_fp32)


def test_muon_equals_one_process(runs):
    claims.check_muon(runs, "fsdp")


def short(runs, *options):
    """Two steps with options that change no number."""
    run = runs(*claims.PLACES["fsdp"], "trainer.max_steps=2", *options)
    truth = claims.plain(runs, "single")
    claims.check_close(run.column("train/loss"), truth.column("train/loss")[:2])
    claims.check_close(run.column("grad_norm"), truth.column("grad_norm")[:2])
    return run.record()


def reduced(seen):
    """Bytes that were reduce-scattered in each micro-step of a step."""
    return [sent.get("reduce_scatter_base", 0) for sent in seen["sent"]]


def test_gradients_are_reduced_once_per_step_or_at_each_micro_step_where_asked(runs):
    first, last = reduced(short(runs))
    assert first == 0 < last
    assert reduced(short(runs, "strategy.accumulate_shards=true")) == [last, last]


def test_weights_are_gathered_once_less_where_they_are_kept(runs):
    """Of four blocks each is gathered forward, and again backward; the rest once."""
    gathers = {
        kept: [calls["allgather_base"] for calls in short(runs, *words)["calls"]]
        for kept, words in ((False, ()), (True, ("strategy.reshard_after_forward=false",)))
    }
    # The first micro-step reshards nothing at its end: the gradients wait for the second.
    assert gathers[False][0] == 4 + 4 + 1
    assert all(kept <= 4 + 1 for kept in gathers[True])


def test_offloaded_shards_live_in_host_memory(runs):
    """On a CPU it has no effect and is refused, but the policy is that of every group."""
    assert set(short(runs)["offload"]) == {"OffloadPolicy"}
    cfg = compose_config(["strategy=fsdp", "strategy.cpu_offload=true"])
    start_group("gloo", torch.device("cpu"), rank=0, world_size=1, timeout_s=60)
    try:
        net, _ = build_strategy(
            lambda: SimpleGPT(61, 32, n_heads=4, n_layers=4, max_seq_len=16),
            cfg.strategy,
            parallel_dims(cfg.strategy, 1),
            torch.device("cpu"),
        )
        policies = [part._get_fsdp_state()._fsdp_param_group.offload_policy for part in net.blocks]
    finally:
        dist.destroy_process_group()
    assert [type(policy) for policy in policies] == 4 * [CPUOffloadPolicy]
