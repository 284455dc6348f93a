"""The table of faults: what is done to a run, how the run must end, and how it must resume."""

import os

from tests.tools.campaign import trial
from tests.tools.campaign.faults import HOOKS
from tests.tools.campaign.runs import EVERY
from tests.tools.campaign.trial import Scenario

KILL, STEP = ("SIGKILL",), ("forward", "backward", "clip", "log", "validation", "save")
# A stopped rank is killed half a minute after the others have ended.
FSDP, LOG, WAITS = ("strategy=fsdp",), ("log",), {"within_s": 50.0, "again": None}
LARGE = ("model.d_model=384", "model.n_layers=4")  # 85 MB are saved in the background
PARTITIONED = ("strategy=fsdp", "strategy=tensor_parallel", "strategy=pipeline")
DEAD = {"cause": "killed", "blames": True,
        "says": r"rank {rank} .* was killed by signal 9, .* memory ran out"}  # fmt: skip
SAVE = {"rank": 0, "step": 8, "operation": (1, 12), "cause": "killed"}  # killed in one
REFUSED = {"phases": LOG, "step": 8, "operation": (1, 9), "codes": (74,), "cause": "disk",
           "says": r"cannot save: "}  # fmt: skip
TOLD = {"codes": (75, 0), "cause": "preempted", "redo": 0}
HUNG = {"codes": (76,), "cause": "hang",
        "says": r"no progress for \d+ s: rank \d at[\s\S]*most recent call first",
        "first": ("launcher.timeout_s=4",), **WAITS}  # fmt: skip
DAMAGED = {"says": "set aside as", "tries": 50}

SCENARIOS = (
    Scenario("F01", "SIGKILL of rank 1, launcher restarts", KILL, rank=1, codes=(0,),
             first=("launcher.max_restarts=1",), tries=100),
    Scenario("F02", "SIGKILL of rank 0", KILL, rank=0, **DEAD, tries=100),
    *(Scenario("F02", f"the same, {strategy}", KILL, LOG, step=8, **DEAD, reference=(strategy,))
      for strategy in ("strategy=ddp", *PARTITIONED)),
    Scenario("F03", "SIGKILL of all processes", KILL, target="group", codes=(-9,), tries=100),
    Scenario("F04", "SIGKILL of the launcher", KILL, target="launcher", codes=(-9,), quick=True),
    Scenario("F05", "faults until done", ("SIGKILL", "SIGUSR1"), codes=(0, 70, 75), within_s=60.0,
             until_done=True, reference=("trainer.max_steps=1000",)),
    Scenario("F06", "a signal to one rank", ("SIGTERM", "SIGUSR1", "SIGINT"),
             (*STEP, "setup", "start"), **TOLD, tries=80),
    *(Scenario("F06", f"the same, {strategy}", ("SIGTERM",), STEP, **TOLD, reference=(strategy,))
      for strategy in PARTITIONED),
    Scenario("F07", "SIGTERM to all, data workers too", ("SIGTERM",), STEP, target="group", **TOLD,
             first=("data.num_workers=2",), tries=50),
    Scenario("F08", "SIGKILL in a save", KILL, LOG, **SAVE, tries=60, quick=True),
    Scenario("F08", "SIGKILL in a sharded save", KILL, LOG, **SAVE, reference=FSDP, tries=30),
    Scenario("F08", "SIGKILL in a background save", KILL, LOG, **SAVE, redo=2 * EVERY,
             reference=LARGE, tries=30),
    Scenario("F09", "the disk refuses", ("ENOSPC", "EIO", "EDQUOT"), **REFUSED, rank=0, blames=True,
             tries=90),
    Scenario("F09", "it refuses a shard", ("EIO",), **REFUSED | {"operation": (1, 3)}, blames=True,
             reference=FSDP, tries=30),
    Scenario("F10", "a limit of file sizes", ("limit_files",), **REFUSED | {"operation": (0, 0)},
             rank=0, tries=20),
    Scenario("F13", "the newest is truncated", harm=trial.truncate, **DAMAGED, quick=True),
    Scenario("F14", "a bit of the newest is flipped", harm=trial.flip, **DAMAGED),
    Scenario("F15", "shards of two steps, or one missing", harm=trial.mix_up, reference=FSDP,
             **DAMAGED),
    Scenario("F16", "all are damaged", again=65, says="no checkpoint is intact",
             harm=lambda folder, draw: [trial.flip(p, draw) for p in folder.parent.iterdir()]),
    Scenario("F17", "the folder turns read-only", ("EROFS",), **REFUSED | {"codes": (73,)}, rank=0),
    Scenario("F18", "a loss that is not a number", ("poison",), ("backward",), codes=(79,),
             cause="nonfinite", tries=30,
             says=r"step {step} is not finite; samples: \d"),
    Scenario("F18", "an infinite gradient", ("overflow",), ("backward",), codes=(79,), tries=30,
             cause="nonfinite", says=r"step {step} is not finite; samples: \d"),
    Scenario("F19", "SIGKILL of a data worker", ("kill_worker",), ("forward",), cause="error",
             blames=True, says=r"DataLoader worker \(pid.*", within_s=15.0,
             first=("data.num_workers=1",), tries=30),
    Scenario("F20", "the data set raises on a rank", ("break_data",), STEP[:4], cause="error",
             blames=True, tries=50,
             says=r"(?s)Traceback.*: planted; at step \d+ in phase "),
    Scenario("F21", "an exception on one rank", ("fail",), tuple(HOOKS), cause="error", blames=True,
             says="AssertionError: planted", tries=64),
    Scenario("F22", "SIGSTOP of a rank", ("SIGSTOP",), STEP[:4], **HUNG, tries=20),
    Scenario("F23", "SIGSTOP for two seconds", ("pause",), STEP[:4], codes=(0,),
             first=("launcher.timeout_s=6",), tries=20),
    Scenario("F24", "the interpreter's lock is held", ("hold_interpreter",), ("forward",), **HUNG),
    Scenario("F25", "a rank does not come to a collective", ("sleep",), STEP[:4], codes=(76,),
             cause="hang", first=("strategy.timeout_s=3",), **WAITS, tries=20),
    Scenario("F25", "a collective of one rank alone", ("call_alone",), STEP[:4], codes=(70, 76),
             first=("strategy.timeout_s=3",), **WAITS, tries=20),
    Scenario("F28", "no memory", ("exhaust_memory",), ("forward",), cause="memory", blames=True,
             says="out of memory: .*activation_checkpointing", tries=20),
    Scenario("F33", "older files of 2096", says=r"from step (15|55)", harm=lambda newest, _:
             [os.utime(path, (4e9, 4e9)) for path in newest.parent.iterdir() if path != newest]),
    Scenario("F34", "no room for TensorBoard", ("fill_log",), LOG, rank=0, codes=(74,), tries=20,
             says="No space left on device", first=("logger=[csv,tensorboard]",)),
    Scenario("F35", "Ctrl-C twice", ("interrupt_twice",), ("forward",), rank=0,
             codes=(130,)),
    Scenario("F36", "the same fault at each start", ("fail",), ("forward",), rank=1, step=7,
             always=True, cause="error", blames=True, first=("launcher.max_restarts=2",),
             says=r"(?s)(Traceback.*){{3}}", **WAITS | {"within_s": 60}),
    Scenario("F39", "SIGKILL in the last moments", KILL,
             ("validation", "log", "save", "end", "teardown"), step=-1, **DEAD, twice=True,
             tries=40),
)  # fmt: skip
