"""What ranks say to each other: the eight collectives, seen and measured on the real backend.

    python -m gptrain.collectives --explain trainer.devices=4      each rank's numbers before, after
    python -m gptrain.collectives --bench trainer.devices=2        time and bandwidth, for plan
    torchrun --nproc_per_node=4 -m gptrain.collectives --bench     under torchrun

    max_bytes  the largest buffer (16 MiB)           trainer.devices  2 if not given

Both end with an all-reduce made of sends and receives in two ways beside the library's. --bench
keeps what it found in machine.json of output_dir, which `python -m gptrain.plan` reads.
"""
