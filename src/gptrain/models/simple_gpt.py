"""SimpleGPT: a decoder-only transformer with GPT-2's architecture and initialisation.

Pre-LayerNorm, causal self-attention, GELU MLP of 4 * d_model, learned positions, head tied to the
token embedding. Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

# B batch, T time, D d_model, H heads, K d_head, V vocab

import hashlib
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptrain.models import gpt2_layout
from gptrain.models.cache import KVCache, LayerCache

INIT_STD = 0.02  # GPT-2's, for every matrix and both embeddings
GELU_APPROXIMATION = {"gelu": "none", "gelu_tanh": "tanh"}  # the second is GPT-2's own


class SimpleGPT(nn.Module):
    """GPT-2's architecture with q, k and v as projections of their own, so that heads can be split.

    Args:
        dropout: on the embedding, the attention weights, and both residual branches.
        activation: "gelu" (exact), or "gelu_tanh" (the approximation GPT-2 was trained with).

    Raises: ValueError if n_heads does not divide d_model, or the activation is not known.
    """

    tensor_plan: ClassVar[dict[str, str]] = {
        "token_embedding": "vocab_embedding",
        "position_embedding": "position_embedding",
        "blocks.*.norm_[12]": "sequence",
        "blocks.*.attention.[qkv]_proj": "colwise",
        "blocks.*.attention.out_proj": "rowwise",
        "blocks.*.mlp.up_proj": "colwise",
        "blocks.*.mlp.down_proj": "rowwise",
        "norm": "sequence",
        "head": "vocab_head",
    }

    def __init__(
        self,
        vocab_size: int = 50257,
        d_model: int = 512,
        n_heads: int = 8,
        n_layers: int = 6,
        max_seq_len: int = 512,
        dropout: float = 0.1,
        activation: str = "gelu",
    ):
        # The one random number drawn from the caller's generator, on the CPU on any device.
        init_seed = int(torch.randint(2**62, (), device="cpu"))
        super().__init__()
        self.init_seed = init_seed
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.n_heads = n_heads
        self.n_layers = n_layers
        self.max_seq_len = max_seq_len
        self.activation = activation

        with torch.device("meta"):  # the layers' own initialisation would only be overwritten
            self.token_embedding = make_embedding(vocab_size, d_model)
            self.position_embedding = make_embedding(max_seq_len, d_model)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.ModuleList(
                Block(d_model, n_heads, dropout, activation) for _ in range(n_layers)
            )
            self.norm = nn.LayerNorm(d_model)
            self.head = nn.Linear(d_model, vocab_size, bias=False)
            self.head.weight = self.token_embedding.weight

        device = torch.get_default_device()
        if device.type != "meta":
            self.to_empty(device=device)
            for name, parameter in self.named_parameters():
                self.init_parameter(name, parameter)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits (B, T, V) of the token that follows each of tokens (B, T).

        Args:
            cache: of `new_cache`, of the positions before these.
        """
        hidden = self.hidden(tokens) if cache is None else self.hidden_after(cache, tokens)
        return self.head(hidden)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Hidden states (B, T, D) after the final norm: forward without the head."""
        x = self.embed(tokens)
        for block in self.blocks.children():  # a list, or a dict of the blocks that one stage holds
            x = block(x)
        return self.norm(x)

    def hidden_after(self, cache: KVCache, tokens: Tensor) -> Tensor:
        """Likewise (B, T, D), of tokens that follow those of a cache, to which it adds them."""
        x = self.embed(tokens, cache.length)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = block(x, layer)
        return self.norm(x)

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Sum of token and position embeddings (B, T, D).

        Args:
            start: position of the first token.
        Raises: ValueError if the sequence is longer than max_seq_len.
        """
        n_tokens = start + tokens.shape[-1]
        if n_tokens > self.max_seq_len:
            raise ValueError(
                f"sequence of {n_tokens} tokens: longer than max_seq_len={self.max_seq_len}, there "
                f"is no position embedding beyond it; shorten the sequence or raise max_seq_len"
            )
        positions = torch.arange(start, n_tokens, device=tokens.device)
        return self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))

    def new_cache(self, batch_size: int) -> KVCache:
        """An empty one, for max_seq_len positions of as many sequences."""
        return KVCache(self.n_layers, batch_size, self.max_seq_len)

    to_gpt2, from_gpt2 = gpt2_layout.to_gpt2, gpt2_layout.from_gpt2

    @torch.no_grad()
    def init_parameter(self, name: str, tensor: Tensor) -> None:
        """Fill one whole parameter in place: a pure function of (init_seed, name, its shape).

        Normal(0, 0.02); biases 0, norms 1; the two projections that write into the residual stream
        are scaled by 1 / sqrt(2 * n_layers), the number of such writes. Numbers are drawn on the
        CPU in fp32 whatever the tensor's device and type, so that every device gets the same.
        """
        module, _, kind = name.rpartition(".")
        if kind == "bias":
            tensor.zero_()
        elif module.rpartition(".")[2].startswith("norm"):
            tensor.fill_(1.0)
        else:
            if module == "head":  # one storage: either name must give the same numbers
                name = "token_embedding.weight"
            writes_residual = module.endswith(("attention.out_proj", "mlp.down_proj"))
            std = INIT_STD / math.sqrt(2 * self.n_layers) if writes_residual else INIT_STD
            generator = torch.Generator().manual_seed(stable_hash(self.init_seed, name))
            normal = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
            tensor.copy_(normal.normal_(0.0, std, generator=generator))

    def _apply(self, fn, recurse=True):
        # to_empty() makes a new parameter under each name, which would untie the head.
        tied = self.head is not None and self.token_embedding is not None
        tied = tied and self.head.weight is self.token_embedding.weight
        super()._apply(fn, recurse)
        if tied:
            self.head.weight = self.token_embedding.weight
        return self


