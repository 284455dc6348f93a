"""Foundations that every other package may import: typed config, errors, run lengths, locations."""
