"""Multi-GPU training of GPT language models with PyTorch Lightning and Hydra."""
