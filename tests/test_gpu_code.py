"""What runs on a GPU only, held on a CPU: devices, streams, kernels and copies that are chosen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from gptrain.loss import cross_entropy_in_place
from gptrain.models.attention import attend


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {"label_smoothing": 0.1, "z_loss": 1e-3})],
)
def test_the_compiled_loss_is_one_graph_equal_to_the_eager_one_and_in_place(dtype, options):
    torch._dynamo.reset()  # options of an earlier call may become inputs of the graph
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.manual_seed(0)
    logits = torch.randn(12, 64).to(dtype)
    targets = torch.randint(0, 61, (12,)).where(torch.arange(12) % 4 > 0, -100)
    copy = logits.clone()
    compiled = torch.compile(cross_entropy_in_place, fullgraph=True, backend=backend)
    losses, gradient = compiled(copy, targets, 61, True, **options)
    eager_losses, eager_gradient = cross_entropy_in_place(logits, targets, 61, True, **options)
    torch.testing.assert_close(losses, eager_losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, eager_gradient, rtol=1e-6, atol=1e-6)
    assert gradient is not None
    assert gradient.data_ptr() == copy.data_ptr()
    assert len(graphs) == 1
    # A scatter would write the fp32 values of all logits to memory.
    assert not [node for node in graphs[0].graph.nodes if "scatter" in str(node.target)]


@pytest.mark.parametrize(
    ("dtype", "device", "n_heads"),
    [(torch.float32, "cuda", 4), (torch.bfloat16, "cuda", 2), (torch.float32, "cpu", 2)],
)
def test_grouped_heads_are_repeated_in_fp32_on_a_gpu(monkeypatch, dtype, device, n_heads):
    """The only kernel that groups heads in fp32 stores a (T, T) matrix per head."""
    seen = []

    def record(q, k, v, *_, enable_gqa, **__):
        seen.append((k.shape[1], v.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    with FakeTensorMode():
        q, k = (torch.empty(1, n, 8, 16, dtype=dtype, device=device) for n in (4, 2))
        attend(q, k, k)
    assert seen == [(n_heads, n_heads, n_heads == 2)]
