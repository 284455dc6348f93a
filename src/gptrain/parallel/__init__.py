"""Parallelism strategies: how a net is partitioned over ranks, and how its loss is computed.

The package uses torch.distributed, `gptrain.core`, `gptrain.loss` and `gptrain.models.attention`,
but not Lightning. Every rank has one object of `base.Parallel`, or of its subclass for pipelines.
It partitions the net, computes loss and logits, and completes the gradients of a step. The
Lightning strategies of `gptrain.lit.strategies` call it.

Every partitioning changes the net in place and keeps the names of its parameters, so that a state
dict has the same keys under every strategy. `gptrain.models` describes what a strategy needs of a
net. `gptrain.lit.strategies.build_strategy` applies the changes in this order:

    tensor, context or pipeline parallelism -> activation checkpointing -> compile -> FSDP

See README.md of this package for its files, and `gptrain.core.strategies` for the table of
strategies and their options.
"""
