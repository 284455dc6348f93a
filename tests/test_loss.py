"""The chunked loss equals torch's cross entropy and never holds the logits."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gptrain.loss import (
    LossOptions,
    chunked_loss_sum,
    logits_in_chunks,
    token_losses,
)
from gptrain.models import SimpleGPT
from gptrain.models.attention import layout_argument
from gptrain.parallel.base import Batch, Parallel

B, T, D, V = 3, 7, 16, 53


@pytest.fixture(autouse=True)
def one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def problem(dtype=torch.float64, n_ignored: int = 5):
    hidden = torch.randn(B, T, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    targets = torch.randint(V, (B, T))
    targets.view(-1)[torch.randperm(B * T)[:n_ignored]] = -100
    return hidden, weight, targets


def torchs_loss(hidden, weight, targets, label_smoothing=0.0, z_loss=0.0):
    logits = F.linear(hidden, weight).flatten(0, 1)
    targets = targets.flatten()
    plain = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)
    return plain + z_loss * logits.logsumexp(-1)[targets != -100].square().sum()


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_any_chunk_and_the_plain_loss_have_torchs_values_and_gradients(label_smoothing, z_loss):
    hidden, weight, targets = problem()
    options = LossOptions(label_smoothing, z_loss)
    expected = torchs_loss(hidden, weight, targets, label_smoothing, z_loss)
    gradients = torch.autograd.grad(expected * 3.0, (hidden, weight), retain_graph=True)
    chunked = partial(chunked_loss_sum, hidden, weight, targets, options)
    for loss in (
        *(chunked(chunk_tokens=n) for n in (1, 4, 7, 21, 1000)),
        token_losses(hidden @ weight.T, targets, options).sum(),
    ):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        chunked_gradients = torch.autograd.grad(
            loss * 3.0, (hidden, weight)
        )  # a loss scaler multiplies the loss
        torch.testing.assert_close(chunked_gradients, gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_for_metrics_are_those_of_the_positions_that_count(autocast):
    hidden, weight, targets = problem(torch.float32)
    head = partial(F.linear, weight=weight)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        chunks = list(logits_in_chunks(hidden, head, targets, chunk_tokens=6))
        whole = (hidden @ weight.T).flatten(0, 1).float()
    assert [len(kept) for _, kept in chunks] == [6, 6, 4]
    counts = targets.flatten() != -100
    torch.testing.assert_close(torch.cat([logits for logits, _ in chunks]), whole[counts].detach())
    assert torch.equal(torch.cat([kept for _, kept in chunks]), targets.flatten()[counts])
    assert all(x.dtype == torch.float32 and not x.requires_grad for x, _ in chunks)
    assert list(logits_in_chunks(hidden, head, torch.full((B, T), -100))) == []


def test_fp32_agrees_to_rounding_also_with_large_logits():
    hidden, weight, targets = problem(torch.float32)
    expected = torchs_loss(hidden * 30, weight, targets)
    loss = chunked_loss_sum(hidden * 30, weight, targets, chunk_tokens=4)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, weight), torch.autograd.grad(expected, weight)
    )


def test_under_bf16_autocast_it_is_as_close_to_the_exact_loss_as_the_plain_one():
    hidden, weight, targets = problem(torch.float32)
    exact = torch.autograd.grad(torchs_loss(hidden, weight, targets), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        plain = torchs_loss(hidden, weight, targets)
        chunked = chunked_loss_sum(hidden, weight, targets, chunk_tokens=4)
    assert chunked.dtype == torch.float32
    torch.testing.assert_close(chunked, plain)  # the same bf16 logits, summed in fp32
    plain_grads = torch.autograd.grad(plain, (hidden, weight))
    chunked_grads = torch.autograd.grad(chunked, (hidden, weight))
    for truth, chunked_grad, plain_grad in zip(exact, chunked_grads, plain_grads, strict=True):
        assert chunked_grad.dtype == torch.float32
        assert (chunked_grad - truth).norm() <= 1.1 * (plain_grad - truth).norm()


def test_in_fp16_no_gradient_vanishes_for_the_number_of_tokens():
    """A probability over a batch's tokens, 1 / (3000 * 4096), is about fp16's smallest number."""
    n_tokens, v = 4096, 3000
    weight = torch.zeros(v, 1, requires_grad=True)  # all tokens equally probable
    with torch.autocast("cpu", torch.float16):
        targets = torch.zeros(n_tokens, dtype=torch.int64)
        loss = chunked_loss_sum(torch.ones(n_tokens, 1), weight, targets) / n_tokens
    loss.backward()
    torch.testing.assert_close(weight.grad[1:], torch.full((v - 1, 1), 1 / v), rtol=2**-9, atol=0)


def test_bf16_weights_get_bf16_gradients_and_an_fp32_loss():
    hidden, weight, targets = problem(torch.bfloat16)
    loss = chunked_loss_sum(hidden, weight, targets, chunk_tokens=4)
    plain = token_losses(hidden @ weight.T, targets).sum()
    assert loss.dtype == plain.dtype == torch.float32
    torch.testing.assert_close(loss, plain)
    for gradient, expected in zip(
        torch.autograd.grad(loss, (hidden, weight)),
        torch.autograd.grad(plain, (hidden, weight)),
        strict=True,
    ):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(
            gradient, expected, rtol=2**-6, atol=2**-10
        )  # a few bf16 roundings


def test_a_batch_without_a_target_has_loss_and_gradients_zero():
    hidden, weight, targets = problem(n_ignored=B * T)
    for loss in (
        chunked_loss_sum(hidden, weight, targets),
        token_losses(hidden @ weight.T, targets).sum(),
    ):
        assert loss.item() == 0.0
        assert not any(grad.any() for grad in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_gets_none(frozen):
    inputs, expected = problem(), None
    hidden, weight, targets = inputs
    inputs[frozen].requires_grad_(False)
    learned = inputs[1 - frozen]
    expected = torch.autograd.grad(torchs_loss(hidden, weight, targets), learned)
    chunked_loss_sum(hidden, weight, targets, chunk_tokens=4).backward()
    torch.testing.assert_close(learned.grad, *expected)
    assert inputs[frozen].grad is None


def test_a_second_backward_is_an_error_and_not_a_wrong_gradient():
    hidden, weight, targets = problem()
    loss = chunked_loss_sum(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Watch(TorchDispatchMode):
    """Records the most elements of any operation's output, and which products ran."""

    def __init__(self):
        super().__init__()
        self.numel = 0
        self.n_matmuls = 0
        self.factor_sizes: set[int] = set()  # rows and columns of all that mm multiplies

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.n_matmuls += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        if func.overloadpacket is torch.ops.aten.mm:
            self.factor_sizes |= {size for factor in args for size in factor.shape}
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("autocast", [False, True])
def test_no_tensor_is_as_large_as_the_logits(autocast):
    n_tokens, d, v, chunk_tokens = 64, 4, 100, 8
    hidden = torch.randn(n_tokens, d, requires_grad=True)
    weight = torch.randn(v, d, requires_grad=True)
    targets = torch.randint(v, (n_tokens,))

    def largest(loss) -> int:
        with Watch() as seen, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss().backward()
        return seen.numel

    assert largest(lambda: torchs_loss(hidden[None], weight, targets[None])) == n_tokens * v
    chunked = largest(lambda: chunked_loss_sum(hidden, weight, targets, chunk_tokens=chunk_tokens))
    assert chunked == chunk_tokens * 128  # 100 rounded up to VOCAB_MULTIPLE, 64


