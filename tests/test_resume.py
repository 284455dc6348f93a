"""Whether a run may go on. That it then equals a run without a stop: see tests/interruption."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from gptrain.assemble.resume import continue_run, find_checkpoint, identity
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core.errors import ConfigError
from gptrain.core.lengths import BatchPlan, RunLengths
from tests.command_line import compose_run

RUN = "a" * 32
LOCK = SimpleNamespace(run_id=RUN)


@pytest.fixture
def compose(tmp_path):
    """Make typed configs of a small run in a new folder."""
    return partial(compose_run, "model=gpt_nano", "trainer=cpu", f"run_dir={tmp_path}/run")


def save(cfg, step: int, metrics: dict[str, float]) -> None:
    Path(cfg.run_dir).mkdir(exist_ok=True)
    store = CheckpointStore(f"{cfg.run_dir}/checkpoints", RUN)
    store.save(step, {}, {}, config=identity(cfg))
    store.set_metrics(step, metrics)


def test_other_content_of_the_data_is_refused(compose):
    cfg, lengths = compose("ckpt_path=last"), RunLengths(BatchPlan(1, 1, 1), 16, 1, None, 1)
    saved = {"data": "0123", "trainer.precision": "32-true"}
    first, other = SimpleNamespace(fingerprint="0123"), SimpleNamespace(fingerprint="4567")
    assert continue_run(cfg, lengths, first, saved)[0].trainer.precision == "32-true"
    with pytest.raises(ConfigError, match="data=4567: the checkpoint was made with 0123"):
        continue_run(cfg, lengths, other, saved)
    continue_run(compose("ckpt_path=last", "allow_changes=[data]"), lengths, other, saved)


@pytest.mark.parametrize("mode, step", [("min", 5), ("max", 6)])
def test_the_best_checkpoint_is_chosen_by_the_monitor_and_its_mode(compose, mode, step):
    for saved, value in ((5, 1.0), (6, 3.0), (7, 2.0)):
        save(compose(), saved, metrics={"mine": value, "val/loss": value})
    cfg = compose("ckpt_path=best", "checkpoint.monitor=mine", f"checkpoint.mode={mode}")
    assert find_checkpoint(cfg, LOCK).name == f"step-{step:08d}"
    # A path of a run means its newest checkpoint.
    cfg = compose(f"ckpt_path={cfg.run_dir}", f"checkpoint.mode={mode}")
    assert find_checkpoint(cfg, LOCK).name == "step-00000007"
