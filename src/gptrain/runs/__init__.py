"""Runs side by side, read from their folders.

python -m gptrain.runs outputs/train                      a table, the best run first
python -m gptrain.runs outputs --json                     the same for programs
python -m gptrain.runs --diff outputs/a outputs/b         what differs between two
python -m gptrain.runs --prune outputs/a             deletes checkpoints but best and newest
"""
