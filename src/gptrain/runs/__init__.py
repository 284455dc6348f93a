"""Runs side by side, read from their folders.

python -m gptrain.runs outputs/train                      a table, the best run first
python -m gptrain.runs outputs --where optimizer.lr=1e-3 --json
python -m gptrain.runs outputs/a outputs/b --html runs.html    curves, table, differences: one page
python -m gptrain.runs --diff outputs/a outputs/b         what differs between two
"""
