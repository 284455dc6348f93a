"""Base class of gptrain's decoder-only transformers, their block, and their initial weights."""

# B batch, T time, D d_model, V vocab

import hashlib
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gptrain.models.attention import KVCache, LayerCache, SequenceLayout

_INIT_STD = 0.02  # standard deviation of initial matrices and embeddings, as in GPT-2


class Decoder(nn.Module):
    """Token embedding, blocks, final norm and head: the base class of the nets of gptrain.

    The constructor of a subclass calls this one, which draws the seed of all initial weights from
    torch's CPU generator. It then creates its additional layers on the meta device, and calls
    `build`. `init_parameter` and `tensor_plan` know layers by name: the two projections that write
    into the residual stream are `attention.out_proj` and `mlp.down_proj`, and names of norms begin
    with `norm`.

    The arguments are attributes of the same names. `token_embedding`, `blocks`, `norm` and `head`
    are the layers.

    Args:
        vocab_size: Number of token ids V.
        d_model: Width D of the residual stream.
        n_heads: Number of attention heads of q.
        n_layers: Number of blocks.
        max_seq_len: Largest number of positions of a sequence.
        tie_head: True if head and token embedding share one parameter.
        d_head: Width of a head. None for `d_model / n_heads`, which is then the attribute.

    Raises:
        ValueError: If `d_head` is None and `n_heads` does not divide `d_model`.
    """

    # Layers that every subclass has. The roles are those of gptrain.models.
    tensor_plan: ClassVar[dict[str, str]] = {
        "token_embedding": "vocab_embedding",
        "blocks.*.norm_[12]": "sequence",
        "blocks.*.attention.[qkv]_proj": "colwise",
        "blocks.*.attention.out_proj": "rowwise",
        "blocks.*.mlp.up_proj": "colwise",
        "blocks.*.mlp.down_proj": "rowwise",
        "norm": "sequence",
        "head": "vocab_head",
    }
    context_plan: ClassVar[tuple[str, ...]] = ("blocks.*.attention",)
    # On a pipeline stage, token_embedding, norm and head are None if another stage holds them. If
    # head and embedding share their weight, the other one of them has no more than this weight.
    token_embedding: nn.Embedding
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Linear

    def __init__(
        self, vocab_size: int, d_model: int, n_heads: int, n_layers: int, max_seq_len: int,
        tie_head: bool, d_head: int | None = None,
    ):  # fmt: skip
        super().__init__()
        # Draw only one number from the global generator, on the CPU whatever the default device is.
        self._init_seed = int(torch.randint(2**62, (), device="cpu"))
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.n_heads = n_heads
        self.n_layers = n_layers
        self.max_seq_len = max_seq_len
        self.tie_head = tie_head
        if d_head is None and d_model % n_heads:
            raise ValueError(f"d_model={d_model}: not divisible by n_heads={n_heads}")
        self.d_head = d_head or d_model // n_heads
        with torch.device("meta"):
            self.token_embedding = make_embedding(vocab_size, d_model)

    def build(
        self, make_block: Callable[[], nn.Module], make_norm: Callable[[], nn.Module]
    ) -> None:
        """Create `blocks`, `norm` and `head`, and initialize all parameters of the net.

        The parameters are allocated on the default device. If that is the meta device, they stay
        without values.

        Args:
            make_block: Function that creates one block. It is called `n_layers` times.
            make_norm: Function that creates the final norm.
        """
        with torch.device("meta"):
            self.blocks = nn.ModuleList(make_block() for _ in range(self.n_layers))
            self.norm = make_norm()
            self.head = nn.Linear(self.d_model, self.vocab_size, bias=False)
        device = torch.get_default_device()
        self.to_empty(device=device)
        if self.tie_head:
            self.head.weight = self.token_embedding.weight
        if device.type != "meta":
            for name, parameter in self.named_parameters():
                self.init_parameter(name, parameter)

    def forward(
        self, tokens: Tensor, cache: KVCache | None = None, layout: SequenceLayout | None = None
    ) -> Tensor:
        """Compute the logits (B, T, V) of the token that follows each of the tokens.

        Args:
            tokens: Token ids, (B, T).
            cache: Cache of the preceding positions, made by `new_cache`. The positions of `tokens`
                are appended to the cache. None if `tokens` are full sequences.
            layout: Positions and documents of the tokens. By default all tokens of a sequence
                belong to one document, and their positions follow those of the cache. A layout with
                documents must not be combined with a cache, which is not checked.

        Raises:
            ValueError: If the sequences, with the cached positions, are longer than `max_seq_len`,
                and there is no layout.
        """
        return self.head(self.hidden(tokens, cache, layout=layout))

    def hidden(
        self, tokens: Tensor, cache: KVCache | None = None, layout: SequenceLayout | None = None
    ) -> Tensor:
        """Compute the hidden states (B, T, D) after the final norm: `forward` without the head.

        The arguments and the error are those of `forward`.
        """
        x = self.embed(tokens, 0 if cache is None else cache[-1].length, layout)
        # A user's block may have neither argument.
        options: dict[str, Any] = {} if layout is None else {"layout": layout}
        # `blocks` is an nn.ModuleList, or an nn.ModuleDict on a pipeline stage.
        for number, block in enumerate(self.blocks.children()):
            if cache is not None:
                options["cache"] = cache[number]
            x = block(x, **options)
        return self.norm(x)

    def embed(self, tokens: Tensor, start: int = 0, layout: SequenceLayout | None = None) -> Tensor:
        """Compute the embeddings (B, T, D) of tokens (B, T), the input of the first block.

        A subclass adds the embeddings of positions, if it has a table of them. This method uses
        `start` and `layout` only to check the length.

        Args:
            tokens: Token ids, (B, T).
            start: Position of the first token. It has no effect with a layout.
            layout: Positions of the tokens. None if they follow each other from `start` on.

        Raises:
            ValueError: If the last position is not below `max_seq_len`. The positions of a layout
                are not checked.
        """
        n_tokens = start + tokens.shape[-1]
        if layout is None and n_tokens > self.max_seq_len:
            raise ValueError(f"{n_tokens} tokens: longer than max_seq_len={self.max_seq_len}")
        return self.token_embedding(tokens)

    def new_cache(self) -> KVCache:
        """Return an empty key-value cache for `forward`, which fills it, for one batch."""
        return [LayerCache() for _ in range(self.n_layers)]

    @torch.no_grad()
    def init_parameter(self, name: str, tensor: Tensor) -> None:
        """Fill one full (unsharded) parameter in place with its initial values.

        The values depend only on the seed that the constructor drew, the name and the shape. They
        are drawn on the CPU in fp32, so that they are identical for every device and, up to
        rounding, for every dtype. Biases are 0 and scales of norms are 1. All other parameters are
        drawn from Normal(0, 0.02), the two projections of a block that write into the residual
        stream with a standard deviation that is divided by sqrt(2 * n_layers).

        Args:
            name: Name of the parameter in the full net, such as `blocks.0.mlp.up_proj.weight`. That
                of a tied head is the name of the embedding.
            tensor: Tensor to fill.
        """
        module, _, kind = name.rpartition(".")
        if kind == "bias":
            tensor.zero_()
        elif module.rpartition(".")[2].startswith("norm"):
            tensor.fill_(1.0)
        else:
            writes_residual = module.endswith(("attention.out_proj", "mlp.down_proj"))
            std = _INIT_STD / math.sqrt(2 * self.n_layers) if writes_residual else _INIT_STD
            digest = hashlib.blake2b(f"{self._init_seed}:{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big", signed=True))
            normal = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
            tensor.copy_(normal.normal_(0.0, std, generator=generator))


