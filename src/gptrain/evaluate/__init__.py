"""The command `python -m gptrain.evaluate`, which scores the net of a finished run."""
