"""The planner's formulas against nets, torch's own counts, published figures and sums by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gptrain.core.strategies import ParallelDims, default_options
from gptrain.costs.choice import compare, largest_batch_size, optimizer_states, step_of
from gptrain.costs.hardware import Link, Machine, device_of, machine_of
from gptrain.costs.net import Net, net_of, train_flops_per_token
from gptrain.costs.step import Step, estimate, memory
from gptrain.loss import token_losses
from gptrain.models import SimpleGPT
from tests.command_line import compose_run
from tests.tools.plan_scale import mpt_errors

GPT2 = net_of(compose_run("model=gpt2").model)
SMALL = Net(10, 8, 4, 2, 2, 6, is_gated=True)


@pytest.mark.parametrize(
    ("precision", "optimizer", "options", "n_bytes"),
    [
        ("32-true", "AdamW", {}, 16),
        ("bf16-mixed", "AdamW", {}, 16),  # weights stay in fp32
        ("bf16-true", "AdamW", {}, 8),
        ("32-true", "SGD", {}, 8),
        ("32-true", "RMSprop", {"momentum": 0.9}, 16),
        ("32-true", "Adadelta", {}, 16),
        ("64-true", "Adagrad", {}, 24),
    ],
)
def test_states_take_the_bytes_that_torch_holds(precision, optimizer, options, n_bytes):
    dtypes = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
    dtype = dtypes.get(precision, torch.float32)
    net = nn.Linear(64, 64, bias=False, dtype=dtype)
    made = getattr(torch.optim, optimizer)(net.parameters(), lr=0.1, **options)
    net(torch.ones(1, 64, dtype=dtype)).sum().backward()
    made.step()
    tensors = [net.weight, net.weight.grad]
    tensors += [t for t in made.state[net.weight].values() if t.numel() > 1]
    assert sum(t.nbytes for t in tensors) == n_bytes * net.weight.numel()
    n_states = optimizer_states(f"torch.optim.{optimizer}", options)
    step = Step(GPT2, default_options("single"), ParallelDims(), 4, 512, 1, precision, n_states)
    held = [memory(step)[part] for part in ("weights", "gradients", "optimizer")]
    assert sum(held) == n_bytes * GPT2.parameters(12, True, True)


@pytest.mark.parametrize(
    ("words", "n_gpus", "gib"),
    [
        # Peaks of torch's CUDA allocator, 16 sequences of 1,024 tokens, without kernels
        ("model=gpt2", 1, 8.79),
        ("model=gpt2 model.dropout=0.1", 1, 9.09),
        ("model=gpt2 model.activation_checkpointing=full", 1, 3.53),
        ("model=gpt2 model.activation_checkpointing=selective", 1, 6.36),
        ("model=gpt2 strategy=ddp trainer.devices=2", 2, 9.26),
        ("model=llama_124m optimizer=muon", 1, 10.63),
        # Peak of one H200, the run of tests/README.md
        ("model=gpt2 model.compile=blocks trainer.accumulate_grad_batches=4", 1, 7.7),
    ],
)
def test_the_peak_of_memory_is_that_of_the_allocator_within_ten_percent(words, n_gpus, gib):
    run = compose_run(*words.split(), "trainer.precision=bf16-mixed", "data.batch_size=16")
    step = step_of(run, 1024, "single" if n_gpus == 1 else "ddp", n_gpus)
    assert memory(step)["total"] / 2**30 == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize(
    ("vocab_size", "d_model", "n_heads", "n_layers", "n_positions"),
    [(1000, 64, 4, 2, 32), (64, 32, 2, 3, 128), (256, 32, 4, 8, 16)],
)
def test_the_flops_are_those_that_torch_counts(vocab_size, d_model, n_heads, n_layers, n_positions):
    net = SimpleGPT(vocab_size, d_model, n_heads, n_layers, n_positions)
    tokens = torch.randint(vocab_size, (2, n_positions))
    # The plain kernel: a fused one computes the scores a second time in its backward pass, which
    # torch counts and model FLOPs do not.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        token_losses(net(tokens), tokens).sum().backward()
    sizes = Net(vocab_size, d_model, n_heads, n_heads, n_layers, 4 * d_model)
    flops = train_flops_per_token(sizes.matrix_weights, n_layers, d_model, n_positions)
    assert tokens.numel() * flops == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_a_step_of_two_ranks_costs_what_is_worked_out_by_hand():
    """Every number is worked out from the sizes, with two key/value heads for four heads.

    A block has 64 + 64 weights in q and out, 32 + 32 in k and v, 3 * 48 in the MLP: 336; and 16 in
    its norms. Token table and head have 80 each, the last norm 8: 2 * 352 + 168 = 872 parameters.
    """
    buckets = {"bucket_cap_mb": 436 * 4 / 2**20}  # two buckets of 436 fp32 gradients
    options = default_options("ddp").model_copy(update=buckets)
    step = Step(SMALL, options, ParallelDims(data=2), 3, 5, accumulate=2)
    link = Link("", bytes_per_s=1e4, latency_s=1e-3)
    # FLOP/s, bytes/s. 1e6 FLOP/s are half of the data sheet.
    machine = Machine("", 2, 1e6, {"float32": 1e6}, 1e6, link, link, "", 0.5, attention=0.8)
    prediction = estimate(step, machine)
    n_bytes = prediction["bytes_per_device"]
    assert n_bytes["weights"] == n_bytes["gradients"] == 872 * 4
    assert n_bytes["optimizer"] == 2 * 872 * 4
    # Values of a token that a block keeps: the inputs of two norms and their outputs (4 * 8), q, k,
    # v and the attention's output (4 * 8, because k and v are repeated for each head of q in fp32),
    # four inside the MLP (4 * 6); 4 bytes each. The statistics of norms and softmax: 16 + 4 * 4.
    block = 4 * (4 * 8 + 4 * 8 + 4 * 6) + 16 + 4 * 4
    assert n_bytes["activations"] == 15 * 2 * block
    assert n_bytes["logits"] == 15 * 10 * 4
    # The peak is that of the backward pass of the last block: all gradients, the gradient of the
    # head, all activations, and the gradients of the residual stream and of the MLP's values.
    in_block = 15 * 4 * (8 + 2 * 6)
    peak = 872 * 4 + 80 * 4 + 15 * 2 * block + in_block
    assert n_bytes["total"] == 3 * 872 * 4 + peak
    # A rank computes 2 * 3 * 5 = 30 tokens. A token costs 6 FLOPs per weight of a matrix, and 12
    # FLOPs per layer, width and position.
    flops = 30 * (6 * (2 * 336 + 80) + 12 * 2 * 8 * 5)
    assert prediction["flops"] == flops
    # Each kept value is moved 7 times, each fp32 logit and each byte of the weights 10 times.
    moved = 30 * (7 * 2 * block + 10 * 10 * 4) + 10 * 872 * 4
    # Attention takes a quarter longer than matrix multiplications of the same FLOPs.
    delay = 30 * 12 * 2 * 8 * 5 * (1 / 0.8 - 1)
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


def test_a_device_is_known_by_the_name_its_driver_gives():
    for driver, name in (
        ("NVIDIA H100 80GB HBM3", "h100_sxm"), ("NVIDIA H100 PCIe", "h100_pcie"),
        ("A100-PCIE-40GB", "a100_pcie_40gb"), ("Tesla V100-SXM2-32GB", "v100_sxm2_32gb"),
        # Not in the table, or a part or a slower variant of what is there.
        ("NVIDIA GeForce GTX 1080", None), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 4090 D", None),
    ):  # fmt: skip
        assert device_of(driver) == name


def test_published_runs_fit_and_are_as_fast_as_planned():
    errors = [row for rows in mpt_errors().values() for row in rows]
    assert len(errors) == 191 and all(fits for _, fits in errors)
    assert sum(abs(error) <= 0.15 for error, _ in errors) >= 0.93 * len(errors)
    assert sorted(abs(error) for error, _ in errors)[95] <= 0.04


def test_the_largest_batch_fits_and_one_more_does_not():
    run = compose_run("model=gpt2", "trainer.precision=bf16-mixed", "trainer.devices=4")
    machine = machine_of("rtx_3090", 4)
    rows = compare(run, 1024, machine, 1)["strategies"]
    for name, unit in (("single", 1), ("fsdp", 1), ("ddp_pipeline", 4)):
        largest = rows[name]["largest_batch_size"]
        assert largest > unit and largest % unit == 0
        step = step_of(run, 1024, name, 1 if name == "single" else 4)
        for n, fits in ((largest, True), (largest + unit, False)):
            assert estimate(replace(step, batch_size=n), machine)["fits"] is fits
    too_small = replace(machine, memory_bytes=2**20)
    assert largest_batch_size(step, too_small) == 0
