"""Causal self-attention, its key-value cache, the layout of sequences, and the choice of kernel.

With the cache of a net, a new token costs one position:

    cache = net.new_cache()
    net(tokens, cache)  # logits (1, T, V) of the prompt
    net(next_token, cache)  # logits (1, 1, V) of the new position only
"""

# B batch, T time, D d_model, H heads, G heads of k and v, K d_head, S positions of k and v

from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FLEX_BLOCK = 128  # tokens of a block of FlexAttention's mask
FLEX_MIN_D_HEAD = 16  # smallest size of a head in FlexAttention's CUDA kernels


@dataclass(frozen=True)
class SequenceLayout:
    """Positions of the tokens of a batch, and the documents to which the tokens belong.

    T is the number of tokens per sequence that a rank passes to the net, S that of the full
    sequence. They differ only under context parallelism, where a rank has a part of each sequence.

    Attributes:
        positions: Position of each of the rank's tokens, for the position embedding, (T,) or
            (B, T), int64. In packed documents the positions of each document start at 0.
        documents: Index of the document of each token of the full sequences, (B, S), int64. A token
            attends to itself and to the preceding tokens of its document. None if each sequence is
            one document.
        block_mask: The same mask for FlexAttention, a BlockMask. None without documents, and on any
            device but CUDA, where attention computes the mask from `documents`.
    """

    positions: Tensor
    documents: Tensor | None = None
    block_mask: Any = None

    @classmethod
    def of_documents(cls, documents: Tensor) -> "SequenceLayout":
        """Return the layout of packed documents, in each of which the positions start at 0.

        Args:
            documents: Index of the document of each token, (B, T), int64. The tokens of a
                document are neighbors.
        """
        index = torch.arange(documents.shape[1], device=documents.device)  # (T,)
        is_first = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0  # (B, T)
        positions = index - torch.where(is_first, index, 0).cummax(1).values
        block_mask = document_block_mask(documents) if documents.is_cuda else None
        return cls(positions, documents, block_mask)


def layout_argument(documents: Tensor | None) -> dict[str, SequenceLayout]:
    """Return the keyword argument `layout` of a net for documents (B, T), or {} for None.

    The layout is that of `SequenceLayout.of_documents`.
    """
    return {} if documents is None else {"layout": SequenceLayout.of_documents(documents)}