class Block(nn.Module):
    """Pre-norm transformer block, (B, T, D) -> (B, T, D).

    It computes x = x + drop(attention(norm_1(x))), and then x + drop(mlp(norm_2(x))).

    Args:
        norm_1: Norm before the attention.
        attention: Module that is called with x, a `LayerCache` or None, and a `SequenceLayout` or
            None.
        norm_2: Norm before the MLP.
        mlp: Module that is called with x.
        dropout: Dropout probability of the outputs of attention and MLP.
    """

    def __init__(
        self, norm_1: nn.Module, attention: nn.Module, norm_2: nn.Module, mlp: nn.Module,
        dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.norm_1, self.attention, self.norm_2, self.mlp = norm_1, attention, norm_2, mlp
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, cache: LayerCache | None = None, layout: SequenceLayout | None = None
    ) -> Tensor:
        """Return the hidden states (B, T, D) after this block.

        Args:
            x: Hidden states before the block, (B, T, D). With a cache, only those of new positions.
            cache: Keys and values of the preceding positions. Those of `x` are appended. None if
                `x` begins the sequences.
            layout: Positions and documents of the tokens. None if each sequence is one document.
        """
        x = x + self.dropout(self.attention(self.norm_1(x), cache, layout))
        return x + self.dropout(self.mlp(self.norm_2(x)))


def make_embedding(n: int, d_model: int) -> nn.Embedding:
    """Return a trainable embedding (n, d_model) without initial values, on the default device."""
    # nn.Embedding() draws random values, which imports torch's compiler (2 s) on the meta device.
    return nn.Embedding.from_pretrained(torch.empty(n, d_model), freeze=False)
