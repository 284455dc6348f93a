"""Llama: the decoder-only transformer that most open nets are today.

Pre-RMSNorm, causal self-attention with rotary positions and grouped key-value heads, SwiGLU MLP, no
biases. Source: Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024 (Llama 3),
arXiv:2407.21783; normalised q and k: Dehghani et al. 2023, arXiv:2302.05442, as in Qwen3.
"""

# B batch, T time, D d_model, H heads, G key-value heads, K d_head, V vocab

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptrain.models import llama_layout
from gptrain.models.cache import LayerCache
from gptrain.models.decoder import Decoder, make_embedding

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
            self.blocks = nn.ModuleList(Block(self) for _ in range(n_layers))
            self.norm = nn.RMSNorm(d_model, norm_eps)
            self.head = nn.Linear(d_model, vocab_size, bias=False)
            if tie_head:
                self.head.weight = self.token_embedding.weight

        self.fill()

    to_hugging_face, from_hugging_face = llama_layout.to_llama, llama_layout.from_llama


class Block(nn.Module):
    """Pre-norm transformer block, (B, T, D) -> (B, T, D), alone or after what a cache holds."""

    def __init__(self, sizes: Llama):
        super().__init__()
        self.norm_1 = nn.RMSNorm(sizes.d_model, sizes.norm_eps)
        self.attention = CausalSelfAttention(sizes)
        self.norm_2 = nn.RMSNorm(sizes.d_model, sizes.norm_eps)
        self.mlp = SwiGLU(sizes.d_model, sizes.d_ff)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        x = x + self.attention(self.norm_1(x), cache)
        return x + self.mlp(self.norm_2(x))


class CausalSelfAttention(nn.Module):
    """Each position attends to itself and to those before it; positions are rotations."""

    def __init__(self, sizes: Llama):
        super().__init__()
        self.d_head = sizes.d_model // sizes.n_heads
        self.rope_base, self.rope_scaling = sizes.rope_base, sizes.rope_scaling
        self.rope_interleaved = sizes.rope_interleaved
        d_kv = sizes.n_kv_heads * self.d_head
        self.q_proj = nn.Linear(sizes.d_model, sizes.d_model, bias=False)
        self.k_proj = nn.Linear(sizes.d_model, d_kv, bias=False)
        self.v_proj = nn.Linear(sizes.d_model, d_kv, bias=False)
        self.out_proj = nn.Linear(sizes.d_model, sizes.d_model, bias=False)
        self.norm_q = self.norm_k = None
        if sizes.qk_norm:
            self.norm_q, self.norm_k = (nn.RMSNorm(self.d_head, sizes.norm_eps) for _ in range(2))

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        q, k, v = (
            # H, G are read off the width: this rank's heads where they are split over ranks
            projection(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2)  # (B, H or G, T, K)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.norm_q is not None:  # autocast's 16 bit and a scale of 32 have no common kernel
            dtype = self.norm_q.weight.dtype
            q, k = self.norm_q(q.to(dtype)), self.norm_k(k.to(dtype))
        start = 0 if cache is None else cache.length
        q, k = (turned.to(v.dtype) for turned in self.rotate(q, k, start=start))
        k, v, mask = (k, v, None) if cache is None else cache.extend(k, v)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.out_proj(y.transpose(1, 2).flatten(2))  # (B, H, T, K) -> (B, T, D)

    def rotate(self, *parts: Tensor, start: int = 0) -> list[Tensor]:
        """Parts (B, H, T, K), each pair of a head's numbers turned by an angle, in fp32 or above.

        The angle grows with the position, from start on, so that q times k depends on the distance
        alone. Autograd saves the angles only. Source: Su et al. 2021, arXiv:2104.09864.
        """
        device, half = parts[0].device, self.d_head // 2
        speeds = self.rope_base ** -(torch.arange(half, device=device) / half)  # radians a position
        if self.rope_scaling != 1:  # whole for 4 turns in Llama 3's context and more, none for one
            whole = ((speeds * LLAMA3_CONTEXT / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)
            speeds = speeds * (whole + (1 - whole) / self.rope_scaling)
        positions = torch.arange(start, start + parts[0].shape[2], device=device)
        angles = torch.outer(positions, speeds)  # (T, K/2)
        cos, sin = (angles.cos(),) * 2, (-angles.sin(), angles.sin())  # (a, b): a cos - b sin, ...
        if self.rope_interleaved:
            cos, sin = (torch.stack(one, -1).flatten(-2) for one in (cos, sin))  # (T, K)
            others = (x.unflatten(-1, (half, 2)).flip(-1).flatten(-2) for x in parts)
        else:
            cos, sin = (torch.cat(one, -1) for one in (cos, sin))
            others = (x.roll(half, -1) for x in parts)
        return [torch.addcmul(x * cos, b, sin) for x, b in zip(parts, others, strict=True)]


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), d_ff wide inside. Source: Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
