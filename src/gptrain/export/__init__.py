"""The command `python -m gptrain.export`, and the files that it writes."""
