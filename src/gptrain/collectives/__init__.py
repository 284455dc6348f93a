"""What ranks say to each other: the eight collectives, seen on the real backend.

    python -m gptrain.collectives --explain trainer.devices=4      each rank's numbers before, after
    torchrun --nproc_per_node=4 -m gptrain.collectives --explain   under torchrun

    max_bytes  of the all-reduce (16 MiB)           trainer.devices  2 if not given

It ends with an all-reduce made of sends and receives, through rank 0 and around a ring, beside the
library's. How fast they are here: `python -m gptrain.plan --measure`.
"""
