"""Keys and values of the positions that a net has seen: a new token then costs one position."""

# B batch, T new positions, S positions so far with the new ones, H heads of k and v, K d_head

import torch
from torch import Tensor


class KVCache:
    """The keys and values of all layers, for sequences that grow by as many tokens each.

        cache = net.new_cache(batch_size=1)
        net(tokens, cache)  # logits (1, T, V)
        net(next_token, cache)  # logits (1, 1, V): those of the whole sequence's last position

    They equal the logits without a cache but for the order of sums, within max_seq_len positions.
    Beyond them a window slides over the tokens, all positions change, and none can be used again.
    """

    def __init__(self, n_layers: int, batch_size: int, max_seq_len: int):
        self.layers = [LayerCache(batch_size, max_seq_len) for _ in range(n_layers)]

    @property
    def length(self) -> int:
        """Positions that are held."""
        return self.layers[-1].length


class LayerCache:
    """Of one layer; its memory is taken at the first use, of the type and heads that k has."""

    def __init__(self, batch_size: int, max_seq_len: int):
        self.batch_size, self.max_seq_len, self.length = batch_size, max_seq_len, 0
        self.k = self.v = torch.empty(0)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Adds k and v (B, H, T, K), and returns those of all positions, (B, H, S, K).

        Returns: also the mask (T, S) of what each new position attends to; None where that is the
            causal order of a whole sequence.
        """
        start, self.length = self.length, self.length + k.shape[2]
        if not start:
            shape = (self.batch_size, k.shape[1], self.max_seq_len, k.shape[3])
            self.k, self.v = k.new_empty(shape), v.new_empty(shape)
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        mask = None
        if start:
            mask = torch.ones(k.shape[2], self.length, dtype=torch.bool, device=k.device)
            mask = mask.tril(start)
        return self.k[:, :, : self.length], self.v[:, :, : self.length], mask