def test_evaluation_forms_no_gradients():
    hidden, weight, targets = problem()
    with torch.no_grad(), Watch() as seen:
        loss = chunked_loss_sum(hidden, weight, targets, chunk_tokens=7)
    assert seen.n_matmuls == 3  # each chunk has a single matrix multiplication
    assert not loss.requires_grad
    torch.testing.assert_close(loss, torchs_loss(hidden, weight, targets).detach())


class OnlyForward(torch.nn.Module):
    """A net without `hidden`: its loss is computed from its logits."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, tokens, layout=None):
        return self.net(tokens, layout=layout)


def test_a_loss_through_full_logits_gets_the_options_and_the_documents_of_the_chunked_one():
    """Also the loss of a head with a bias, which a pipeline computes from hidden states."""
    net = SimpleGPT(V, D, n_heads=2, n_layers=1, max_seq_len=T, dropout=0.0)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens, (_, _, targets) = torch.randint(V, (B, T)), problem()
    documents = torch.tensor([[0] * 3 + [1] * 4] * B)
    options = LossOptions(label_smoothing=0.2, z_loss=1e-2)
    batch = Batch(tokens, targets, documents)
    parallel = Parallel()
    expected = parallel.loss_sum(net, batch, options)
    through_logits = parallel.loss_sum(OnlyForward(net), batch, options)
    torch.testing.assert_close(through_logits, expected)
    for made, other in zip(
        parallel.logits(OnlyForward(net), batch),
        parallel.logits(net, batch),
        strict=True,
    ):
        torch.testing.assert_close(made, other)
    hidden = net.hidden(tokens, **layout_argument(documents))
    net.head.bias = torch.nn.Parameter(torch.zeros(V))
    torch.testing.assert_close(parallel.head_loss(net, hidden, targets, options), expected)
