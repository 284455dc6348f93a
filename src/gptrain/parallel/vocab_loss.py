"""Next-token cross entropy where each rank holds a part of the vocabulary.

A rank computes its columns of the logits, a chunk of tokens at a time, with their gradients in the
same pass; ranks exchange three numbers a token. Source: Shoeybi et al. 2019, arXiv:1909.08053, 3.
"""

# C tokens of a chunk, D d_model, V vocab, v this rank's part

from collections.abc import Iterator
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gptrain.loss import chunked_next_token_loss, cross_entropy_in_place, logits_in_chunks
from gptrain.parallel.tensor import gather_vocabulary


def vocab_parallel_loss(hidden: Tensor, head_weight: Tensor, targets: Tensor, **options) -> Tensor:
    """Loss (nats) of whole hidden (..., D) under a head split by rows, the same on all ranks.

    Args:
        head_weight: DTensor (V, D), split by torch.chunk along V over its one mesh axis.
        options: chunk_tokens, reduction, label_smoothing, z_loss of chunked_next_token_loss.
    """
    assert isinstance(head_weight, DTensor)
    mesh, vocab_size = head_weight.device_mesh, head_weight.shape[0]
    operations = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}
    cross_entropy = partial(
        cross_entropy_in_place,
        start=mesh.get_local_rank() * -(-vocab_size // mesh.size()),
        vocab_size=vocab_size,
        all_reduce=lambda part, how: dist.all_reduce(part, operations[how], mesh.get_group()),
    )
    return chunked_next_token_loss(
        hidden, head_weight.to_local(), targets, cross_entropy=cross_entropy, **options
    )


def vocab_parallel_logits_in_chunks(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk_tokens: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """As loss.logits_in_chunks, under a head split by rows: whole logits (C, V) on every rank."""
    assert isinstance(head_weight, DTensor)
    group, vocab_size = head_weight.device_mesh.get_group(), head_weight.shape[0]
    local = head_weight.to_local().detach()
    for logits, counted in logits_in_chunks(hidden, local, targets, chunk_tokens):
        yield gather_vocabulary(logits, vocab_size, group), counted
