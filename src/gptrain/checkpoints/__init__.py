"""How a run survives: nothing here knows a model, a trainer or a configuration.

lock       one run, one folder
status     how a run ended: status.json, result.json
store      checkpoints that are complete or do not exist (draft: one while it is written; manifest:
           what it consists of; fileops: file operations that survive a power cut)
mirror     a copy of them in another folder, or in an object store
safe_load  torch's files: loading that cannot run foreign code, shards of ranks
rng        states of the random generators
signals    a request to stop is a flag
watchdog   no rank waits for ever: heartbeats, and the watch over them in the rank and outside
"""
