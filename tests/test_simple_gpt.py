"""SimpleGPT is a decoder-only GPT-2, and its initial weights depend on the seed alone."""

import math

import pytest
import torch
from torch import nn

from gptrain.models import SimpleGPT

SMALL = {"vocab_size": 97, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 16}


@pytest.fixture(autouse=True)
def one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def small_gpt(**changes) -> SimpleGPT:
    return SimpleGPT(**{**SMALL, "dropout": 0.0, **changes})


def random_tokens(batch: int = 3, time: int = 16) -> torch.Tensor:
    return torch.randint(SMALL["vocab_size"], (batch, time))


def test_logits_have_one_row_per_token_and_one_column_per_word():
    net, tokens = small_gpt(), random_tokens(3, 11)
    assert net(tokens).shape == (3, 11, 97)
    assert net.hidden(tokens).shape == net.embed(tokens).shape == (3, 11, 32)


def test_forward_is_head_of_norm_of_blocks_of_embed():
    net, tokens = small_gpt().eval(), random_tokens()
    x = net.embed(tokens)
    for block in net.blocks:
        x = block(x)
    assert torch.equal(net(tokens), net.head(net.norm(x)))


@pytest.mark.parametrize("changed", [0, 7, 15])
def test_future_tokens_do_not_change_past_logits(changed):
    net, tokens = small_gpt().eval(), random_tokens()
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % SMALL["vocab_size"]
    before, after = net(tokens), net(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.allclose(before[:, changed], after[:, changed])


def test_an_untrained_net_is_as_uncertain_as_a_uniform_guess():
    net, tokens = small_gpt(vocab_size=5000, d_model=64), torch.randint(5000, (8, 17))[:, :16]
    loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), torch.randint(5000, (8 * 16,)))
    # logits have variance d_model * 0.02^2 = 0.026, so that E[loss] = ln V + half of it
    assert loss.item() == pytest.approx(math.log(5000), abs=0.05)


def test_head_and_embedding_are_one_parameter_also_after_being_moved():
    for net in (small_gpt(), small_gpt().double(), small_gpt().to_empty(device="cpu")):
        assert net.head.weight is net.token_embedding.weight
        assert "head.weight" not in dict(net.named_parameters())


def test_a_sequence_longer_than_max_seq_len_is_refused_by_both_numbers():
    with pytest.raises(ValueError, match=r"17 tokens.*max_seq_len=16"):
        small_gpt()(random_tokens(1, 17))


def test_sizes_that_cannot_be_built_are_refused():
    with pytest.raises(ValueError, match=r"n_heads=5.*d_model=32"):
        small_gpt(n_heads=5)
    with pytest.raises(ValueError, match=r"'relu'.*gelu, gelu_tanh"):
        small_gpt(activation="relu")


@pytest.mark.parametrize(
    ("d_model", "n_heads", "n_layers", "published"),
    [
        (768, 12, 12, 124_439_808),
        (1024, 16, 24, 354_823_168),
        (1280, 20, 36, 774_030_080),
        (1600, 25, 48, 1_557_611_200),
    ],
)
def test_gpt2_sizes_have_the_published_parameter_counts(d_model, n_heads, n_layers, published):
    with torch.device("meta"):
        net = SimpleGPT(50257, d_model, n_heads, n_layers, max_seq_len=1024)
    assert sum(p.numel() for p in net.parameters()) == published


def test_blocks_equal_torchs_own_encoder_layer_with_the_same_weights():
    net, tokens = small_gpt().eval(), random_tokens()
    x = net.embed(tokens)
    causal = nn.Transformer.generate_square_subsequent_mask(16)
    for block in net.blocks:
        layer = nn.TransformerEncoderLayer(
            32, 4, 128, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        qkv = [block.attention.q_proj, block.attention.k_proj, block.attention.v_proj]
        with torch.no_grad():
            for parameter in block.parameters():  # so that biases and norms are seen too
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            layer.self_attn.in_proj_weight.copy_(torch.cat([p.weight for p in qkv]))
            layer.self_attn.in_proj_bias.copy_(torch.cat([p.bias for p in qkv]))
        for theirs, ours in (
            (layer.self_attn.out_proj, block.attention.out_proj),
            (layer.norm1, block.norm_1),
            (layer.norm2, block.norm_2),
            (layer.linear1, block.mlp.up_proj),
            (layer.linear2, block.mlp.down_proj),
        ):
            theirs.load_state_dict(ours.state_dict())
        x = layer(x, src_mask=causal, is_causal=True)
    expected = net.norm(x) @ net.token_embedding.weight.T
    torch.testing.assert_close(net(tokens), expected)  # fp32 rounding: torch's own default


def test_gelu_tanh_is_the_approximation_gpt2_was_trained_with():
    net = small_gpt(activation="gelu_tanh")
    x = torch.linspace(-3, 3, 100)
    cubic = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(net.blocks[0].mlp.activation(x), cubic)


def test_initial_weights_are_gpt2s():
    net = SimpleGPT(1000, d_model=128, n_heads=4, n_layers=8, max_seq_len=64)
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("out_proj.weight", "down_proj.weight"))
            std = 0.02 / math.sqrt(2 * 8) if residual else 0.02
            # standard error of a deviation is std / sqrt(2n); n >= 8192, so 5 % is 6 of them
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < 6 * std / math.sqrt(parameter.numel()), name


