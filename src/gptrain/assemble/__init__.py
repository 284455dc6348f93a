"""Builds a run from its config, and loads what a run has saved.

run       the parts of a run in their order: net, data, module, Trainer
resume    the checkpoint that a run resumes from
load      a trained net from a run folder
fit       `gptrain.fit`: train.py from Python
"""
