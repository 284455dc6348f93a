"""What a run will hold and send, by formulas; counted on real ranks in parallel_cases.py."""

import pytest
import torch

from gptrain.models import SimpleGPT
from gptrain.plan.dims import ParallelDims
from gptrain.plan.memory import GPTShape, bytes_per_parameter, rank_parameters
from tests.communication import ddp_bytes, fsdp_bytes, parameters, step_bytes

GPT2 = GPTShape(vocab_size=50257, d_model=768, n_heads=12, n_layers=12, max_seq_len=1024)
WORK = {"batch_size": 4, "seq_len": 512}


@pytest.mark.parametrize("sizes", [(61, 32, 4, 4, 16), (50257, 512, 8, 6, 512)])
def test_a_shape_has_as_many_parameters_as_the_net(sizes):
    with torch.device("meta"):
        net = SimpleGPT(*sizes)
    assert parameters(GPTShape(*sizes)) == sum(p.numel() for p in net.parameters())


def test_gpt2_has_124_million_parameters():
    assert parameters(GPT2) == 124_439_808  # OpenAI's "124M"


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("fsdp", ParallelDims(data=8)),
        ("tensor_parallel", ParallelDims(tensor=4)),
        ("fsdp_tensor_parallel", ParallelDims(data=2, tensor=4)),
    ],
)
def test_a_sharded_rank_holds_its_fraction_and_at_most_a_tenth_more(name, dims):
    fraction = rank_parameters(name, GPT2, dims) / parameters(GPT2)
    assert 1 / dims.world_size <= fraction < 1.1 / dims.world_size


def test_stages_hold_the_net_and_the_tied_weight_twice():
    for n_stages in (2, 4, 12):
        dims = ParallelDims(pipeline=n_stages)
        held = [rank_parameters("pipeline", GPT2, dims, pipeline_rank=r) for r in range(n_stages)]
        assert sum(held) == parameters(GPT2) + GPT2.token_table_parameters


@pytest.mark.parametrize(
    ("precision", "optimizer", "n_bytes"),
    [
        ("32-true", "AdamW", 16),
        ("bf16-mixed", "AdamW", 16),  # weights stay in fp32
        ("bf16-true", "AdamW", 8),
        ("32-true", "SGD", 8),
        ("32-true", "Muon", 12),
        ("32-true", "RMSprop", 12),
        ("32-true", "Adadelta", 16),
        ("64-true", "Adagrad", 24),
    ],
)
def test_states_take_the_bytes_that_torch_holds(precision, optimizer, n_bytes):
    dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)
    net = torch.nn.Linear(64, 64, bias=False, dtype=dtype)
    made = getattr(torch.optim, optimizer)(net.parameters(), lr=0.1)
    net(torch.ones(1, 64, dtype=dtype)).sum().backward()
    made.step()
    tensors = [net.weight, net.weight.grad]
    tensors += [t for t in made.state[net.weight].values() if t.numel() > 1]
    assert sum(t.nbytes for t in tensors) == n_bytes * net.weight.numel()
    assert bytes_per_parameter(precision, f"torch.optim.{optimizer}") == n_bytes


def test_sgd_with_momentum_has_a_state():
    assert bytes_per_parameter("32-true", "torch.optim.SGD", momentum=0.9) == 12


def test_one_rank_sends_nothing():
    for name in ("ddp", "fsdp", "tensor_parallel", "pipeline", "fsdp_tensor_parallel"):
        assert step_bytes(name, GPT2, ParallelDims(), **WORK) == 0


def test_fsdp_without_resharding_sends_what_ddp_sends():
    # an all-gather and a reduce-scatter are an all-reduce (arXiv:1910.02054, section 7.1)
    sent = fsdp_bytes(GPT2, 8, reshard_after_forward=False)
    assert sent == pytest.approx(ddp_bytes(parameters(GPT2), 8))


def test_resharding_costs_at_most_half_as_much_again():
    ratio = fsdp_bytes(GPT2, 8) / ddp_bytes(parameters(GPT2), 8)
    assert 1.3 < ratio <= 1.5  # 1.5 but for the embedding, which stays


def test_accumulation_costs_gathers_under_fsdp_and_nothing_under_ddp():
    def sent(name, accumulate):
        return step_bytes(name, GPT2, ParallelDims(data=4), accumulate=accumulate, **WORK)

    assert sent("ddp", 8) == sent("ddp", 1)
    assert sent("fsdp", 8) > 4 * sent("fsdp", 1)
