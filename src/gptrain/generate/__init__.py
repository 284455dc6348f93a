"""The command `python -m gptrain.generate`; the function `gptrain.generate` is in gptrain.text."""
