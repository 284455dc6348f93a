"""Checkpoints and other files that let a run survive a failure.

Nothing in this package knows a model, a Trainer or a typed config. The modules:

lock       one process per run folder, one run per run folder
status     how a run ended: status.json, result.json
store      checkpoints that are complete or do not exist
writer     one rank's part of one save
manifest   list of a checkpoint's files with their hashes
timeline   phases of every start of a run, and its goodput: timeline.jsonl
json_lines files with one JSON object per line
fileops    file operations that survive a power cut
mirror     copies of the checkpoints in another folder or in an object store
safe_load  loading of torch's files without running code
shards     tensors in safetensors files, each rank's shards in files of its own
rng        states of the random generators
signature  proof that this user started a run on this machine
"""
