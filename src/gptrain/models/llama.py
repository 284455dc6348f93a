"""Llama, the architecture of most open language models, also with the options of Qwen3.

A block has RMSNorm before each part, causal self-attention with rotary position embeddings and
grouped key-value heads, and a SwiGLU MLP. No layer has a bias.

Sources: Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024 (Llama 3), arXiv:2407.21783;
normalization of q and k: Dehghani et al. 2023, arXiv:2302.05442, as in Qwen3.
"""

# B batch, T time, D d_model, H heads, G heads of k and v, K d_head

import math
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptrain.models import hf_layout
from gptrain.models.attention import CausalSelfAttention
from gptrain.models.decoder import Block, Decoder


class Llama(Decoder):
    """Llama: a decoder with rotary positions, grouped heads of k and v, RMSNorm and SwiGLU.

    Args:
        vocab_size: Number of token ids V.
        d_model: Width D of the residual stream.
        n_heads: Number of heads of q.
        n_kv_heads: Number of heads of k and v. `n_heads / n_kv_heads` heads of q share each.
        n_layers: Number of blocks.
        d_ff: Width inside the MLP, which has three matrices.
        max_seq_len: Largest number of positions of a sequence. No memory is allocated for it.
        rope_base: Base of the rotary embedding. The slowest rotation takes about 2 pi rope_base
            positions for a full turn.
        rope_scaling: Factor by which slow rotations are slowed down further: 8 in Llama 3.1, 32 in
            Llama 3.2. 1 switches the scaling off.
        norm_eps: Epsilon of all norms.
        qk_norm: True if q and k of each head are normalized by RMSNorm. All heads of a layer share
            one scale for q and one for k.
        tie_head: True if head and token embedding share one parameter.
        d_head: Width of a head, an even number. None for `d_model / n_heads`.

    The arguments are attributes of the same names. The attribute `d_head` is never None.

    Raises:
        ValueError: If `d_head` is None and `n_heads` does not divide `d_model`.
    """

    tensor_plan: ClassVar[dict[str, str]] = {
        **Decoder.tensor_plan,
        "blocks.*.attention.norm_[qk]": "per_head",
        "blocks.*.mlp.gate_proj": "colwise",
    }

    def __init__(
        self, vocab_size: int, d_model: int, n_heads: int, n_kv_heads: int, n_layers: int,
        d_ff: int, max_seq_len: int, rope_base: float = 500000.0, rope_scaling: float = 1.0,
        norm_eps: float = 1e-5, qk_norm: bool = False, tie_head: bool = False,
        d_head: int | None = None,
    ):  # fmt: skip
        super().__init__(vocab_size, d_model, n_heads, n_layers, max_seq_len, tie_head, d_head)
        self.n_kv_heads = n_kv_heads
        self.d_ff = d_ff
        self.rope_base = rope_base
        self.rope_scaling = rope_scaling
        self.norm_eps = norm_eps
        self.qk_norm = qk_norm
        norm = partial(RMSNorm, d_model, norm_eps)
        self.build(
            lambda: Block(norm(), RotaryAttention(self), norm(), SwiGLU(d_model, d_ff)), norm
        )

    to_hugging_face = hf_layout.to_llama
    from_hugging_face = hf_layout.from_llama


class RotaryAttention(CausalSelfAttention):
    """Causal self-attention of a Llama, with rotary position embeddings (RoPE) of q and k."""

    def __init__(self, net: Llama):
        sizes = net.d_model, net.n_heads, net.n_kv_heads, net.d_head
        super().__init__(*sizes, bias=False, dropout=0.0)
        self.rope_base = net.rope_base
        self.rope_scaling = net.rope_scaling
        self.norm_q = RMSNorm(self.d_head, net.norm_eps) if net.qk_norm else None
        self.norm_k = RMSNorm(self.d_head, net.norm_eps) if net.qk_norm else None

    def apply_positions(
        self, q: Tensor, k: Tensor, start: int = 0, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Normalize q and k if `qk_norm` is set, then rotate each pair of values in fp32 or above.

        The angle of a pair is proportional to the position, so that the product of q and k depends
        on the distance of their positions (Su et al. 2021, arXiv:2104.09864). The arguments are
        those of `CausalSelfAttention.apply_positions`.
        """
        input_dtype = q.dtype
        if self.norm_q is not None and self.norm_k is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        # Positions need fp32: under trainer.precision=bf16-true, torch's default dtype is bf16.
        dtype = torch.promote_types(input_dtype, torch.float32)
        if positions is None:
            positions = torch.arange(start, start + q.shape[1], dtype=dtype, device=q.device)
        cos, sin = self._angles(positions.to(dtype))
        half = self.d_head // 2
        q, k = (torch.addcmul(x * cos, x.roll(half, -1), sin).to(input_dtype) for x in (q, k))
        return q, k

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines, each (..., T, 1, d_head), for positions (..., T).

        Values i of a head's two halves, a and b, become a cos - b sin and b cos + a sin.
        """
        half = self.d_head // 2
        fractions = torch.arange(half, dtype=positions.dtype, device=positions.device) / half
        speeds = self.rope_base**-fractions  # radians per position, (K/2,)
        if self.rope_scaling != 1:
            # Keep the speed of pairs that turn 4 times or more within Llama 3's context, divide the
            # speed of pairs that turn once or less, and interpolate in between.
            turns = speeds * hf_layout.LLAMA3_CONTEXT / (2 * math.pi)
            unscaled = ((turns - 1) / (4 - 1)).clamp(0, 1)
            speeds = speeds * (unscaled + (1 - unscaled) / self.rope_scaling)
        angles = positions[..., None, None] * speeds  # radians, (..., T, 1, K/2)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class SwiGLU(nn.Module):
    """MLP with a gate and without biases: down(silu(gate(x)) * up(x)).

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP, (B, T, D) -> (B, T, D)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.RMSNorm):
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    It is made by `RMSNorm(size of the last dimension, eps)`. The result has the dtype of the
    weight, also under autocast. Source: Zhang & Sennrich 2019, arXiv:1910.07467.

    PyTorch has one fused kernel for RMSNorm on a GPU. On a CPU, PyTorch computes the gradient by
    eight operations, each of which reads and writes the full tensor. This class needs fewer passes:
    Llama reaches 0.92 of SimpleGPT's tokens/s per model FLOP, with PyTorch's 0.84.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x, (..., D) -> (..., D)."""
        # Under autocast x may be bf16 and the weight fp32, for which PyTorch has no kernel.
        x = x.to(self.weight.dtype)
        if x.is_cpu and x.dtype == torch.float32:
            return _FewPasses.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class _FewPasses(torch.autograd.Function):
    """RMSNorm in few passes over memory: weight * u with u = x * scale.

    With g = grad * weight, the gradient of x is scale * (g - u * mean(g * u)).
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (..., D) -> (..., 1)
        scale = (norm.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx, grad):  # ty: ignore[incompatible-method-override]  # has one output
        x, weight, scale = ctx.saved_tensors
        u = x * scale
        product = grad * u  # (..., D); the sum over rows is the gradient of the weight
        mean = (product @ weight)[..., None] / x.shape[-1]  # mean(g * u), (..., 1)
        grad_x = (grad * weight).addcmul_(u, mean, value=-1).mul_(scale)
        return grad_x, product.flatten(0, -2).sum(0), None
