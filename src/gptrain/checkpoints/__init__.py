"""Checkpoints and other files that let a run survive a failure. See README.md."""