def test_equal_seeds_give_equal_weights_and_one_draw_is_taken_from_the_callers_generator():
    def weights_and_next_draw(seed: int, **changes) -> tuple[dict, float]:
        torch.manual_seed(seed)
        return small_gpt(**changes).state_dict(), torch.rand(()).item()

    first, draw = weights_and_next_draw(3)
    again, draw_again = weights_and_next_draw(3)
    other, _ = weights_and_next_draw(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["token_embedding.weight"], other["token_embedding.weight"])
    assert draw == draw_again == weights_and_next_draw(3, n_layers=1)[1]


def test_a_net_made_on_the_meta_device_gets_the_same_weights_in_any_order():
    torch.manual_seed(3)
    expected, draw = small_gpt().state_dict(), torch.rand(())
    torch.manual_seed(3)
    with torch.device("meta"):
        net = small_gpt()
    assert all(parameter.is_meta for parameter in net.parameters())
    assert torch.equal(draw, torch.rand(()))
    net.to_empty(device="cpu")
    for name, parameter in reversed(net.state_dict().items()):
        net.init_parameter(name, parameter)
    assert all(torch.equal(expected[name], made) for name, made in net.state_dict().items())


def test_no_two_matrices_get_the_same_numbers():
    net = small_gpt()
    heads = [p.flatten()[:8] for n, p in net.named_parameters() if p.ndim == 2]
    heads = [head / head.norm() for head in heads]
    assert all(not torch.allclose(a, b) for i, a in enumerate(heads) for b in heads[:i])


def test_attention_works_on_a_share_of_the_heads():
    attention, x = small_gpt().eval().blocks[0].attention, torch.randn(2, 9, 32)
    expected = attention(x)
    partial_sums = torch.zeros_like(expected)
    for columns in (slice(0, 24), slice(24, 32)):  # three heads of 8, and one
        share = small_gpt().eval().blocks[0].attention
        for name in ("q_proj", "k_proj", "v_proj"):
            whole = getattr(attention, name)
            getattr(share, name).weight = nn.Parameter(whole.weight[columns])
            getattr(share, name).bias = nn.Parameter(whole.bias[columns])
        share.out_proj.weight = nn.Parameter(attention.out_proj.weight[:, columns])
        share.out_proj.bias = None
        partial_sums = partial_sums + share(x)
    torch.testing.assert_close(partial_sums + attention.out_proj.bias, expected)


def test_a_stage_may_hold_some_of_the_blocks_under_their_own_names():
    net, tokens = small_gpt(n_layers=3).eval(), random_tokens()
    expected = net.norm(net.blocks[2](net.embed(tokens)))
    net.blocks = nn.ModuleDict({"2": net.blocks[2]})
    assert torch.equal(net.hidden(tokens), expected)
    assert "blocks.2.norm_1.weight" in net.state_dict()


def test_dropout_acts_in_training_only():
    net, tokens = small_gpt(dropout=0.5), random_tokens()
    assert not torch.equal(net(tokens), net(tokens))
    net.eval()
    assert torch.equal(net(tokens), net(tokens))


def test_every_matrix_of_a_block_has_a_role_in_the_tensor_plan():
    from fnmatch import fnmatch

    net = small_gpt()
    linears = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    for name in linears:
        assert sum(fnmatch(name, pattern) for pattern in net.tensor_plan) == 1, name
    modules = dict(net.named_modules())
    for pattern in net.tensor_plan:
        assert any(fnmatch(name, pattern) for name in modules), pattern
