"""Estimates of the memory, FLOPs, traffic and time of a run. Nothing here imports torch."""
