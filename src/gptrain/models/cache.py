"""Keys and values of the positions that a net has seen: a new token then costs one position."""

# B batch, T new positions, S positions so far with the new ones, H heads of k and v, K d_head

import torch
from torch import Tensor


class KVCache:
    """The keys and values of all layers, for sequences that grow by as many tokens each.

        cache = net.new_cache()
        net(tokens, cache)  # logits (1, T, V)
        net(next_token, cache)  # logits (1, 1, V): those of the whole sequence's last position

    They equal the logits without a cache but for the order of sums, within max_seq_len positions.
    Beyond them a window slides over the tokens, all positions change, and none can be used again.
    """

    def __init__(self, n_layers: int):
        self.layers = [LayerCache() for _ in range(n_layers)]

    @property
    def length(self) -> int:
        """Positions that are held."""
        return self.layers[-1].length


class LayerCache:
    """Of one layer."""

    length = 0

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Adds k and v (B, H, T, K), and returns those of all positions, (B, H, S, K).

        Returns: also the mask (T, S) of what each new position attends to; None where that is the
            causal order of a whole sequence.
        """
        start, n_new, mask = self.length, k.shape[2], None
        self.length += n_new
        if start:
            k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
            mask = torch.ones(n_new, self.length, dtype=torch.bool, device=k.device).tril(start)
        self.k, self.v = k, v
        return k, v, mask
