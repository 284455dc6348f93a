"""How a run survives: nothing here knows a model, a trainer or a configuration.

lock       one run, one folder
status     how it ended: status.json, result.json
store      checkpoints that are whole or do not exist (saving: one save on all ranks; draft: files
           in the making; manifest: what a checkpoint consists of; tidy: folders put out of the way;
           fileops: every file operation of a save)
sharded    the same for torch.distributed.checkpoint
safe_load  loading that cannot run foreign code
rng        random numbers, taken and put back
signals    a request to stop is a flag
watchdog   no rank waits for ever (heartbeat: its signs of life, and a watch from outside)
"""
