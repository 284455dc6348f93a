"""The planner's formulas for memory, traffic and time of a step."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gptrain.assemble.load import build_net
from gptrain.core.strategies import ParallelDims, default_options
from gptrain.costs.choice import LEVELS, compare, estimates
from gptrain.costs.communication import Traffic, all_reduce_bytes, find_traffic
from gptrain.costs.hardware import DEVICES, Efficiency, Link
from gptrain.costs.machine import Machine, machine_of
from gptrain.costs.memory import block_activations, estimate_memory, estimate_states
from gptrain.costs.optimizers import MuonFacts, OptimizerFacts, facts_of, muon_flops
from gptrain.costs.shape import find_shape, gpt_shape, llama_shape
from gptrain.costs.speed import estimate, find_link, matmul_flops_per_s, moved_bytes
from gptrain.costs.work import Work, find_work
from gptrain.models import SimpleGPT
from gptrain.optim.muon import orthogonalize
from tests.command_line import compose_run
from tests.plan_figures import figures
from tests.plan_scale import mpt_errors

GPT2 = gpt_shape(vocab_size=50257, d_model=768, n_heads=12, n_layers=12, max_seq_len=1024)


def sent(name, dims, **options):
    """Bytes that a rank sends in a step of GPT-2."""
    work = Work(GPT2, default_options(name).model_copy(update=options), dims, 4, 512)
    return sum(entry.n_bytes for entry in find_traffic(work))


@pytest.mark.parametrize("sizes", [(61, 32, 4, 4, 16), (50257, 512, 8, 6, 512)])
def test_a_shape_has_as_many_parameters_as_the_net(sizes):
    with torch.device("meta"):
        net = SimpleGPT(*sizes)
    assert gpt_shape(*sizes).n_parameters == sum(p.numel() for p in net.parameters())


def test_the_shape_of_a_llama_of_a_config_has_as_many_parameters_as_the_net():
    words = ("d_head=10", "n_kv_heads=2", "qk_norm=true", "tie_head=true", "vocab_size=61")
    run = compose_run("model=llama_nano", *(f"model.{word}" for word in words))
    with torch.device("meta"):
        net = build_net(run.model)
    assert find_shape(run.model).n_parameters == sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("shape", "n_parameters"),
    [
        # sum of the tensors of the published checkpoints (model.safetensors.index.json)
        (llama_shape(32000, 4096, 32, 32, 32, 11008), 6_738_415_616),  # Llama 2 7B
        (llama_shape(128256, 4096, 32, 8, 32, 14336), 8_030_261_248),  # Llama 3 8B
        (llama_shape(128256, 8192, 64, 8, 80, 28672), 70_553_706_496),  # Llama 3 70B
        (llama_shape(128256, 16384, 128, 8, 126, 53248), 405_853_388_800),  # Llama 3.1 405B
        (llama_shape(128256, 2048, 32, 8, 16, 8192, tie_head=True), 1_235_814_400),  # 3.2 1B
    ],
)
def test_llamas_have_the_parameters_of_their_published_weights(shape, n_parameters):
    assert shape.n_parameters == n_parameters


def test_stages_hold_the_net_and_the_tied_weight_twice():
    for n_stages in (2, 4, 12):
        dims = ParallelDims(pipeline=n_stages)
        held = [
            Work(GPT2, default_options("pipeline"), dims, 4, 512, rank=r).held
            for r in range(n_stages)
        ]
        assert sum(map(sum, held)) == GPT2.n_parameters + GPT2.table


@pytest.mark.parametrize(("n_ranks", "rank"), [(2, 0), (3, 0), (3, 1), (6, 2)])
def test_two_stages_a_rank_keep_more_microbatches_alive(n_ranks, rank):
    """The warm-up of a rank keeps p + 2 (p - 1 - rank) microbatches of a stage, 1F1B one more.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; torch's ScheduleInterleaved1F1B.
    """
    held = {}
    for schedule in ("1f1b", "interleaved_1f1b"):
        update = {"schedule": schedule, "microbatches": 24}
        options = default_options("pipeline").model_copy(update=update)
        work = Work(GPT2, options, ParallelDims(pipeline=n_ranks), 24, 64, rank=rank)
        held[schedule] = estimate_memory(work)["activations"]
    alive = (n_ranks + 2 * (n_ranks - 1 - rank) + 1) / 2  # each stage has half of the rank's blocks
    assert held["interleaved_1f1b"] / held["1f1b"] == pytest.approx(alive / (n_ranks - rank))


@pytest.mark.parametrize(
    ("precision", "optimizer", "options", "n_bytes"),
    [
        ("32-true", "AdamW", {}, 16),
        ("bf16-mixed", "AdamW", {}, 16),  # weights stay in fp32
        ("bf16-true", "AdamW", {}, 8),
        ("16-true", "AdamW", {}, 8),
        ("32-true", "SGD", {}, 8),
        ("32-true", "SGD", {"momentum": 0.9}, 12),
        ("32-true", "RMSprop", {}, 12),
        ("32-true", "Adadelta", {}, 16),
        ("64-true", "Adagrad", {}, 24),
    ],
)
def test_states_take_the_bytes_that_torch_holds(precision, optimizer, options, n_bytes):
    dtypes = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
    dtype = dtypes.get(precision, torch.float32)
    net = torch.nn.Linear(64, 64, bias=False, dtype=dtype)
    made = getattr(torch.optim, optimizer)(net.parameters(), lr=0.1, **options)
    net(torch.ones(1, 64, dtype=dtype)).sum().backward()
    made.step()
    tensors = [net.weight, net.weight.grad]
    tensors += [t for t in made.state[net.weight].values() if t.numel() > 1]
    assert sum(t.nbytes for t in tensors) == n_bytes * net.weight.numel()
    work = Work(
        GPT2,
        default_options("single"),
        ParallelDims(),
        batch_size=4,
        seq_len=512,
        precision=precision,
        optimizer=facts_of(f"torch.optim.{optimizer}", options),
    )
    states = estimate_states(work)
    assert sum(states.values()) == n_bytes * GPT2.n_parameters


def test_one_rank_sends_nothing():
    for name in ("ddp", "fsdp", "tensor_parallel", "pipeline", "fsdp_tensor_parallel"):
        assert sent(name, ParallelDims()) == 0


def test_a_hook_of_16_bit_sends_half():
    four = ParallelDims(data=4)
    for hook in ("bf16", "fp16"):
        assert sent("ddp", four, comm_hook=hook) == sent("ddp", four) / 2


def test_the_bucket_of_a_tied_table_has_nothing_to_hide_behind():
    """The gradient of a tied table is complete at the end of the backward pass."""
    for shape, last in ((GPT2, GPT2.table), (replace(GPT2, is_tied=False), 25 * 2**20 / 4)):
        work = Work(shape, default_options("ddp"), ParallelDims(data=4), 4, 512)
        (entry,) = find_traffic(work)
        assert entry.exposed == pytest.approx(last / shape.n_parameters)


def test_several_micro_steps_of_fsdp_keep_full_gradients_or_shards():
    """Full gradients wait for the reduce-scatter of the last micro-step."""
    for accumulates_shards, n_bytes in ((False, 4 * GPT2.n_parameters), (True, 1e6)):
        update = {"accumulate_shards": accumulates_shards}
        options = default_options("fsdp").model_copy(update=update)
        work = Work(GPT2, options, ParallelDims(data=8), 4, 512, accumulate=2)
        kept = work.costs.step_memory(work, gradients=1e6).early
        assert kept == pytest.approx(n_bytes, rel=1e-4)  # padded to eight shards


def test_options_of_a_strategy_change_what_a_rank_stores():
    """Buckets of DDP are a second gradient."""
    dims, n_bytes = ParallelDims(data=2), 4 * GPT2.n_parameters
    totals = []
    for is_view in (False, True):
        options = default_options("ddp").model_copy(update={"gradient_as_bucket_view": is_view})
        totals.append(estimate_memory(Work(GPT2, options, dims, 4, 512))["total"])
    assert totals[0] - totals[1] == n_bytes


def test_recomputation_exchanges_heads_again_and_shards_have_a_part_of_the_norms():
    work = Work(SMALL, default_options("context_parallel"), ParallelDims(context=2), 3, 6)
    heads = [
        {entry.what: entry.n_bytes for entry in find_traffic(replace(work, checkpointing=mode))}
        for mode in ("none", "selective", "full")
    ]
    assert [sent["heads"] / heads[0]["heads"] for sent in heads] == [1, 1.5, 1.5]
    norms = []
    for name, n_data in (("tensor_parallel", 1), ("fsdp_tensor_parallel", 4)):
        work = Work(SMALL, default_options(name), ParallelDims(data=n_data, tensor=2), 3, 6)
        norms.append({entry.what: entry.n_bytes for entry in find_traffic(work)})
        padded = {entry.what: entry.n_bytes for entry in find_traffic(replace(work, seq_len=5))}
        assert padded["activations"] == norms[-1]["activations"]  # two ranks share six positions
    # Two norms in each of two blocks and a last one, all-reduced over two ranks.
    assert norms[0]["gradients of norms"] == 5 * 8 * 4
    assert norms[1]["gradients of norms"] == 5 * 8 * 4 / 4


def test_stages_exchange_the_residual_stream_in_the_type_of_the_weights():
    """Four microbatches of one sequence: each is sent once, forward or backward."""
    for precision, n_bytes in (("32-true", 4), ("bf16-mixed", 4), ("bf16-true", 2)):
        work = Work(GPT2, default_options("pipeline"), ParallelDims(pipeline=2), 4, 512)
        sent = find_traffic(replace(work, precision=precision))
        (rows,) = (entry.n_bytes for entry in sent if entry.what == "activations")
        assert rows == 4 * 512 * 768 * n_bytes


def test_the_plan_of_a_pipeline_is_that_of_its_fullest_rank():
    """The last rank of GPipe holds as many microbatches as the first, and the logits."""
    options = default_options("pipeline").model_copy(update={"schedule": "gpipe"})
    work = Work(GPT2, options, ParallelDims(pipeline=4), 8, 512)
    totals = [estimate_memory(replace(work, rank=rank))["total"] for rank in range(4)]
    assert max(totals) == totals[3] > 1.1 * totals[0]
    planned = estimate(work, machine_of(DEVICES["h100_sxm"], 4))["bytes_per_device"]
    assert planned["total"] == round(totals[3])


def test_copies_of_the_shards_keep_the_weights_inside():
    """HSDP: gathers over the ranks of a copy alone, and an all-reduce of shards between copies."""
    of = {t.what: t.n_bytes for t in find_traffic(
        Work(GPT2, default_options("fsdp"), ParallelDims(data=8, replicas=4), 4, 512))}  # fmt: skip
    assert of["gradients"] == pytest.approx(4 * GPT2.n_parameters / 2, rel=1e-4)  # filled up
    copies = 2 * 3 / 4 * 4 * GPT2.n_parameters / 2
    assert of["gradients of copies"] == pytest.approx(copies, rel=1e-4)


def test_a_hundred_megabytes_take_what_the_textbooks_say():
    """25 M fp32 parameters take 11 % of a 50 ms step at 16 GB/s, and 0.6 % at 300 GB/s."""
    sent = Traffic("gradients", "data", all_reduce_bytes(25e6 * 4, 2), 1, hops=2)
    for bytes_per_s, ms, share in ((16e9, 6.25, 0.11), (300e9, 0.33, 0.0066)):
        link = Link("", bytes_per_s / 0.8, 0.0)  # the planner assumes 80 % of the bandwidth
        machine = machine_of(DEVICES["h100_sxm"], 2, link)
        route = find_link(sent, ParallelDims(data=2), machine)
        seconds = sent.hops * route.latency_s + sent.n_bytes / route.bytes_per_s
        assert 1e3 * seconds == pytest.approx(ms, abs=0.01)
        assert seconds / (seconds + 0.05) == pytest.approx(share, rel=0.02)


def test_a_ring_sends_less_than_twice_the_tensor_and_the_naive_exchange_grows_with_the_square():
    for n_ranks in (1, 2, 3, 8, 512):
        ring = all_reduce_bytes(1e6, n_ranks)
        assert ring == pytest.approx(2 * (n_ranks - 1) / n_ranks * 1e6)
        naive = n_ranks * (n_ranks - 1) * 1e6  # each rank sends its full tensor to each other rank
        assert naive == pytest.approx(n_ranks / 2 * n_ranks * ring)


def test_a_step_of_two_ranks_costs_what_is_worked_out_by_hand():
    """Every number is worked out from the sizes, with two key/value heads for four heads.

    A block has 64 + 64 weights in q and out, 32 + 32 in k and v, 3 * 48 in the MLP: 336; and 16 in
    its norms. Token table and head have 80 each, the last norm 8: 2 * 352 + 168 = 872 parameters.
    """
    shape = llama_shape(vocab_size=10, d_model=8, n_heads=4, n_kv_heads=2, n_layers=2, d_ff=6)
    buckets = {"bucket_cap_mb": 436 * 4 / 2**20}  # two buckets of 436 fp32 gradients
    options = default_options("ddp").model_copy(update=buckets)
    work = Work(shape, options, ParallelDims(data=2), 3, 5, accumulate=2)
    link = Link("", bytes_per_s=1e4, latency_s=1e-3)
    speeds = ({"float32": 1e6}, 1e6, 1e-4, link, link)  # FLOP/s, bytes/s, seconds per call
    efficiency = Efficiency(matmul=0.5, attention=0.8)  # 1e6 FLOP/s are half of the data sheet
    prediction = estimate(work, Machine("", 2, 1e6, *speeds, source="", efficiency=efficiency))
    n_bytes = prediction["bytes_per_device"]
    assert n_bytes["weights"] == n_bytes["gradients"] == 872 * 4
    assert n_bytes["optimizer"] == 2 * 872 * 4
    # Values of a token that a block keeps: the inputs of two norms and their outputs (4 * 8), q, k,
    # v and the attention's output (4 * 8, because k and v are repeated for each head of q on a GPU
    # in fp32), four inside the MLP (4 * 6); 4 bytes each. The statistics of norms and softmax: 16 +
    # 4 * 4 bytes. Two more rows at the net's end.
    block = 4 * (4 * 8 + 4 * 8 + 4 * 6) + 16 + 4 * 4
    assert n_bytes["activations"] == 15 * (2 * block + 2 * 8 * 4)
    assert n_bytes["logits"] == 15 * 10 * 4
    # A rank computes 2 * 3 * 5 = 30 tokens. A token costs 6 FLOPs per weight of a matrix, and 12
    # FLOPs per layer, width and position.
    flops = 30 * (6 * (2 * 336 + 80) + 12 * 2 * 8 * 5)
    assert prediction["flops"] == flops
    # Each kept value is moved 7 times, each fp32 logit and each byte of the weights 10 times.
    moved = 30 * (7 * 2 * block + 10 * 10 * 4) + 10 * 872 * 4
    # Attention takes a quarter longer than matrix multiplications of the same FLOPs.
    delay = 30 * 12 * 2 * 8 * 5 * (1 / 0.8 - 1)
    # The calls take less: 2 * (60 * 2 + 150) * 1e-4 s
    busy_s = (flops + delay) / 1e6 + moved / 1e6
    # Two ranks send all gradients once: 2 * 1/2. Each bucket is sent in two messages. The backward
    # pass, which overlaps with the messages, takes two thirds of the last of two micro-steps.
    sent_s = 2 * 2 * 1e-3 + 872 * 4 / 1e4
    shown_s = sent_s - 2 / 3 / 2 * busy_s
    assert shown_s > sent_s / 2  # the last bucket alone has nothing to hide behind
    assert prediction["communication_s"] == pytest.approx(sent_s)
    assert prediction["overlapped_s"] == pytest.approx(sent_s - shown_s)
    assert prediction["step_s"] == pytest.approx(busy_s + shown_s)
    assert prediction["tokens_per_s"] == pytest.approx(60 / (busy_s + shown_s))
    assert prediction["mfu"] == pytest.approx(0.5 * flops / 1e6 / (busy_s + shown_s))
    assert prediction["scaling_efficiency"] == pytest.approx(busy_s / (busy_s + shown_s))


def in_seconds(work, **machine):
    """Seconds of a step where sending, memory and calls take no time, but for what is given."""
    link = Link("", bytes_per_s=1e30, latency_s=0.0)
    facts = {"memory_bytes_per_s": 1e30, "op_s": 0.0, "link": link, "network": link, "source": ""}
    speeds = {"flops_per_s": {"float32": 1e6, "bfloat16": 4e6}}
    facts = {"name": "", "n_local": 2, "memory_bytes": 1e9} | facts | speeds | machine
    return estimate(work, Machine(**facts))["step_s"]


SMALL = llama_shape(vocab_size=10, d_model=8, n_heads=4, n_kv_heads=2, n_layers=2, d_ff=6)


def test_of_traffic_that_computation_hides_the_exposed_part_remains():
    """The last of two buckets has nothing to hide behind; sending the first one is hidden."""
    options = default_options("ddp").model_copy(update={"bucket_cap_mb": 436 * 4 / 2**20})
    work = Work(SMALL, options, ParallelDims(data=2), 3, 5)
    link = Link("", bytes_per_s=1e9, latency_s=0.0, wait_s=1e-4)
    shown_s = in_seconds(work, link=link) - in_seconds(work)
    assert shown_s == pytest.approx((2 * 1e-4 + 872 * 4 / 1e9) / 2)


def test_a_ring_over_nodes_has_the_latency_of_a_tree_over_them():
    """A ring of 16 GPUs on four nodes has log2(4) messages between nodes, one per local GPU."""
    link, network = Link("", 1e12, latency_s=1e-6, wait_s=5e-6), Link("", 1e9, latency_s=1e-3)
    machine = replace(machine_of(DEVICES["h100_sxm"], 4), link=link, network=network)
    route = find_link(Traffic("", "data", 1e6, 1), ParallelDims(data=16), machine)
    assert route.latency_s == pytest.approx((2 * 1e-3 + 4 * 1e-6) / 16)
    assert route.wait_s == 5e-6


def test_full_recomputation_repeats_the_forward_pass_but_for_the_last_matrix_and_the_head():
    """`down` has 48 of the 336 weights of a block. Attention is repeated, at its own speed."""
    work = Work(SMALL, default_options("single"), ParallelDims(), 3, 5, checkpointing="full")
    forward = 15 * (2 * 2 * (336 - 48) + 4 * 2 * 8 * 5)
    flops = 15 * (6 * (2 * 336 + 80) + 12 * 2 * 8 * 5) + forward
    assert in_seconds(work) == pytest.approx(flops / 1e6)
    delay = 15 * (12 + 4) * 2 * 8 * 5 * (1 / 0.8 - 1)
    seconds = in_seconds(work, efficiency=Efficiency(1.0, 0.8))
    assert seconds == pytest.approx((flops + delay) / 1e6)


def test_the_last_stage_has_the_head_and_the_calls_of_a_cpu_add_to_the_step():
    """Two stages of one block each. A rank waits 1/3 of the time that its 3 microbatches take."""
    options = default_options("pipeline").model_copy(update={"microbatches": 3})
    work = Work(SMALL, options, ParallelDims(pipeline=2), 3, 5, accumulate=2, is_cpu=True)
    # The average of the ranks has half of the head, the last has all of it.
    stage = 30 * (6 * (336 + 80) + 12 * 8 * 5) + 30 * 6 * 80 * (1 / 2 - 1 / 2)
    assert in_seconds(work, is_cpu=True) == pytest.approx((1 + 1 / 3) * stage / 1e6)
    calls = 2 * 3 * (450 + 100)  # two micro-steps have three microbatches of one block
    seconds = in_seconds(work, is_cpu=True, op_s=1e-3)
    assert seconds == pytest.approx((1 + 1 / 3) * (stage / 1e6 + calls * 1e-3))


def test_the_update_of_muon_adds_its_products_at_the_speed_of_bf16():
    work = Work(SMALL, default_options("single"), ParallelDims(), 3, 5)
    with_muon = replace(work, optimizer=MuonFacts())
    flops = muon_flops(SMALL, n_blocks=2, n_ranks=1)
    assert in_seconds(with_muon) - in_seconds(work) == pytest.approx(flops / 4e6)


def test_a_gpu_without_bf16_sends_the_updates_of_muon_in_fp32():
    run = compose_run("model=llama_nano", "optimizer=muon", "trainer.precision=32-true")
    sent = {}
    for name in ("v100_sxm2", "h100_sxm"):
        wire = estimates(run, 64, machine_of(DEVICES[name], 2), 1)["ddp"]["wire"]
        (sent[name],) = (n for kind, n in wire.items() if kind.startswith("updates of Muon"))
    assert sent["v100_sxm2"] == 2 * sent["h100_sxm"]


def test_the_states_of_muon_are_divided_with_the_layers():
    """Two tensor ranks: a block has 336 weights in its matrices, and Muon stores one value each."""
    work = Work(SMALL, default_options("tensor_parallel"), ParallelDims(tensor=2), 3, 5)
    adam, muon = (
        estimate_states(replace(work, optimizer=facts))["optimizer"]
        for facts in (OptimizerFacts(), MuonFacts())
    )
    assert adam - muon == 4 * 2 * 336 / 2
    traffic = find_traffic(replace(work, optimizer=MuonFacts()))
    (updates,) = (entry for entry in traffic if entry.what == "updates of Muon")
    assert updates.axis == "tensor"  # the ranks that divide the updates exchange them


def test_a_run_is_planned_with_all_of_its_options():
    words = ["model=simple_gpt", "model.dropout=0.25", "model.compile=blocks", "data.batch_size=4",
             "model.activation_checkpointing=selective", "trainer.precision=bf16-true",
             "trainer.accumulate_grad_batches=3", "trainer.num_nodes=2", "strategy=fsdp",
             "strategy.replicas=2", "optimizer._target_=torch.optim.SGD",
             "+optimizer.momentum=0.9", "~optimizer.betas", "~optimizer.eps"]  # fmt: skip
    run = compose_run(*words)
    work = find_work(run, 33, "fsdp", 4, is_cpu=True)
    assert work == Work(
        find_shape(run.model),
        default_options("fsdp").model_copy(update={"replicas": 2}),
        ParallelDims(data=4, replicas=2),
        batch_size=4,
        seq_len=33,
        accumulate=3,
        precision="bf16-true",
        optimizer=OptimizerFacts(states_per_parameter=1),
        checkpointing="selective",
        dropout=0.25,
        compile="blocks",
        is_cpu=True,
    )
    for name, n_ranks in (
        ("tensor_parallel", 3), ("context_parallel", 6), ("pipeline", 8),
        ("fsdp", 3),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="does not divide the heads, layers, batch or copies"):
            find_work(run, 33, name, n_ranks, is_cpu=True)


def test_a_sequence_that_nearly_fills_a_device_is_divided():
    """The estimate of the memory may be too low, so that one sequence needs a tenth more."""
    run = compose_run("model=llama_8b", "data.batch_size=1", "trainer.precision=bf16-mixed")
    machine = machine_of(DEVICES["h100_sxm"], 8)
    least = estimates(run.changed(LEVELS[-1]), 2**17, machine, 1)["fsdp"]["bytes_per_device"]
    best, speeds = {}, {}
    for factor in (1.05, 1.2, 100.0):
        with_memory = replace(machine, memory_bytes=factor * least["total"])
        result = compare(run, 2**17, with_memory, 1)
        best[factor] = result["best"]
        speeds = {name: row["tokens_per_s"] for name, row in result["strategies"].items()}
    assert best[1.05] == "context_parallel" != best[1.2]
    # FSDP of divided layers fits as well, and is as fast.
    assert compare(run, 2**17, replace(machine, n_local=4), 1)["best"] == "context_parallel"
    # Of strategies that all fit, ddp is the simplest, and less than 2 % slower than the fastest.
    assert best[100.0] == "ddp" and speeds["ddp"] < max(speeds.values())


def test_muon_counts_its_products():
    """Five steps of three products, counted by torch itself."""
    shape = llama_shape(61, 64, 4, 2, 2, 160)
    sides = ((64, 64), (64, 64), (32, 64), (32, 64), *[(64, 160)] * 3)
    with FlopCounterMode(display=False) as counter:
        for side in sides:
            orthogonalize(torch.ones(1, *side), torch.float32)
    assert muon_flops(shape, n_blocks=1, n_ranks=1) == counter.get_total_flops()


def test_copies_of_the_shards_divide_the_updates_of_muon():
    """Four ranks, two copies of two shards: each rank updates a quarter of the matrices.

    Of four blocks it updates two of 8 x 8 (q, out), two of 4 x 8 (k, v) and three of 6 x 8 (MLP),
    with 5 * short^2 * (4 * long + 2 * short) FLOPs for each matrix.
    """
    shape = llama_shape(vocab_size=10, d_model=8, n_heads=4, n_kv_heads=2, n_layers=4, d_ff=6)
    work = Work(
        shape,
        default_options("fsdp"),
        ParallelDims(data=4, replicas=2),
        3,
        5,
        optimizer=MuonFacts(),
    )
    machine = machine_of(DEVICES["h100_sxm"], 4)
    flops = 5 * (2 * 64 * (32 + 16) + 2 * 16 * (32 + 8) + 3 * 36 * (32 + 12))
    assert estimate(work, machine)["optimizer_flops"] == flops
    n_bytes = 2 * 4 * (2 * 64 + 2 * 32 + 3 * 48)  # bf16, four blocks
    # A rank exchanges its quarter of each matrix with the other shard of its copy: half of it is
    # sent twice. Then the two copies exchange half of all updates in a ring.
    sent = {entry.what: entry.n_bytes for entry in find_traffic(work)}["updates of Muon"]
    assert sent == 2 * n_bytes / 4 / 2 + n_bytes / 2 / 2
    # Gloo gathers two shards, then the quarters of all ranks.
    on_cpu = {entry.what: entry.n_bytes for entry in find_traffic(replace(work, is_cpu=True))}
    assert on_cpu["updates of Muon"] == n_bytes / 2 + n_bytes * 3 / 4


def test_fewer_key_value_heads_leave_less_for_the_backward_pass():
    """K and v of a token have one quarter of the width: 2 * (64 - 16) fp32 values less on a CPU.

    On a GPU, attention in fp32 repeats them to the full width.
    """
    options, dims = default_options("single"), ParallelDims()
    shapes = [llama_shape(61, 64, 4, n, 2, 160) for n in (4, 1)]
    for is_cpu, n_bytes in ((True, 2 * (64 - 16) * 4), (False, 0)):
        works = [Work(shape, options, dims, 4, 16, is_cpu=is_cpu) for shape in shapes]
        kept = [block_activations(work)[0] for work in works]
        assert kept[0] - kept[1] == n_bytes


@pytest.mark.parametrize(
    ("axis", "dims", "n_cards"),
    [
        ("data", ParallelDims(data=16), 8),  # the ring leaves a node by all of its cards
        ("data", ParallelDims(data=4, tensor=4), 2),  # four rings of two ranks a node
        ("data", ParallelDims(data=2, tensor=8), 1),
        ("tensor", ParallelDims(tensor=16), 8),
        ("pipeline", ParallelDims(data=8, pipeline=2), 1),
        ("context", ParallelDims(context=16), 8),
        ("data", ParallelDims(data=4, context=4), 8),  # gradients of all ranks that hold weights
    ],
)
def test_a_ring_over_two_nodes_uses_the_network_cards_of_its_ranks(axis, dims, n_cards):
    link, network = Link("", bytes_per_s=1e12, latency_s=0.0), Link("", 1e9, 0.0)
    machine = machine_of(DEVICES["h100_sxm"], 8, link, network)
    route = find_link(Traffic("", axis, 1e6, 1), dims, machine)
    assert route.bytes_per_s == pytest.approx(n_cards * 0.8 * 1e9)


def test_both_kinds_of_recomputation_repeat_the_elementwise_work_of_the_forward_pass():
    """Half of the elementwise work of a block is done twice; the logits are computed once."""
    machine = machine_of(DEVICES["h100_sxm"], 1)
    work = Work(GPT2, default_options("single"), ParallelDims(), 4, 512)
    moved = {
        mode: moved_bytes(replace(work, checkpointing=mode), machine, weights=0.0)
        for mode in ("none", "selective", "full")
    }
    logits = 10 * 4 * GPT2.vocab_size * 4 * 512
    assert moved["selective"] == moved["full"]
    assert moved["full"] - logits == pytest.approx(1.5 * (moved["none"] - logits))
    compiled = moved_bytes(replace(work, compile="blocks"), machine, weights=0.0)
    assert compiled - logits == pytest.approx(3 / 7 * (moved["none"] - logits))


def test_interleaving_halves_the_idle_time_of_a_pipeline():
    """Four ranks with eight microbatches idle for 3/8 of the work, or 3/16 with two stages each.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    link = Link("", bytes_per_s=1e30, latency_s=0.0)  # sending takes no time
    machine = machine_of(DEVICES["h100_sxm"], 4, link)
    for schedule, idle in (("1f1b", 3 / 8), ("interleaved_1f1b", 3 / 16)):
        update = {"schedule": schedule, "microbatches": 8}
        options = default_options("pipeline").model_copy(update=update)
        work = Work(GPT2, options, ParallelDims(pipeline=4), 8, 512)
        efficiency = estimate(work, machine)["scaling_efficiency"]
        assert efficiency == pytest.approx(1 / (1 + idle), rel=1e-6)


