"""How a net is partitioned over processes. torch.distributed and our `loss`; no lightning.

A strategy is one object on each rank, `strategy.ParallelStrategy` or a class of it: it partitions
the net, gives
loss and logits, and finishes a step's gradients. Lightning's side (`lit.strategies`) calls it.
Each `apply_*` changes a net in place and leaves its parameter names as they were, so that a state
dict has the bare net's keys under every strategy. What a net must offer: `gptrain.models`. The
order in which they are applied, inside `slices.make_net_on`:

    tensor or pipeline -> activation checkpointing -> compile -> FSDP

dims        the table of strategies, and how many ranks each axis takes; no torch
mesh        ranks: process group, axes       fit         what an option needs of a net
whole, ddp, diloco, sharded (fsdp, tensor), pipeline    the strategies
comparison  a user's net as a strategy runs it, against the plain one
activation  what is kept for the backward pass, and compile
gradients   sums over ranks, clipping        slices      whole tensors and their slices
state       checkpoints from and into any strategy
"""
