"""The parent of a run on several local devices: starts the ranks, watches them, ends them all."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from gptrain.config import problems
from gptrain.launch.outcome import JobFailed
from gptrain.launch.rank import rank_process
from gptrain.parallel.group import STORE_VARIABLE

POLL_S = 0.05
GRACE_S = 5.0  # for the other ranks to leave by themselves once one has failed


def supervise(train: Callable, cfg: DictConfig, n_ranks: int) -> dict[str, float]:
    """Runs one job in n_ranks processes of this machine and returns rank 0's metrics.

    Each rank gets the environment that torchrun would give it, so it cannot tell the difference;
    but the ranks meet at a file, not at a port.
    """
    with tempfile.TemporaryDirectory(prefix="gptrain-") as folder:
        environment = {
            "GPTRAIN_SUPERVISED": "1",
            STORE_VARIABLE: str(Path(folder) / "store"),
            "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
            "WORLD_SIZE": str(n_ranks),
            "LOCAL_WORLD_SIZE": str(n_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
            "GROUP_RANK": "0",
        }
        spawn = multiprocessing.get_context("spawn")
        hydra_cfg = HydraConfig.instance().cfg
        ranks = [
            spawn.Process(
                target=rank_process,
                args=(
                    train,
                    cfg,
                    hydra_cfg,
                    {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                ),
                name=f"rank {rank}",
            )
            for rank in range(n_ranks)
        ]
        for rank in ranks:
            rank.start()
        code = watch(ranks)
    if code != problems.DONE:
        raise JobFailed(code, f"a rank ended with {code}")
    result = Path(cfg.run_dir) / "result.json"
    return json.loads(result.read_text())["metrics"] if result.exists() else {}


def watch(ranks: list) -> int:
    """Waits for all ranks; after a failure the others get GRACE_S seconds."""
    failed_s, code = None, problems.DONE
    while any(rank.is_alive() for rank in ranks):
        time.sleep(POLL_S)
        for rank in ranks:
            if failed_s is None and rank.exitcode not in (None, 0):
                failed_s, code = time.monotonic(), rank.exitcode
        if failed_s is not None and time.monotonic() - failed_s > GRACE_S:
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
    if failed_s is None:
        code = next((rank.exitcode for rank in ranks if rank.exitcode), problems.DONE)
    return code
