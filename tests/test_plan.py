"""What a run will hold and send, by formulas; counted on real ranks in parallel_cases.py."""

import pytest
import torch

from gptrain.models import SimpleGPT
from gptrain.plan.dims import ParallelDims
from gptrain.plan.memory import bytes_per_parameter, rank_parameters
from gptrain.plan.shape import find_shape, gpt_shape, llama_shape
from tests.communication import ddp_bytes, fsdp_bytes, step_bytes

GPT2 = gpt_shape(vocab_size=50257, d_model=768, n_heads=12, n_layers=12, max_seq_len=1024)
WORK = {"batch_size": 4, "seq_len": 512}


@pytest.mark.parametrize("sizes", [(61, 32, 4, 4, 16), (50257, 512, 8, 6, 512)])
def test_a_shape_has_as_many_parameters_as_the_net(sizes):
    with torch.device("meta"):
        net = SimpleGPT(*sizes)
    assert gpt_shape(*sizes).n_parameters == sum(p.numel() for p in net.parameters())


def test_gpt2_has_124_million_parameters():
    assert GPT2.n_parameters == 124_439_808  # OpenAI's "124M"


@pytest.mark.parametrize(
    ("shape", "n_parameters"),
    [
        # sum of the tensors of the published checkpoints (model.safetensors.index.json)
        (llama_shape(32000, 4096, 32, 32, 32, 11008, 4096), 6_738_415_616),  # Llama 2 7B
        (llama_shape(128256, 4096, 32, 8, 32, 14336, 8192), 8_030_261_248),  # Llama 3 8B
        (llama_shape(128256, 8192, 64, 8, 80, 28672, 8192), 70_553_706_496),  # Llama 3 70B
        (llama_shape(128256, 16384, 128, 8, 126, 53248, 8192), 405_853_388_800),  # Llama 3.1 405B
        (llama_shape(128256, 2048, 32, 8, 16, 8192, 8192, tie_head=True), 1_235_814_400),  # 3.2 1B
    ],
)
def test_llamas_have_the_parameters_of_their_published_weights(shape, n_parameters):
    assert shape.n_parameters == n_parameters
    assert sum(shape.tensor_parallel_parameters(1)) == n_parameters


def test_a_config_names_its_shape_and_a_net_of_ones_own_has_none():
    model = {"vocab_size": 61, "d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 16}
    theirs = find_shape({"_target_": "gptrain.models.SimpleGPT", "dropout": 0.1, **model})
    assert theirs == gpt_shape(**model)
    assert find_shape({"_target_": "mine.Net", **model}) is None


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("fsdp", ParallelDims(data=8)),
        ("tensor_parallel", ParallelDims(tensor=4)),
        ("fsdp_tensor_parallel", ParallelDims(data=2, tensor=4)),
    ],
)
def test_a_sharded_rank_holds_its_fraction_and_at_most_a_tenth_more(name, dims):
    fraction = rank_parameters(name, GPT2, dims) / GPT2.n_parameters
    assert 1 / dims.world_size <= fraction < 1.1 / dims.world_size


def test_stages_hold_the_net_and_the_tied_weight_twice():
    for n_stages in (2, 4, 12):
        dims = ParallelDims(pipeline=n_stages)
        held = [rank_parameters("pipeline", GPT2, dims, pipeline_rank=r) for r in range(n_stages)]
        assert sum(held) == GPT2.n_parameters + GPT2.token_table_parameters


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
    assert sent == pytest.approx(ddp_bytes(GPT2.n_parameters, 8))


def test_resharding_costs_at_most_half_as_much_again():
    ratio = fsdp_bytes(GPT2, 8) / ddp_bytes(GPT2.n_parameters, 8)
    assert 1.3 < ratio <= 1.5  # 1.5 but for the embedding, which stays


def test_accumulation_costs_gathers_under_fsdp_and_nothing_under_ddp():
    def sent(name, accumulate):
        return step_bytes(name, GPT2, ParallelDims(data=4), accumulate=accumulate, **WORK)

    assert sent("ddp", 8) == sent("ddp", 1)
    assert sent("fsdp", 8) > 4 * sent("fsdp", 1)
