"""Parallelism strategies: how a net is partitioned over ranks, and how its loss is computed.

Every partitioning changes the net in place and keeps the names of its parameters, so that a state
dict has the same keys under every strategy. `gptrain.lit.strategies.build_strategy` applies the
changes in this order:

    tensor, context or pipeline parallelism -> activation checkpointing -> compile -> FSDP

README.md of this package describes its files. The package does not import Lightning.
"""
