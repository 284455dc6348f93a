"""Context parallelism: every rank holds a part of every sequence.

The ranks of a context group read the same samples. Each rank computes a contiguous part of the
positions. Only attention needs other positions: before attention each rank exchanges its positions
of all heads for all positions of some heads, and afterwards it exchanges them back. Each exchange
is one all-to-all, which sends (n-1)/n of a rank's values. Source: Jacobs et al. 2023
(DeepSpeed-Ulysses), arXiv:2309.14509.

All backward passes are exact adjoints of the communication. The mean of the gradients over the data
and the context ranks is then the gradient of the mean of the losses, as under DDP.
"""

# B batch, T time, n ranks of the context axis, T' = T padded to a multiple of n, t = T' / n,
# H heads of q, G heads of k and v, h = H / n, g heads of k and v on one rank, K d_head

import math
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

from gptrain.models.attention import SequenceLayout
from gptrain.parallel.requirements import Net
from gptrain.parallel.tensor import gather_sequence, pad_layout, wrap_methods


@dataclass(frozen=True)
class PartLayout(SequenceLayout):
    """Layout of the part of each sequence that one rank computes.

    Attributes:
        positions: Positions of the tokens of the part, for the position embedding, (t,) or (B, t).
        documents: Documents of the full sequences, as in `SequenceLayout`.
        block_mask: Mask of the full sequences, as in `SequenceLayout`.
        index: Places of the part's tokens in a full sequence (T,), of shape (t,). Places after the
            end are T - 1, the place of the last token.
        is_padding: True for the places after the end, (t,).
    """

    index: Tensor = field(kw_only=True)
    is_padding: Tensor = field(kw_only=True)


def apply_context_parallel(net: Net, group: dist.ProcessGroup) -> None:
    """Divide the sequences that a net computes over a group of ranks, in place.

    `net(tokens)` and `net.hidden(tokens)` still take and return full sequences (B, T), and are then
    collective: all ranks of the group pass the same tokens. With a PartLayout as `layout` they take
    the tokens (B, t) of this rank's part and return the results of the part.
    """
    exchange = _AllToAllHeads(group)
    for name, attention in net.named_modules():
        if any(fnmatch(name, pattern) for pattern in net.context_plan):
            attention.exchange = exchange
    wrap_methods(net, lambda method: partial(_run_part, method, group))


def _run_part(method, group: dist.ProcessGroup, tokens: Tensor, cache=None, layout=None) -> Tensor:
    """Run a method of the net on this rank's part of the sequences. A cache is a ValueError."""
    if cache is not None:
        raise ValueError("strategy=context_parallel has no cache; use a net of gptrain.load")
    if isinstance(layout, PartLayout):
        return method(tokens, layout=layout)
    n_tokens = tokens.shape[1]
    part = part_layout(tokens, group, layout)
    output = method(tokens[:, part.index], layout=part)  # (B, t, ...)
    output = gather_sequence(output, group)  # (B, T', ...)
    # FSDP warns about views.
    return output if output.shape[1] == n_tokens else output[:, :n_tokens].clone()


def part_layout(
    tokens: Tensor, group: dist.ProcessGroup, layout: SequenceLayout | None = None
) -> PartLayout:
    """Return the layout of this rank's part of sequences of T tokens.

    All ranks have parts of T / n tokens, rounded up, so the last parts may reach over the end.

    Args:
        tokens: Tokens of the full sequences, (B, T).
        group: The n ranks that share the sequences.
        layout: Layout of the full sequences. None if they are not divided into documents.
    """
    n_tokens = tokens.shape[1]
    part_length = -(-n_tokens // group.size())
    place = torch.arange(part_length, device=tokens.device) + group.rank() * part_length  # (t,)
    index, is_padding = place.clamp(max=n_tokens - 1), place >= n_tokens
    layout = layout or SequenceLayout(torch.arange(n_tokens, device=tokens.device))
    layout = pad_layout(layout, group.size())
    positions = layout.positions[..., place]
    return PartLayout(
        positions, layout.documents, layout.block_mask, index=index, is_padding=is_padding
    )


def sum_over_parts(total: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a scalar over the parts of the sequences, on all ranks. Collective.

    The backward pass adds the gradients of the results of all ranks.
    """
    return gather_sequence(total.reshape(1, 1), group).sum()


class _AllToAllHeads:
    """Collective exchanges of attention, described at `context_plan` in `gptrain.models`."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange q (B, t, H, K), k and v (B, t, G, K) for (B, T', h or g, K) of own heads.

        If the ranks do not divide the heads of k and v, these are repeated first. Head i of q still
        uses head i G // H of k and v, because heads are exchanged in order.
        """
        n_ranks = self.group.size()
        repeats = n_ranks // math.gcd(k.shape[2], n_ranks)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
        parts = [x.unflatten(2, (n_ranks, -1)).movedim(2, 0) for x in (q, k, v)]
        by_heads = torch.cat(parts, 3)  # (n, B, t, h + 2 g, K)
        by_positions = _exchange_rows(by_heads, self.group).movedim(0, 1)  # (B, n, t, ...)
        sizes = [part.shape[3] for part in parts]
        q, k, v = by_positions.flatten(1, 2).split(sizes, 2)  # (B, T', h, K), (B, T', g, K)
        return q, k, v

    def to_positions(self, y: Tensor) -> Tensor:
        """Exchange results (B, T', h, K) of own heads for those (B, t, H, K) of own positions."""
        by_positions = y.unflatten(1, (self.group.size(), -1)).movedim(1, 0)  # (n, B, t, h, K)
        by_heads = _exchange_rows(by_positions, self.group)
        return by_heads.movedim(0, 2).flatten(2, 3)


def _exchange_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row r of (n, ...) to rank r, and return the n rows that the ranks have sent to this."""
    return wait_tensor(all_to_all_single_autograd(rows.contiguous(), None, None, group))
