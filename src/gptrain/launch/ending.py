"""How a rank ended: an exit code, a word for status.json, and what a person is told."""

from __future__ import annotations

import shlex
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gptrain import problems
from gptrain.data import DataError
from gptrain.resilience.draft import SaveFailed
from gptrain.resilience.ends import FolderFull, NonFinite, Preempted
from gptrain.resilience.status import CHECKPOINTS_NAME
from gptrain.resilience.store import CheckpointStore

# Of gloo and nccl, about a rank that is gone.
PEER_GONE = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
OUT_OF_MEMORY = ("can't allocate memory", "out of memory")  # torch, on a CPU and on a GPU
TIMED_OUT = ("Timed out waiting", "timed out after", "Watchdog caught collective")  # gloo, nccl


@dataclass(frozen=True)
class Ending:
    """What became of one rank.

    Attributes:
        cause: one word: preempted, nonfinite, hang, config, data, disk, interrupted, peer, memory,
            error.
        line: for a person, one line.
        trace: the traceback, where only the code can explain it.
        rank: whose fault it is, where that is known to be another than the one that tells.
    """

    code: int
    cause: str
    line: str
    trace: str = ""
    rank: int | None = None


def classify(error: BaseException, doing: str = "") -> Ending:
    """The ending that an exception of the training function means.

    Args:
        doing: where the run was, told where nothing else says it.
    """
    line = f"{type(error).__name__}: {error}"
    if isinstance(error, Preempted):
        return Ending(problems.PREEMPTED, "preempted", str(error))
    if isinstance(error, NonFinite):
        return Ending(problems.NON_FINITE, "nonfinite", f"error: {error}", rank=error.rank)
    if isinstance(error, problems.ConfigError):
        return Ending(error.code, "config", str(error))
    if isinstance(error, DataError):
        return Ending(problems.BAD_DATA, "data", f"error: {error}")
    if isinstance(error, SaveFailed):
        return Ending(problems.code_of(error), "disk", f"error: {error}")
    if isinstance(error, FolderFull):
        return Ending(problems.FOLDER_UNUSABLE, "disk", f"error: {error}")
    if isinstance(error, OSError) and error.errno in problems.DISK:
        return Ending(problems.code_of(error), "disk", f"error: {line}")
    if isinstance(error, KeyboardInterrupt):
        return Ending(problems.INTERRUPTED, "interrupted", "interrupted")
    if isinstance(error, RuntimeError) and any(words in str(error) for words in TIMED_OUT):
        return Ending(problems.HUNG, "hang", f"error: a collective timed out: {first_line(error)}")
    if isinstance(error, RuntimeError) and any(words in str(error) for words in PEER_GONE):
        return Ending(problems.FAILED, "peer", f"error: another rank is gone: {first_line(error)}")
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
        line = f"error: out of memory: {first_line(error)}"
        return Ending(problems.FAILED, "memory", line, traceback.format_exc())
    line = first_line(line) + (f"; at {doing}" if doing else "")
    return Ending(problems.FAILED, "error", f"error: {line}", traceback.format_exc())


def spare_memory(cfg: DictConfig) -> str:
    """How a run that was too large for its device would do the same in less memory."""
    batch_size, ways = cfg.data.batch_size, []
    if batch_size > 1:
        ways.append(f"data.batch_size={batch_size // 2}")
        if cfg.data.global_batch_size is None:
            ways[0] += f" trainer.accumulate_grad_batches={2 * cfg.trainer.accumulate_grad_batches}"
    ways += ["model.activation_checkpointing=full", "strategy=fsdp on several devices"]
    tokens = OmegaConf.select(cfg, "data.seq_len")
    return f"a micro-batch is {batch_size} sequences of {tokens}; try {', or '.join(ways)}"


def first_line(text: object) -> str:
    """The first line of a message that may have many."""
    return (str(text).strip().splitlines() or [""])[0]


def newest_checkpoint(run_dir: str | Path) -> Path | None:
    """The newest checkpoint's folder, not verified: for words, not for loading."""
    return CheckpointStore(Path(run_dir) / CHECKPOINTS_NAME).newest()


def resume_command(cfg: DictConfig) -> str:
    """What to type to go on with this run from its newest good checkpoint."""
    mine = ("run_dir=", "ckpt_path=", "init_from=")
    typed = [word for word in HydraConfig.get().overrides.task if not word.startswith(mine)]
    run_dir = f"run_dir={quote(cfg.run_dir)}"
    return shlex.join(["python", sys.argv[0], *typed, run_dir, "ckpt_path=last"])


def quote(value: str) -> str:
    """A value as Hydra's grammar takes it, whatever characters it has."""
    plain = value.isascii() and all(char.isalnum() or char in "/_-.:" for char in value)
    return value if plain else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
