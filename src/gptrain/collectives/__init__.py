"""The command `python -m gptrain.collectives`, which shows what each collective operation does."""
