"""How a net is spread over processes. torch.distributed and our `loss`; no lightning.

Each `apply_*` changes a net in place and leaves its parameter names as they were, so that a state
dict has the bare net's keys under every strategy. What a net must offer is told in
`gptrain.models`. The order in which they are applied:

    tensor -> activation checkpointing -> compile -> FSDP      (all inside `build_spread`)

A file each. `group` and `mesh`: the ranks and their axes. `materialize`: real weights, slice by
slice. `ddp`, `fsdp`, `tensor` (with `sequence` and `vocab_loss`), `pipeline` (with `stages`): the
strategies. `activation`: what is kept for the backward pass, and compile. `gradients`: the sums
that autograd leaves to us, and clipping. `slices`, `state`: checkpoints from and into any strategy.
`count`: the bytes that went over the wire. `fit`, `unfit`: whether a net has what is needed, and
what it lacks.
"""

from gptrain.parallel.gradients import clip_grad_norm

__all__ = ["clip_grad_norm"]
