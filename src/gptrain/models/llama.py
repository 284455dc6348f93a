"""Llama: the decoder-only transformer that most open nets are today.

Pre-RMSNorm, causal self-attention with rotary positions and grouped key-value heads, SwiGLU MLP, no
biases. Source: Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024 (Llama 3),
arXiv:2407.21783; normalised q and k: Dehghani et al. 2023, arXiv:2302.05442, as in Qwen3.
"""

# B batch, T time, D d_model, H heads, G heads of k and v, K d_head

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptrain.models import llama_layout
from gptrain.models.decoder import Block, CausalSelfAttention, Decoder, make_embedding

LLAMA3_CONTEXT = 8192  # positions of Llama 3, which 3.1 and 3.2 stretch


class Llama(Decoder):
    """Llama's architecture.

    Args:
        n_kv_heads: heads of k and v, each shared by n_heads / n_kv_heads heads of q.
        d_ff: width inside the MLP, of which there are three matrices.
        max_seq_len: longest sequence that is taken; nothing is allocated for it.
        rope_base: the slowest rotation takes about 2 pi rope_base positions a turn.
        rope_scaling: Llama 3.1's (8) and 3.2's (32) factor for slow rotations; 1: none.
        rope_interleaved: rotates neighbours, as Meta's own code, not halves, as Hugging Face's.
        qk_norm: RMSNorm of each head's q and k, with one scale for all heads.
        tie_head: head and token embedding are one parameter.

    Raises: ValueError for heads that do not divide, or that cannot be rotated.
    """

    tensor_plan: ClassVar[dict[str, str]] = {
        "token_embedding": "vocab_embedding",
        "blocks.*.norm_[12]": "sequence",
        "blocks.*.attention.[qkv]_proj": "colwise",
        "blocks.*.attention.norm_[qk]": "per_head",
        "blocks.*.attention.out_proj": "rowwise",
        "blocks.*.mlp.gate_proj": "colwise",
        "blocks.*.mlp.up_proj": "colwise",
        "blocks.*.mlp.down_proj": "rowwise",
        "norm": "sequence",
        "head": "vocab_head",
    }

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        n_layers: int,
        d_ff: int,
        max_seq_len: int,
        rope_base: float = 500000.0,
        rope_scaling: float = 1.0,
        rope_interleaved: bool = False,
        norm_eps: float = 1e-5,
        qk_norm: bool = False,
        tie_head: bool = False,
    ):
        super().__init__(vocab_size, d_model, n_heads, n_layers, max_seq_len, tie_head)
        if n_heads % n_kv_heads:
            raise ValueError(
                f"n_kv_heads={n_kv_heads}: does not divide n_heads={n_heads}, each is shared by "
                f"equally many"
            )
        if d_model % (2 * n_heads):
            raise ValueError(
                f"n_heads={n_heads}: d_model={d_model} is no multiple of 2 * n_heads, and a head's "
                f"numbers are rotated in pairs"
            )
        self.n_kv_heads = n_kv_heads
        self.d_ff = d_ff
        self.rope_base = rope_base
        self.rope_scaling = rope_scaling
        self.rope_interleaved = rope_interleaved
        self.norm_eps = norm_eps
        self.qk_norm = qk_norm

        with torch.device("meta"):
            self.token_embedding = make_embedding(vocab_size, d_model)
            self.blocks = nn.ModuleList(
                Block(
                    RMSNorm(d_model, norm_eps),
                    RotaryAttention(self),
                    RMSNorm(d_model, norm_eps),
                    SwiGLU(d_model, d_ff),
                )
                for _ in range(n_layers)
            )
            self.norm = RMSNorm(d_model, norm_eps)
            self.head = nn.Linear(d_model, vocab_size, bias=False)
            if tie_head:
                self.head.weight = self.token_embedding.weight

        self.fill()

    to_hugging_face, from_hugging_face = llama_layout.to_llama, llama_layout.from_llama


class RotaryAttention(CausalSelfAttention):
    """Causal self-attention whose positions are rotations of q and k."""

    def __init__(self, sizes: Llama):
        super().__init__(sizes.d_model, sizes.n_heads, sizes.n_kv_heads, bias=False)
        self.rope_base, self.rope_scaling = sizes.rope_base, sizes.rope_scaling
        self.rope_interleaved = sizes.rope_interleaved
        self.norm_q = self.norm_k = None
        if sizes.qk_norm:
            self.norm_q, self.norm_k = (RMSNorm(self.d_head, sizes.norm_eps) for _ in range(2))

    def place(self, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Normalised, then each pair of a head's numbers turned by an angle, in fp32 or above.

        The angle grows with the position, from start on, so that q times k depends on the distance
        alone. Autograd saves the angles only. Source: Su et al. 2021, arXiv:2104.09864.
        """
        parts = (q, k) if self.norm_q is None else (self.norm_q(q), self.norm_k(k))
        cos, sin = self.angles(torch.arange(start, start + q.shape[1], device=q.device))
        if self.rope_interleaved:
            others = (x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) for x in parts)
        else:
            others = (x.roll(self.d_head // 2, -1) for x in parts)
        return tuple(
            torch.addcmul(x * cos, other, sin).to(q.dtype)
            for x, other in zip(parts, others, strict=True)
        )

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine (T, 1, K): of a pair a cos - b sin, and b cos + a sin."""
        half = self.d_head // 2
        speeds = self.rope_base ** -(torch.arange(half, device=positions.device) / half)
        if self.rope_scaling != 1:  # whole for 4 turns in Llama 3's context and more, none for one
            whole = ((speeds * LLAMA3_CONTEXT / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)
            speeds = speeds * (whole + (1 - whole) / self.rope_scaling)
        angles = torch.outer(positions, speeds)[:, None]  # (T, 1, K/2), radians
        dim = -1 if self.rope_interleaved else -2  # of the two of a pair
        cos = torch.stack((angles.cos(),) * 2, dim).flatten(-2)
        return cos, torch.stack((-angles.sin(), angles.sin()), dim).flatten(-2)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, of the weight's type.

    torch has one kernel for it on a GPU; on a CPU its gradient is taken of eight, each a pass over
    memory. Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)  # autocast's 16 bit and a scale of 32 have no common kernel
        if x.is_cpu and x.dtype == torch.float32:
            return _FewPasses.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class _FewPasses(torch.autograd.Function):
    """Keeps x and one number a row."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normal = x * scale
        product = grad * normal
        along = (product @ weight)[..., None] / x.shape[-1]
        grad_x = (grad * weight).addcmul_(normal, along, value=-1).mul_(scale)
        return grad_x, product.flatten(0, -2).sum(0), None


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), d_ff wide inside. Source: Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
