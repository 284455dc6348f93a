"""Scaling-law sweep: predict the loss of a large model from runs of smaller models."""
