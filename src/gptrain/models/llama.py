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
from gptrain.models.rms_norm import RMSNorm


class Llama(Decoder):
    """Llama's architecture.

    Args:
        n_kv_heads: heads of k and v, each shared by n_heads / n_kv_heads heads of q.
        d_ff: width inside the MLP, of which there are three matrices.
        max_seq_len: longest sequence that is taken; nothing is allocated for it.
        rope_base: the slowest rotation takes about 2 pi rope_base positions a turn.
        rope_scaling: Llama 3.1's (8) and 3.2's (32) factor for slow rotations; 1: none.
        qk_norm: RMSNorm of each head's q and k, with one scale for all heads.
        tie_head: head and token embedding are one parameter.

    Raises: ValueError for heads that do not divide, or that cannot be rotated.
    """

    tensor_plan: ClassVar[dict[str, str]] = {
        **Decoder.tensor_plan,
        "blocks.*.attention.norm_[qk]": "per_head",
        "blocks.*.mlp.gate_proj": "colwise",
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
        norm_eps: float = 1e-5,
        qk_norm: bool = False,
        tie_head: bool = False,
    ):
        super().__init__(vocab_size, d_model, n_heads, n_layers, max_seq_len, tie_head)
        if n_heads % n_kv_heads:
            message = f"does not divide n_heads={n_heads}, each is shared by equally many"
            raise ValueError(f"n_kv_heads={n_kv_heads}: {message}")
        if d_model % (2 * n_heads):
            message = f"d_model={d_model} is no multiple of 2 * n_heads, a head is rotated in pairs"
            raise ValueError(f"n_heads={n_heads}: {message}")
        self.n_kv_heads = n_kv_heads
        self.d_ff = d_ff
        self.rope_base = rope_base
        self.rope_scaling = rope_scaling
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
        self.norm_q = self.norm_k = None
        if sizes.qk_norm:
            self.norm_q, self.norm_k = (RMSNorm(self.d_head, sizes.norm_eps) for _ in range(2))

    def place(self, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Normalised, then each pair of a head's numbers turned by an angle, in fp32 or above.

        The angle grows with the position, from start on, so that q times k depends on the distance
        alone. Autograd saves the angles only. Source: Su et al. 2021, arXiv:2104.09864.
        """
        norm_q, norm_k = self.norm_q, self.norm_k
        parts = (q, k) if norm_q is None or norm_k is None else (norm_q(q), norm_k(k))
        # The type is named: under trainer.precision=bf16-true torch's default would be bf16.
        dtype = torch.promote_types(q.dtype, torch.float32)
        positions = torch.arange(start, start + q.shape[1], dtype=dtype, device=q.device)
        cos, sin = self.angles(positions)
        half = self.d_head // 2
        q, k = [torch.addcmul(x * cos, x.roll(half, -1), sin).to(q.dtype) for x in parts]
        return q, k

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine (T, 1, K): of a pair a cos - b sin, and b cos + a sin."""
        half = self.d_head // 2
        fractions = torch.arange(half, dtype=positions.dtype, device=positions.device) / half
        speeds = self.rope_base**-fractions  # radians a position
        if self.rope_scaling != 1:  # whole for 4 turns in Llama 3's context and more, none for one
            turns = speeds * llama_layout.LLAMA3_CONTEXT / (2 * math.pi)
            whole = ((turns - 1) / (4 - 1)).clamp(0, 1)
            speeds = speeds * (whole + (1 - whole) / self.rope_scaling)
        angles = torch.outer(positions, speeds)[:, None]  # (T, 1, K/2), radians
        cos, sin = angles.cos(), angles.sin()  # of a pair: a number of each half of the head
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), d_ff wide inside. Source: Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
