"""The key-value cache of attention, with which a new token costs one position.

    cache = net.new_cache()
    net(tokens, cache)  # logits (1, T, V) of the prompt
    net(next_token, cache)  # logits (1, 1, V) of the new position only

The logits equal those without a cache up to the order of floating-point sums. A cache works for the
first `max_seq_len` positions. A window that slides over a longer sequence changes the position of
every token, so that no cached key or value stays valid.
"""

# B batch, T new positions, S old and new positions, H heads of k and v, K d_head

from typing import TypeAlias

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer for a batch of sequences, all with the same positions.

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
