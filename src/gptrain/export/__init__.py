"""Takes a trained net elsewhere: one safetensors file, or a folder that transformers reads.

    python -m gptrain.export from_run=outputs/a                      the net's own names
    python -m gptrain.export from_run=outputs/a format=hf dtype=bf16 those of transformers

    format  safetensors, hf                 dtype  fp32, bf16

Written into a folder of its own (run_dir), from the run's best checkpoint or the one that
ckpt_path names. Either is a start for another run: init_from=<that folder>.
"""
