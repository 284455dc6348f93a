"""What the nets that ship share: the order of their parts, attention, and initial weights."""

# B batch, T time, D d_model, H heads, G heads of k and v, K d_head, V vocab

import hashlib
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptrain.models.cache import KVCache, LayerCache

INIT_STD = 0.02  # GPT-2's, for every matrix and all embeddings


class Decoder(nn.Module):
    """Token embedding, blocks, a final norm and a head, with the whole contract of gptrain.models.

    A class of it makes `token_embedding`, `blocks`, `norm` and `head` on the meta device (their own
    initial weights would only be overwritten), then calls `fill`. In a block what writes into the
    residual stream is called `attention.out_proj` and `mlp.down_proj`, and a norm `norm…`.
    """

    tensor_plan: ClassVar[dict[str, str]] = {  # of the parts that every such net has
        "token_embedding": "vocab_embedding",
        "blocks.*.norm_[12]": "sequence",
        "blocks.*.attention.[qkv]_proj": "colwise",
        "blocks.*.attention.out_proj": "rowwise",
        "blocks.*.mlp.up_proj": "colwise",
        "blocks.*.mlp.down_proj": "rowwise",
        "norm": "sequence",
        "head": "vocab_head",
    }
    token_embedding: nn.Embedding  # like norm and head None on a pipeline's stage without it
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Linear

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        n_heads: int,
        n_layers: int,
        max_seq_len: int,
        tie_head: bool,
    ):
        super().__init__()
        # The one random number drawn from the caller's generator, on the CPU on any device.
        self.init_seed = int(torch.randint(2**62, (), device="cpu"))
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.n_heads = n_heads
        self.n_layers = n_layers
        self.max_seq_len = max_seq_len
        self.tie_head = tie_head

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits (B, T, V) of the token that follows each of tokens (B, T).

        Args:
            cache: of `new_cache`, of the positions before these, which are added to it.
        """
        return self.head(self.hidden(tokens, cache))

    def hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Hidden states (B, T, D) after the final norm: forward without the head."""
        x = self.embed(tokens, 0 if cache is None else cache.length)
        blocks = self.blocks.children()  # of a list, or of a dict that one stage holds
        if cache is None:
            for block in blocks:
                x = block(x)
        else:
            for block, layer in zip(blocks, cache.layers, strict=True):
                x = block(x, layer)
        return self.norm(x)

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Token embeddings (B, T, D), from position start on.   Raises: ValueError: too long."""
        n_tokens = start + tokens.shape[-1]
        if n_tokens > self.max_seq_len:
            message = f"longer than max_seq_len={self.max_seq_len}"
            hint = "shorten the sequence or raise max_seq_len"
            raise ValueError(f"sequence of {n_tokens} tokens: {message}; {hint}")
        return self.token_embedding(tokens)

    def new_cache(self) -> KVCache:
        return KVCache(self.n_layers)

    def fill(self) -> None:
        """Initial weights on the default device; none if that is the meta device."""
        device = torch.get_default_device()
        if device.type != "meta":
            self.to_empty(device=device)
            for name, parameter in self.named_parameters():
                self.init_parameter(name, parameter)

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
            if module == "head" and self.tie_head:  # one storage: either name, the same numbers
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

    def __init__(
        self, norm_1: nn.Module, attention: nn.Module, norm_2: nn.Module, mlp: nn.Module,
        dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.norm_1, self.attention, self.norm_2, self.mlp = norm_1, attention, norm_2, mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x), cache))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class CausalSelfAttention(nn.Module):
    """Each position attends to itself and to those before it; q's heads share those of k and v."""

    def __init__(
        self, d_model: int, n_heads: int, n_kv_heads: int, bias: bool, dropout: float = 0.0
    ):
        super().__init__()
        self.d_head, self.dropout = d_model // n_heads, dropout
        self.q_proj = nn.Linear(d_model, d_model, bias)
        self.k_proj = nn.Linear(d_model, n_kv_heads * self.d_head, bias)
        self.v_proj = nn.Linear(d_model, n_kv_heads * self.d_head, bias)
        self.out_proj = nn.Linear(d_model, d_model, bias)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        # H, G are read off the width: this rank's heads where they are split over ranks
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (one(x).unflatten(-1, (-1, self.d_head)) for one in projections)  # (B, T, H, K)
        q, k = self.place(q, k, 0 if cache is None else cache.length)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, H or G, T, K)
        k, v, mask = (k, v, None) if cache is None else cache.extend(k, v)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, is_causal=mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return self.out_proj(y.transpose(1, 2).flatten(2))  # (B, H, T, K) -> (B, T, D)

    def place(self, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Where a net's positions are in its heads: q and k (B, T, H or G, K), from start on."""
        return q, k


def make_embedding(n: int, d_model: int) -> nn.Embedding:
    # nn.Embedding() would draw on the meta device: torch imports its compiler for that, 2 s.
    return nn.Embedding.from_pretrained(torch.empty(n, d_model), freeze=False)


def stable_hash(seed: int, name: str) -> int:
    # hash() is not the same in every process.
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
