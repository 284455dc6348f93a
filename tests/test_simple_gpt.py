"""SimpleGPT is a decoder-only GPT-2, and its initial weights depend on the seed alone."""

import math

import pytest
import torch

from gptrain.models import SimpleGPT

SMALL = {"vocab_size": 97, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 16}


def small_gpt(**changes) -> SimpleGPT:
    return SimpleGPT(**{**SMALL, "dropout": 0.0, **changes})


def random_tokens(batch: int = 3, time: int = 16) -> torch.Tensor:
    return torch.randint(SMALL["vocab_size"], (batch, time))


def test_forward_is_head_of_norm_of_blocks_of_embed():
    net, tokens = small_gpt().eval(), random_tokens()
    x = net.embed(tokens)
    for block in net.blocks:
        x = block(x)
    assert torch.equal(net(tokens), net.head(net.norm(x))) and net(tokens).shape == (3, 16, 97)
    assert net.hidden(tokens).shape == net.embed(tokens).shape == (3, 16, 32)


@pytest.mark.parametrize("changed", [0, 7, 15])
def test_future_tokens_do_not_change_past_logits(changed):
    net, tokens = small_gpt().eval(), random_tokens()
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % SMALL["vocab_size"]
    before, after = net(tokens), net(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.allclose(before[:, changed], after[:, changed])


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
    [(768, 12, 12, 124_439_808), (1600, 25, 48, 1_557_611_200)],
)
def test_gpt2_sizes_have_the_published_parameter_counts(d_model, n_heads, n_layers, published):
    with torch.device("meta"):
        net = SimpleGPT(50257, d_model, n_heads, n_layers, max_seq_len=1024)
    assert sum(p.numel() for p in net.parameters()) == published


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


def test_no_two_matrices_get_the_same_numbers():
    net = small_gpt()
    heads = [p.flatten()[:8] for n, p in net.named_parameters() if p.ndim == 2]
    heads = [head / head.norm() for head in heads]
    assert all(not torch.allclose(a, b) for i, a in enumerate(heads) for b in heads[:i])


def test_dropout_acts_in_training_only():
    net, tokens = small_gpt(dropout=0.5), random_tokens()
    assert not torch.equal(net(tokens), net(tokens))
    net.eval()
    assert torch.equal(net(tokens), net(tokens))
