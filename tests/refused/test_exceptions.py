"""An exception in a step of a run ends it with its exit code, and one line. See exceptions.yaml."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import yaml
from lightning.pytorch import Callback

from gptrain.checkpoints.files import SaveFailedError
from gptrain.checkpoints.manifest import DamagedCheckpointError
from gptrain.data import DataError
from tests.refused.commands import RUN
from tests.run import train

EXCEPTIONS = yaml.safe_load(Path(__file__).with_name("exceptions.yaml").read_text())
NAMES = {"errno": errno}
NAMES |= {error.__name__: error for error in (DataError, SaveFailedError, DamagedCheckpointError)}


class Raises(Callback):
    """Raises the exception of this row of exceptions.yaml in the step after a validation."""

    def __init__(self, row: int) -> None:
        self.row = row

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            raise eval(list(EXCEPTIONS)[self.row], NAMES)


@pytest.mark.parametrize("row", range(len(EXCEPTIONS)), ids=list(EXCEPTIONS))
def test_an_exception_is_an_exit_code_and_one_line(row):
    callback = f"+callbacks.raises={{_target_:tests.refused.test_exceptions.Raises,row:{row}}}"
    words = ("checkpoint=none", "trainer.val_check_interval=1", "trainer.limit_val_batches=1")
    run = train(*RUN.split(), *words, callback)
    cause = run.status["cause"]
    errors = [line for line in run.err.splitlines() if line.startswith("error: ")]
    assert [f"{run.code} {cause} {line}" for line in errors] == [list(EXCEPTIONS.values())[row]]
    assert ("Traceback" in run.err) == (cause in ("error", "memory"))
    assert errors[0].endswith("; at step 2 in phase train") == (cause == "error"), run.err
    assert not (run.folder / "result.json").exists()


class Keeps(Callback):
    """Has a state that no resume could load."""

    def state_dict(self):
        return {"best": np.float64(1)}


def test_a_state_that_no_resume_could_load_ends_the_run_at_its_first_save():
    run = train(*RUN.split(), "+callbacks.keeps._target_=tests.refused.test_exceptions.Keeps")
    assert (run.code, run.status["checkpoint"]) == (70, None)
    assert "rank 0 cannot save: TypeError: a state holds numpy" in run.err
