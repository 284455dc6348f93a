"""`python -m gptrain.ladder`: the loss of a size that was never trained, from smaller ones."""
