"""Compare runs by reading the files in their folders.

python -m gptrain.runs outputs/train                      a table, the best run first
python -m gptrain.runs outputs --json                     the same as JSON
"""
