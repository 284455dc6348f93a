"""Compare runs and remove their surplus checkpoints, by reading the files in their folders.

python -m gptrain.runs outputs/train                      a table, the best run first
python -m gptrain.runs outputs --json                     the same as JSON
python -m gptrain.runs --diff outputs/a outputs/b         keys in which two runs differ
python -m gptrain.runs --prune outputs/a                  deletes all checkpoints but the best,
                                                          the newest, and those that have the
                                                          frozen weights of other runs
"""