@pytest.mark.parametrize(
    ("is_cpu", "n_held", "fits"),
    [(True, 1.9, False), (True, 2.1, True), (False, 0.9, False), (False, 1.1, True)],
)
def test_all_ranks_of_a_node_share_the_memory_of_its_cpu(is_cpu, n_held, fits):
    """A GPU's memory is one rank's alone. Memory is given in multiples of what a rank holds."""
    work = Work(GPT2, default_options("ddp"), ParallelDims(data=2), 4, 512, is_cpu=is_cpu)
    machine = replace(machine_of(DEVICES["h100_sxm"], 2), is_cpu=is_cpu)
    held = estimate(work, machine)["bytes_per_device"]["total"]
    assert estimate(work, replace(machine, memory_bytes=n_held * held))["fits"] == fits


def test_published_runs_fit_and_are_as_fast_as_planned():
    errors = [row for rows in mpt_errors().values() for row in rows]
    assert len(errors) == 191 and all(fits for _, fits in errors)
    assert sum(abs(error) <= 0.15 for error, _ in errors) >= 0.9 * len(errors)


@pytest.mark.parametrize(
    ("name", "precision", "dtype"),
    [
        ("h100_sxm", "32-true", "tf32"),
        ("h100_sxm", "64-true", "float32"),
        ("v100_sxm2", "16-mixed", "float16"),
        ("v100_sxm2", "bf16-mixed", "float32"),  # has no instructions for bf16
    ],
)
def test_tf32_speeds_up_a_run_in_fp32_but_not_one_in_fp64(name, precision, dtype):
    machine = machine_of(DEVICES[name], 1)
    work = Work(GPT2, default_options("single"), ParallelDims(), 4, 512, precision=precision)
    assert matmul_flops_per_s(work, machine) == machine.flops_per_s[dtype]


def test_the_figures_of_whole_plans_are_those_that_were_checked():
    """The file is an earlier output of `python -m tests.plan_figures`, whose diff is reviewed."""
    expected = json.loads(Path(__file__).with_name("plan_figures.json").read_text())
    rows = figures()
    assert rows.keys() == expected.keys()
    for name, row in rows.items():
        assert row == expected[name], name