class LayerCache:
    """Keys and values of one layer for a batch of sequences, all with the same positions.

    The logits equal those without a cache up to the order of floating-point sums. A cache works for
    the first `max_seq_len` positions. A window that slides over a longer sequence changes the
    position of every token, so that no cached key or value stays valid.

    Attributes:
        length: Number of positions in the cache.
    """

    length = 0

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append keys and values of T new positions, each (B, heads of k and v, T, d_head).

        Returns:
            Keys and values of all S positions, each (B, heads of k and v, S, d_head), and a boolean
            mask (T, S), True where a new position attends. The mask is None, which stands for the
            causal mask, if the cache was empty.
        """
        start = self.length
        n_new = k.shape[2]
        mask = None
        self.length += n_new
        if start:
            k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
            mask = torch.ones(n_new, self.length, dtype=torch.bool, device=k.device).tril(start)
        self.k, self.v = k, v
        return k, v, mask


KVCache: TypeAlias = list[LayerCache]  # one for each layer of the net


class CausalSelfAttention(nn.Module):
    """Causal self-attention, (B, T, D) -> (B, T, D), with grouped heads of k and v.

    Args:
        d_model: Width D of the input and the output.
        n_heads: Number of heads of q.
        n_kv_heads: Number of heads of k and v. `n_heads / n_kv_heads` heads of q share each.
        d_head: Width K of a head.
        bias: True if the four projections have a bias.
        dropout: Dropout probability of the attention weights.

    Attributes:
        exchange: Exchange of positions with ranks that have other positions of the same sequence
            (`context_plan` in `gptrain.models`), all of which must then call the module. None if
            this rank has all positions.
    """

    exchange: Any = None

    def __init__(
        self, d_model: int, n_heads: int, n_kv_heads: int, d_head: int, bias: bool, dropout: float
    ):
        super().__init__()
        self.d_head = d_head
        self.dropout = dropout
        self.q_proj = nn.Linear(d_model, n_heads * d_head, bias)
        self.k_proj = nn.Linear(d_model, n_kv_heads * d_head, bias)
        self.v_proj = nn.Linear(d_model, n_kv_heads * d_head, bias)
        self.out_proj = nn.Linear(n_heads * d_head, d_model, bias)

    def forward(
        self, x: Tensor, cache: LayerCache | None = None, layout: SequenceLayout | None = None
    ) -> Tensor:
        """Compute causal self-attention, (B, T, D) -> (B, T, D).

        Args:
            x: Input, (B, T, D). With a cache, it holds the new positions only.
            cache: Keys and values of the preceding positions, to which new ones are appended. None
                if `x` begins the sequences.
            layout: Positions and documents of the tokens. By default the positions follow those of
                the cache. A layout with documents must not be combined with a cache, which is not
                checked.
        """
        # H and G follow from the width: under tensor parallelism a rank has only some heads.
        q = self.q_proj(x).unflatten(-1, (-1, self.d_head))  # (B, T, D) -> (B, T, H, K)
        k = self.k_proj(x).unflatten(-1, (-1, self.d_head))  # (B, T, D) -> (B, T, G, K)
        v = self.v_proj(x).unflatten(-1, (-1, self.d_head))
        start = 0 if cache is None else cache.length
        q, k = self.apply_positions(q, k, start, None if layout is None else layout.positions)
        if self.exchange is not None:
            q, k, v = self.exchange.to_heads(q, k, v)  # (B, S, h, K), (B, S, g, K)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or G, T, K)
        mask = None
        if cache is not None:
            k, v, mask = cache.extend(k, v)
        y = attend(q, k, v, mask, layout, self.dropout if self.training else 0.0).transpose(1, 2)
        if self.exchange is not None:
            y = self.exchange.to_positions(y)  # (B, S, h, K) -> (B, T, H, K)
        return self.out_proj(y.flatten(2))  # (B, T, H, K) -> (B, T, D)

    def apply_positions(
        self, q: Tensor, k: Tensor, start: int = 0, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return q and k with position information. This class returns them unchanged.

        A subclass overrides this method, for example for rotary embeddings.

        Args:
            q: Queries, (B, T, heads, d_head).
            k: Keys, (B, T, heads of k and v, d_head).
            start: Position of the first token. It has no effect with `positions`.
            positions: Position of each token, (T,) or (B, T). None if they follow each other from
                `start` on.
        """
        return q, k


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None,
    layout: SequenceLayout | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute softmax(q k^T / sqrt(K)) v, (B, H, T, K), by the kernel for this mask and device.

    Args:
        q: Queries, (B, H, T, K): H heads of T positions, each of width K.
        k: Keys, (B, G, S, K). G must divide H.
        v: Values, (B, G, S, K).
        mask: Boolean mask (T, S), True where a query attends to a position. None, for T = S,
            attends to all preceding positions and itself.
        layout: Layout of the sequences. If it has documents, T must be S, and each query attends to
            the preceding positions of its document and itself. The mask is then ignored.
        dropout: Dropout probability of the attention weights, applied in any mode.
    """
    if q.shape[1] != k.shape[1] and q.is_cuda and q.dtype == torch.float32:
        # Only the math kernel has grouped heads in fp32, and it stores a (T, T) matrix per head.
        n_repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(n_repeats, dim=1), v.repeat_interleave(n_repeats, dim=1)
    is_grouped = q.shape[1] != k.shape[1]
    if layout is not None and layout.documents is not None:
        # FlexAttention skips the blocks of other documents. It has no dropout. It is slow unless it
        # is compiled; torch.compile returns at once if this function runs inside a compiled block.
        if layout.block_mask is not None and not dropout and q.shape[-1] >= FLEX_MIN_D_HEAD:
            from torch.nn.attention.flex_attention import flex_attention  # imports the compiler

            flex = torch.compile(flex_attention) if q.is_cuda else flex_attention
            return cast(Tensor, flex(q, k, v, block_mask=layout.block_mask, enable_gqa=is_grouped))
        mask = document_mask(layout.documents)
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=mask is None, enable_gqa=is_grouped
    )


def document_mask(documents: Tensor) -> Tensor:
    """Return a boolean mask (B, 1, T, T) from the index of the document of each token, (B, T).

    It is True where a token (row) attends to a position (column) of its own document up to itself.
    """
    return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]


def document_block_mask(documents: Tensor) -> Any:
    """Return `document_mask` as the block mask of FlexAttention, from documents (B, T).

    The tokens of a document must be neighbors. The result equals that of torch's
    `create_block_mask`, which evaluates all T x T pairs of tokens.
    """
    # This import loads torch's compiler, which takes seconds.
    from torch.nn.attention.flex_attention import BlockMask

    def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    n_tokens = documents.shape[1]
    starts = torch.arange(0, n_tokens, _FLEX_BLOCK, device=documents.device)  # (N,)
    ends = (starts + _FLEX_BLOCK - 1).clamp(max=n_tokens - 1)
    first, last = documents[:, starts], documents[:, ends]  # documents of each block, (B, N)

    # A block of keys before the block of the queries is seen if the last document of the one is the
    # first of the other. Every pair of tokens is seen if both blocks are part of one document.
    is_continued = first[:, :, None] == last[:, None, :]  # (B, N blocks of queries, N of keys)
    is_one_document = last[:, :, None] == first[:, None, :]
    is_whole = (starts + _FLEX_BLOCK <= n_tokens)[:, None]  # (N, 1): the last one may be shorter
    full = is_one_document.tril(-1) & is_whole
    partial = (starts[:, None] == starts) | (is_continued.tril(-1) & ~full)
    return BlockMask.from_kv_blocks(
        *_ordered_blocks(partial),
        *_ordered_blocks(full),
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=is_seen,
        seq_lengths=(n_tokens, n_tokens),
    )


def _ordered_blocks(is_computed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks to compute, (B, N, N), as FlexAttention reads them: counts and columns.

    The columns (B, 1, N, N) of a row's blocks are followed by all others. Both are int32.
    """
    n_blocks = is_computed.sum(-1, dtype=torch.int32)
    columns = is_computed.to(torch.int8).argsort(stable=True, dim=-1, descending=True)
    return n_blocks[:, None], columns[:, None].to(torch.int32)