class Block(nn.Module):
    """Pre-norm transformer block, (B, T, D) -> (B, T, D), alone or after what a cache holds."""

    def __init__(self, d_model: int, n_heads: int, dropout: float, activation: str):
        super().__init__()
        self.norm_1 = nn.LayerNorm(d_model)
        self.attention = CausalSelfAttention(d_model, n_heads, dropout)
        self.norm_2 = nn.LayerNorm(d_model)
        self.mlp = MLP(d_model, activation)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x), cache))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class CausalSelfAttention(nn.Module):
    """Each position attends to itself and to those before it."""

    def __init__(self, d_model: int, n_heads: int, dropout: float):
        super().__init__()
        if d_model % n_heads:
            raise ValueError(
                f"n_heads={n_heads}: does not divide d_model={d_model}, all heads are of one size"
            )
        self.d_head = d_model // n_heads
        self.dropout = dropout
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        q, k, v = (
            # H is read off the width: this rank's heads where the columns are split over ranks
            projection(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2)  # (B, H, T, K)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v, mask = (k, v, None) if cache is None else cache.extend(k, v)
        dropout, is_causal = self.dropout if self.training else 0.0, mask is None
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        return self.out_proj(y.transpose(1, 2).flatten(2))  # (B, H, T, K) -> (B, T, D)


class MLP(nn.Module):
    """Two linear layers around a GELU, 4 * d_model wide inside."""

    def __init__(self, d_model: int, activation: str):
        super().__init__()
        if activation not in GELU_APPROXIMATION:
            raise ValueError(
                f"activation={activation!r}: not known; allowed: {', '.join(GELU_APPROXIMATION)}"
            )
        self.up_proj = nn.Linear(d_model, 4 * d_model)
        self.activation = nn.GELU(approximate=GELU_APPROXIMATION[activation])
        self.down_proj = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


def make_embedding(n: int, d_model: int) -> nn.Embedding:
    # nn.Embedding() would draw on the meta device: torch imports its compiler for that, 2 s.
    return nn.Embedding.from_pretrained(torch.empty(n, d_model), freeze=False)


def stable_hash(seed: int, name: str) -> int:
    """64 bits of (seed, name), the same in every process, which hash() is not."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
